"""What went wrong with a call or a request: its kind and its scope."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FaultKind(StrEnum):
    """Why something did not succeed."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE = "rate"
    DENIED = "denied"
    """The project has no access to this zone, or no access at all."""
    LOGIN = "login"
    """Credentials expired or are missing."""
    PREEMPTED = "preempted"
    CONFLICT = "conflict"
    """Another operation is under way there: try again."""
    INVALID = "invalid"
    """Our request is wrong."""
    NOT_FOUND = "not found"
    TRANSIENT = "transient"
    """The cloud did not answer, or had an error of its own."""
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """What a fault affects."""

    ZONE = "zone"
    REGION = "region"
    PROJECT = "project"
    REQUEST = "request"


@dataclass(frozen=True)
class Fault:
    """What went wrong and what it affects."""

    kind: FaultKind
    scope: Scope


@dataclass(frozen=True)
class Refusal:
    """Why a cloud did not do what it was asked."""

    fault: Fault
    said: str
    """The reason as a sentence for the user."""


class HostPhase(StrEnum):
    """The state of a host. A lost connection does not change it: only `heard` grows old."""

    CONNECTING = "CONNECTING"
    PREPARING = "PREPARING"
    READY = "READY"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    FAILED = "FAILED"
    """The host could not be prepared: a set-up step failed, or its chips are in use."""
    MISSING = "MISSING"
    """The host answers but does not know the program we started: it was rebooted or replaced."""


@dataclass(frozen=True)
class HostReport:
    """What is known of one host."""

    index: int
    phase: HostPhase
    heard: float | None
    """When its agent last said something that made sense, by our clock."""
    detail: str = ""
    """What the host is doing, or why it cannot: `code`, `setup: uv`, `connection refused`."""
    exit_code: int | None = None
    """The exit code of the program; a negative one is a signal."""
    error_at: float | None = None
    """When the program's first error appeared, by the host's clock."""
    error: str = ""
    tail: tuple[str, ...] = ()
    started_at: float | None = None
    going_down: str = ""
    """Why the host will be gone in a moment, if it reports that: `preempted`, `shutting down`."""
    reported_at: float | None = None
    """When it last said what its program does, by our clock. A host that came back is heard
    before it has said that."""
    heartbeat: Mapping[str, object] | None = None
    rank: int | None = None
    """Its number among the hosts that run the program; None where it runs nothing."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """What the host says it is: `physical_host`, `instance_id`; empty until it has said so."""
    refused: str = ""
    """Why this host is not to be used, if so much is known against it."""
    examined: str = ""
    """How its burn-in went: `running`, `pass`, `warn`, `fail`; empty where there was none."""
    examined_said: str = ""
    examined_seconds: float = 0.0


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
