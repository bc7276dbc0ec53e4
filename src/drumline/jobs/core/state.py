"""The values that `lifecycle.decide` works on: a job, what was observed, and what is to be done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from drumline.chips import slice_of
from drumline.jobs.core.steps import Steps
from drumline.observed import HostReport, ListedPlacement, PlacementState


class Choice(NamedTuple):
    """A possible slice and its zone. A tuple, because each round looks up thousands of them."""

    accelerator: str
    zone: str

    @property
    def hosts(self) -> int:
        """How many hosts the slice has."""
        return slice_of(self.accelerator).hosts


class Status(StrEnum):
    """What a user reads in `drumline list`."""

    QUEUED = "QUEUED"
    WAITING = "WAITING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether the job stays as it is until a user acts."""
        return self in {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED}


class Wish(StrEnum):
    """What the user wants of a job now."""

    RUN = "run"
    CANCEL = "cancel"
    DELETE = "delete"
    RESTART = "restart"
    """A cancelled job was resumed before its program had stopped: run it again once it has."""


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    PROGRAM_FAILED = "program failed"
    SETUP_FAILED = "set-up failed"
    STUCK = "stuck"
    LEFT = "left"
    """The program exited to be started again: it saved its work, or was ended by its host."""
    PREEMPTED = "preempted"
    BAD_HOST = "bad host"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class PlacementPhase(StrEnum):
    """How far a placement of ours has come."""

    ASKING = "asking"
    """The cloud has not accepted the request yet."""
    QUEUED = "queued"
    BOOTING = "booting"
    READY = "ready"


@dataclass(frozen=True)
class Allowance:
    """How often each kind of failure may occur; None is without limit."""

    failures: int | None = 3
    bad_hosts: int | None = 10
    preemptions: int | None = None


@dataclass(frozen=True)
class Placement:
    """What a job asked for and holds: one or more slices of a kind, in one zone."""

    name: str
    zone: str
    accelerator: str
    """The kind of each slice."""
    hosts: int
    """The number of hosts of all slices together."""
    asked_at: float
    phase: PlacementPhase = PlacementPhase.ASKING
    ready_at: float | None = None
    slices: int = 1
    proved: bool = False
    """Whether its chips have passed the burn-in that the job or their past asks for."""

    @property
    def chips(self) -> int:
        """The number of chips of all slices together."""
        return slice_of(self.accelerator).chips * self.slices


@dataclass(frozen=True)
class Attempt:
    """One try at running the program, from the request for a slice to the outcome."""

    number: int
    started_at: float
    fence: int = 0
    """The fencing number, which grows with every attempt of any job in this database. The program
    claims its checkpoint folder with it, and programs of earlier attempts can write no more."""
    sent_at: float | None = None
    """When every host had the code."""
    running_at: float | None = None
    failed_at: float | None = None
    """When we first saw a host fail; the verdict waits for its siblings and for the cloud."""
    stuck_at: float | None = None
    """When we first saw that no step had come for too long; the verdict waits for the cloud."""
    stopping: bool = False


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed: the first failing host, by its earliest error."""

    kind: str
    host: int
    hosts: int
    error: str
    tail: tuple[str, ...] = ()
    ahead_seconds: float | None = None
    """Seconds between this error and that of the next failing host."""
    proof: str = ""
    """How a bad host was found out, as `memory.Proof` has it; empty for all other causes."""


@dataclass(frozen=True)
class Job:
    """All that decides what happens next. What is only displayed is kept elsewhere."""

    id: str
    owner: str
    """The id of this server among those that share the project; part of every name in the cloud."""
    choices: tuple[Choice, ...]
    """Pairs of accelerator and zone, in order of preference."""
    created_at: float
    allowance: Allowance = Allowance()
    slices: int = 1
    """The number of slices in the job's placement."""
    grace: float = 30.0
    stuck_after: float | None = None
    """Seconds without a new step after which the program is stuck; None is never."""
    keep: float = 3600.0
    """Seconds that a cancelled job keeps its slice for a resume."""
    kept_until: float | None = None
    """When the slice of a cancelled job is released; None while it holds none."""
    wish: Wish = Wish.RUN
    status: Status = Status.QUEUED
    reason: str = ""
    next_choice: int = 0
    asks: int = 0
    """The number of requests so far, which becomes part of their names."""
    attempts: int = 0
    failures: int = 0
    bad_hosts: int = 0
    bad_in_a_row: int = 0
    """Bad hosts since the program last made a step: only these use up the allowance."""
    preemptions: int = 0
    departures: int = 0
    """Times in a row that the program exited soon after its start, to be started again."""
    refusals: int = 0
    """Requests in a row that the cloud refused, or that failed before a slice was ready."""
    turned_down: int = 0
    """Slices in a row that the job did not take because of a host on them."""
    not_before: float = 0.0
    """Nothing is asked for, and no program is started again, before this time."""
    has_run: bool = False
    has_stepped: bool = False
    """Whether any attempt has reported a step: only then does the lack of one mean something."""
    attempt: Attempt | None = None
    placement: Placement | None = None
    parking: int = 0
    """How many slices with a bad host are kept, so that the cloud has to give others."""
    parked: tuple[Placement, ...] = ()
    """Those that are kept now, until the program runs elsewhere."""
    cause: Cause | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class Sighting:
    """What the newest successful poll of a zone says about a placement."""

    at: float
    """When the poll began."""
    listed: ListedPlacement | None
    """The placement in the listing; None where the cloud has nothing under its name any more."""

    @property
    def why_lost(self) -> str | None:
        """Why the placement was lost; None while it was not."""
        if self.listed is None:
            return "gone from the cloud"
        return self.listed.why_lost if self.listed.state is PlacementState.LOST else None


@dataclass(frozen=True)
class Zone:
    """Whether a slice may be asked for in a zone now."""

    open: bool = True
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """Everything observed that concerns one job."""

    sighting: Sighting | None = None
    """What the cloud shows; None until a poll that began after the placement was asked for."""
    hosts: tuple[HostReport, ...] = ()
    listening_since: float | None = None
    """When we began to listen to the hosts: before that, silence means nothing."""
    zones: Mapping[Choice, Zone] = field(default_factory=dict)
    old_slice_alive: bool = False
    """Whether a slice of this job that is being released may still be running the program."""
    stopped: bool = False
    """Whether the program was ended on every host that could be reached."""
    steps: Steps | None = None
    """What the attempt under way has reported about its steps."""
    mass_event: str = ""
    """What is wrong where so many hosts went bad that it cannot be the hosts; else empty."""


@dataclass(frozen=True)
class Thresholds:
    """Durations in seconds. The defaults are for Google's cloud."""

    waiting: float = 600.0
    """Time that a zone has to fill a request while another is open; a queue moves in minutes."""
    silence: float = 90.0
    """Silence of a host after which its slice is lost, if the cloud no longer calls it READY."""
    bad_silence: float = 300.0
    """Silence after which a host is bad though the cloud still calls its slice READY: live
    migration and reboots take a few minutes."""
    first_contact: float = 600.0
    """Time from READY to the first SSH connection: hosts of one slice boot minutes apart."""
    settle: float = 5.0
    """Wait after the first failure: other hosts fail too, and their reports show who was first."""
    shutdown: float = 45.0
    """Time that a host must outlive a program that was ended by a signal or that saved its work and
    exited: a preempted host has about 30 s to shut down, and ends its programs first."""
    rest: float = 2.0
    """Wait before the first restart after a failure; doubled each time up to a minute, so that a
    program does not use up its allowance during an outage of something it depends on."""
    retry: float = 10.0
    """Wait before a refused request is made again; doubled each time up to RETRY_LIMIT."""


class EffectKind(StrEnum):
    """What the supervisor is to do."""

    ASK = "ask"
    DRIVE = "drive"
    STOP = "stop"
    RELEASE = "release"
    POLL = "poll"
    SHORT = "short"


@dataclass(frozen=True)
class Effect:
    """One thing to do, about one placement. SHORT marks its zone as out of capacity."""

    kind: EffectKind
    placement: Placement
    why: str = ""


@dataclass(frozen=True)
class Event:
    """A line of the job's history."""

    kind: str
    text: str


@dataclass(frozen=True)
class Ended:
    """An attempt that is over."""

    attempt: Attempt
    outcome: Outcome
    detail: str
    cause: Cause | None = None


@dataclass(frozen=True)
class Decision:
    """The job as it is to be saved, and what follows from it."""

    job: Job
    effects: tuple[Effect, ...] = ()
    events: tuple[Event, ...] = ()
    ended: tuple[Ended, ...] = ()
