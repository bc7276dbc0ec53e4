"""Observations of slices and hosts, independent of any cloud and any kind of host.

`cloud` and `hosts` translate their observations into these values. The core of the job manager
decides by these values alone. This module imports nothing else of Drumline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# --- Faults -----------------------------------------------------------------------------------


class FaultType(StrEnum):
    """The kind of an error of the cloud."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE = "rate"
    DENIED = "denied"
    """The project has no access to this zone, or no access at all."""
    LOGIN = "login"
    """Credentials are missing or have expired."""
    PREEMPTED = "preempted"
    CONFLICT = "conflict"
    """Another operation on the same resource is in progress. Try again."""
    INVALID = "invalid"
    """The request is wrong."""
    NOT_FOUND = "not found"
    TRANSIENT = "transient"
    """The cloud did not answer, or failed itself."""
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """The scope of a fault."""

    ZONE = "zone"
    REGION = "region"
    PROJECT = "project"
    REQUEST = "request"


@dataclass(frozen=True)
class Fault:
    """An error of the cloud, by kind and scope."""

    kind: FaultType
    scope: Scope


@dataclass(frozen=True)
class Refusal:
    """A request that the cloud refused."""

    fault: Fault
    message: str
    """The reason, as a sentence for the user."""
    words: str = ""
    """The cloud's own words on one line; empty if it gave none."""

    @property
    def text(self) -> str:
        """The reason with the cloud's own words."""
        return with_words(self.message, self.words)


def with_words(message: str, words: str) -> str:
    """Return a sentence of ours with the cloud's own words beside it."""
    return f"{message} (the cloud: {words})" if words else message


# --- Hosts ------------------------------------------------------------------------------------


class HostPhase(StrEnum):
    """The phase of a host. A lost connection does not change it; only `heard_at` grows old."""

    CONNECTING = "CONNECTING"
    PREPARING = "PREPARING"
    READY = "READY"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    FAILED = "FAILED"
    """The host could not be prepared: a set-up step failed, or its chips are in use."""
    MISSING = "MISSING"
    """The host answers but does not know the program: it was rebooted or replaced."""


class ContactFault(StrEnum):
    """The side on which the cause of a failed connection to a host lies."""

    HOST = "host"
    """The host or its network. If only one host of a slice fails like this, the host is bad."""
    UNKNOWN = "unknown"
    """Either side, as when a host rejects the login. No host is blamed."""
    LOCAL = "this machine"


@dataclass(frozen=True)
class ContactFailure:
    """The reason why the newest connection to a host failed, and the runner's advice.

    Each runner has its own failures; those of SSH are in `hosts/contact.py`.
    """

    fault: ContactFault
    reason: str
    """The reason if no host of a slice can be reached: a clause."""
    change: str = ""
    """The change that helps: an imperative clause."""
    slices: int = 0
    """The number of slices that a job tries if it reaches no host of any; 0 if that does not end
    the job. A new slice has the same login, but an outage may pass."""
    answered: bool = False
    """True if the host answered, so that a program which runs there continues."""
    passes: bool = True
    """False if the failure lasts until the user changes something."""
    from_command: bool = False
    """True if a command of the user failed. Its own message then says more than `reason`."""


@dataclass(frozen=True)
class HostReport:
    """The newest state of one host."""

    index: int
    phase: HostPhase
    heard_at: float | None
    """The time when its agent last sent a valid message, by the server's clock."""
    detail: str = ""
    """The current action or error of the host: `code`, `setup: uv`, `connection refused`."""
    exit_code: int | None = None
    """The exit code of the program; negative for a signal."""
    error_at: float | None = None
    """The time when the program's first error appeared, by the host's clock."""
    error: str = ""
    tail: tuple[str, ...] = ()
    """The last lines of the program's output."""
    started_at: float | None = None
    shutdown_reason: str = ""
    """The reason if the host is about to shut down: `preempted`, `shutting down`."""
    reported_at: float | None = None
    """The time when it last reported the state of its program, by the server's clock. A host that
    came back sends other messages first."""
    heartbeat: Mapping[str, object] | None = None
    rank: int | None = None
    """Its rank among the hosts that run the program; None if it runs nothing."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """The names that the host reports: `physical_host`, `instance_id`; empty before that."""
    refused: str = ""
    """The reason why the host history excludes this host; empty if it does not."""
    burn_in: str = ""
    """The state of its burn-in: `running`, `pass`, `warn`, `fail`; empty without one."""
    burn_in_message: str = ""
    burn_in_seconds: float = 0.0
    chip_holder: str = ""
    """The process of the job itself that held the chip when the program could not open it."""
    chip_error: str = ""
    """The error of the agent's own attempt to open the chips after the program had failed."""
    location: str = ""
    """The physical location of a chip that libtpu's own log blames for the failure."""
    has_code: bool = False
    """True if it has received all files of the job."""
    sent_bytes: int = 0
    bytes_to_send: int = 0
    """The size of the files that are being sent to it; 0 if none are."""
    contact: ContactFailure | None = None
    """The reason why the newest connection failed; None if it did not."""


# --- Placements -------------------------------------------------------------------------------


class PlacementState(StrEnum):
    """The state of a placement in its cloud."""

    QUEUED = "queued"
    BOOTING = "booting"
    READY = "ready"
    LOST = "lost"
    """The placement will never run again: preempted, refused after a while, or being deleted."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a host: for the other hosts, and for the server."""

    internal_ip: str
    ssh_ip: str
    ssh_port: int = 22


@dataclass(frozen=True)
class ListedSlice:
    """A slice that exists."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    """The hosts in worker order; empty until all of them have addresses."""


@dataclass(frozen=True)
class ListedPlacement:
    """A placement as its cloud lists it: one or more slices that were requested together."""

    name: str
    zone: str
    state: PlacementState
    accelerator: str
    labels: Mapping[str, str]
    cloud_state: str
    """The cloud's own name of the state, for users who look it up there."""
    slices: tuple[ListedSlice, ...] = ()
    """The slices that exist by now."""
    lost_reason: str = ""
    refusal: Refusal | None = None
    """The reason why the cloud refused a placement that was never ready; None if preempted."""
    being_deleted: bool = False
    may_run: bool = False
    """True if one of its hosts may still run a program, even if the placement is lost."""
    maintenance: str = ""
    """The cloud's words for a maintenance of a slice that exists; empty if there is none."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The hosts of all slices, slice by slice."""
        return tuple(endpoint for part in self.slices for endpoint in part.endpoints)
