"""Placements as a cloud lists them: slices that were requested together, and their state."""

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
    """The placement will never run again: preempted, refused after a while, or being deleted."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a host: for its siblings, and for us."""

    internal_ip: str
    ssh_ip: str
    ssh_port: int = 22


@dataclass(frozen=True)
class ListedSlice:
    """A slice that exists."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    """The hosts in worker order; none while any host has no address yet."""


@dataclass(frozen=True)
class ListedPlacement:
    """A placement as its cloud lists it: one or more slices that were asked for together."""

    name: str
    zone: str
    state: PlacementState
    accelerator: str
    labels: Mapping[str, str]
    word: str
    """The cloud's own name of the state, for users who look it up there."""
    slices: tuple[ListedSlice, ...] = ()
    """The slices that exist by now."""
    why_lost: str = ""
    refusal: Refusal | None = None
    """Why the cloud refused a placement that never came up; None where it was preempted."""
    being_deleted: bool = False
    may_run: bool = False
    """Whether one of its hosts may still run a program, lost or not."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every host, slice by slice."""
        return tuple(endpoint for part in self.slices for endpoint in part.endpoints)
