"""The values that `lifecycle.decide` reads and returns: jobs, observations, decisions.

`Job` and everything in it is saved as JSON in the job database, so field names and enum values here
do not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from drumline.chips import slice_of
from drumline.jobs.core.steps import Steps
from drumline.observed import HostReport, ListedPlacement, PlacementState, Refusal


class Candidate(NamedTuple):
    """An accelerator and a zone to request it in.

    A tuple, because every round of the supervisor hashes thousands of them.
    """

    accelerator: str
    zone: str

    @property
    def hosts(self) -> int:
        """The number of hosts of the slice."""
        return slice_of(self.accelerator).hosts


class Status(StrEnum):
    """The status of a job, as `drumline list` shows it."""

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
        """True if the job stays as it is until a user acts."""
        return self in {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED}


class DesiredState(StrEnum):
    """The state that the user wants a job to reach."""

    RUN = "run"
    CANCEL = "cancel"
    DELETE = "delete"
    RESTART = "restart"
    """A cancelled job was resumed before its program had stopped. It runs again afterwards."""


class Outcome(StrEnum):
    """The end of an attempt."""

    SUCCEEDED = "succeeded"
    PROGRAM_FAILED = "program failed"
    SETUP_FAILED = "set-up failed"
    STUCK = "stuck"
    RESTARTED = "left"
    """The program saved its work and exited, or its host ended it. It is started again."""
    PREEMPTED = "preempted"
    BAD_HOST = "bad host"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class PlacementPhase(StrEnum):
    """The progress of a placement, from the request to slices that are ready."""

    REQUESTING = "asking"
    """The cloud has not accepted the request yet."""
    QUEUED = "queued"
    BOOTING = "booting"
    READY = "ready"


@dataclass(frozen=True)
class Allowance:
    """The number of times that each kind of failure may occur; None is without limit."""

    failures: int | None = 3
    bad_hosts: int | None = 10
    preemptions: int | None = None


@dataclass(frozen=True)
class Placement:
    """A job's request for one or more equal slices in one zone, and what became of it."""

    name: str
    zone: str
    accelerator: str
    """The accelerator of each slice."""
    hosts: int
    """The number of hosts of all slices together."""
    asked_at: float
    phase: PlacementPhase = PlacementPhase.REQUESTING
    ready_at: float | None = None
    accepted_at: float | None = None
    """When the cloud accepted the request."""
    operation: str = ""
    """The name of the cloud's operation that creates it; empty if it is not known."""
    booting_at: float | None = None
    """When the cloud was first observed to have granted the slices."""
    slices: int = 1
    proved: bool = False
    """True if the chips passed the burn-in that the job file or the host history asks for."""

    @property
    def chips(self) -> int:
        """The number of chips of all slices together."""
        return slice_of(self.accelerator).chips * self.slices


@dataclass(frozen=True)
class Attempt:
    """One run of the program, from the request for slices to its end."""

    number: int
    started_at: float
    fence: int = 0
    """The fencing number, which grows with every attempt of any job in this database. The program
    claims its checkpoint folder with it, and programs of earlier attempts can no longer write."""
    sent_at: float | None = None
    """When every host had received the code."""
    running_at: float | None = None
    failed_at: float | None = None
    """When the first failure of a host was observed. The decision waits for the reports of the
    other hosts and for a poll of the cloud."""
    stuck_at: float | None = None
    """When the lack of new steps was first observed. The decision waits for a poll of the cloud."""
    stopping: bool = False
    unconfirmed_at: float | None = None
    """When a host first did not confirm the stop that a user asked for."""


class CauseKind(StrEnum):
    """The kind of a failure."""

    BAD_HOST = "bad host"
    PROGRAM_FAILED = "program failed"
    SETUP_FAILED = "set-up failed"
    STUCK = "stuck"
    RESTART_REQUESTED = "go on later"
    """The program saved its work and exited with the code that asks for a restart."""
    SIGTERM = "told to end"
    """A SIGTERM that Drumline did not send ended the program."""


@dataclass(frozen=True)
class Cause:
    """The reason why an attempt failed: the first host that failed, and its earliest error."""

    kind: str
    """A `CauseKind`."""
    host: int
    hosts: int
    error: str
    tail: tuple[str, ...] = ()
    ahead_seconds: float | None = None
    """Seconds between this error and the error of the next host that failed."""
    proof: str = ""
    """The `EvidenceKind` against the bad host; empty for all other causes."""


@dataclass(frozen=True)
class Job:
    """Everything that decides what happens next to a job. Data for display is kept elsewhere."""

    id: str
    owner: str
    """The id of this job database. It is part of every resource name in the cloud."""
    choices: tuple[Candidate, ...]
    """The candidates, in order of preference."""
    created_at: float
    allowance: Allowance = Allowance()
    slices: int = 1
    """The number of slices in the job's placement."""
    grace: float = 30.0
    """Seconds from SIGTERM to SIGKILL when the program is stopped."""
    stuck_after: float | None = None
    """Seconds without a new step after which the program counts as stuck; None is never."""
    keep: float = 3600.0
    """Seconds that a cancelled job keeps its slices for a resume."""
    kept_until: float | None = None
    """When the slices of a cancelled job are released; None while it holds none."""
    wish: DesiredState = DesiredState.RUN
    deletes: int = 0
    """The number of deletes that users asked for. A resume that began before one is refused."""
    status: Status = Status.QUEUED
    reason: str = ""
    next_choice: int = 0
    """The index of the candidate to request next."""
    asks: int = 0
    """The number of requests so far, which is part of the placement's name."""
    attempts: int = 0
    failures: int = 0
    bad_hosts: int = 0
    bad_in_a_row: int = 0
    """Bad hosts since the program last made a step. Only these use up the allowance."""
    preemptions: int = 0
    departures: int = 0
    """Consecutive attempts in which the program soon exited to be started again."""
    refusals: int = 0
    """Consecutive requests that the cloud refused, or that failed before a slice was ready."""
    turned_down: int = 0
    """Consecutive slices that the job rejected because the host history excludes a host."""
    not_before: float = 0.0
    """The earliest time for the next request or the next start of the program."""
    has_run: bool = False
    has_stepped: bool = False
    """True if any attempt has reported a step. Only then does a lack of steps mean something."""
    attempt: Attempt | None = None
    placement: Placement | None = None
    parking: int = 0
    """The most placements with a bad host to hold back, so that the cloud must grant others."""
    parked: tuple[Placement, ...] = ()
    """The placements held back at present, until the program runs elsewhere."""
    cause: Cause | None = None
    ended_at: float | None = None


class OldProgram(StrEnum):
    """What is known of the program on a slice that is being deleted."""

    UNKNOWN = ""
    ENDED = "ended"
    FENCED = "fenced"
    """It had claimed its checkpoint folder, so it cannot write there after the next attempt."""


@dataclass(frozen=True)
class PlacementObservation:
    """A placement as the newest successful poll of its zone shows it."""

    at: float
    """When the poll began."""
    listed: ListedPlacement | None
    """The placement in the listing; None if the cloud does not have it."""
    refusal: Refusal | None = None
    """The error with which its create operation ended, if the cloud does not have it."""
    creating: bool = False
    """True if the cloud does not have it yet, because its create operation is in progress."""

    @property
    def lost_reason(self) -> str | None:
        """The reason why the placement was lost; None if it was not."""
        if self.listed is None:
            return "gone from the cloud"
        return self.listed.lost_reason if self.listed.state is PlacementState.LOST else None


@dataclass(frozen=True)
class ZoneStatus:
    """The status of a zone: open for requests or not, and the reason if not."""

    open: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Observations:
    """Everything observed about one job."""

    placement: PlacementObservation | None = None
    """The placement in the cloud; None until a poll that began after the request."""
    reports: tuple[HostReport, ...] = ()
    """The newest report of each host."""
    listening_since: float | None = None
    """When this server began to listen to the hosts. Silence before that means nothing."""
    zones: Mapping[Candidate, ZoneStatus] = field(default_factory=dict)
    old_program_may_run: bool = False
    """True if a slice that is being deleted may still run a program of this job. For a job that
    shall run, programs of other jobs with the same checkpoint folder count too."""
    stopped: bool = False
    """True if every host confirmed that the program is stopped."""
    unreachable: tuple[int, ...] = ()
    """The hosts that did not confirm the last stop."""
    steps: Steps | None = None
    """The steps that the current attempt has reported."""
    mass_failure: str = ""
    """A message if so many hosts failed at once that the hosts cannot be the cause."""


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds. The defaults are for Google Cloud."""

    waiting: float = 600.0
    """Time for a zone to fill a request while another zone is open. Queues move within minutes."""
    visible: float = 60.0
    """Time after the cloud accepted a request in which neither listings nor lookups need to have
    it. Google shows a new resource up to a minute late."""
    booting: float = 2400.0
    """Time from the grant of a slice to READY with all addresses. Large slices boot within 20
    minutes. Slices whose creation or repair failed stay in these states and use quota for ever."""
    deleting: float = 1800.0
    """Time for the deletion of a slice, which takes minutes. A deletion may also take days. Then
    the job goes on elsewhere, if the old program has ended or can no longer write checkpoints."""
    silence: float = 90.0
    """Silence of a host after which its slice is lost, if the cloud no longer calls it READY."""
    bad_silence: float = 300.0
    """Silence after which a host is bad although the cloud still calls its slice READY. Live
    migrations and reboots take a few minutes."""
    first_contact: float = 600.0
    """Time from READY to the first SSH connection. Hosts of one slice boot minutes apart."""
    settle: float = 5.0
    """Wait after the first failure for the reports of other hosts, which show who was first."""
    shutdown: float = 45.0
    """Time that a host must outlive a program that a signal ended, or that saved its work and
    exited. A preempted host has about 30 s to shut down, and ends its programs first."""
    rest: float = 2.0
    """Wait before the first restart after a failure, doubled each time up to a minute, so that a
    program does not use up its allowance during an outage of a service that it needs."""
    retry: float = 10.0
    """Wait before a refused request is repeated, doubled each time up to `RETRY_LIMIT`."""


class EffectKind(StrEnum):
    """An action of the supervisor."""

    REQUEST = "ask"
    RUN = "drive"
    """Connect to the hosts, start the program if it does not run, and listen."""
    STOP = "stop"
    RELEASE = "release"
    POLL = "poll"
    NO_CAPACITY = "short"
    """Mark the zone of the placement as out of capacity."""


@dataclass(frozen=True)
class Effect:
    """One action on one placement."""

    kind: EffectKind
    placement: Placement
    reason: str = ""


@dataclass(frozen=True)
class Event:
    """A line of the job's history."""

    kind: str
    text: str


@dataclass(frozen=True)
class EndedAttempt:
    """An attempt that is over."""

    attempt: Attempt
    outcome: Outcome
    detail: str
    cause: Cause | None = None


@dataclass(frozen=True)
class Decision:
    """The new state of a job, and the effects and events that follow from it."""

    job: Job
    effects: tuple[Effect, ...] = ()
    events: tuple[Event, ...] = ()
    ended: tuple[EndedAttempt, ...] = ()
