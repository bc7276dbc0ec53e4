"""Placements as a cloud shows them: what was asked for together, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from drumline.observed.faults import Refusal


class PlacementState(StrEnum):
    """How far a placement has come in its cloud."""

    QUEUED = "queued"
    BOOTING = "booting"
    READY = "ready"
    LOST = "lost"
    """It will never run again: preempted, refused after a while, or being deleted."""


@dataclass(frozen=True)
class Endpoint:
    """One host: where its siblings and where we reach it."""

    internal_ip: str
    ssh_ip: str
    ssh_port: int = 22


@dataclass(frozen=True)
class ListedSlice:
    """A slice that exists."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    """In worker order; none while any host has no address yet."""


@dataclass(frozen=True)
class ListedPlacement:
    """A placement as its cloud lists it: one or more slices that were asked for together."""

    name: str
    zone: str
    state: PlacementState
    accelerator: str
    labels: Mapping[str, str]
    word: str
    """The cloud's own word for the state, for people who look it up there."""
    slices: tuple[ListedSlice, ...] = ()
    """Those that exist by now."""
    why_lost: str = ""
    refusal: Refusal | None = None
    """What a placement that never came was refused with; None where the cloud took it back."""
    being_deleted: bool = False
    may_run: bool = False
    """Whether a host of it may still run a program, lost or not."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every host, slice by slice."""
        return tuple(endpoint for part in self.slices for endpoint in part.endpoints)
