"""The values that `lifecycle.decide` reads and returns: jobs, observations, decisions.

`Job` and everything in it is saved as JSON in the job database, so field names and enum values here
do not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from drumline.chips import slice_of
from drumline.jobs.core.reasons import EndReason, EventType
from drumline.jobs.core.steps import Steps
from drumline.observed import FaultType, HostReport, ListedPlacement, PlacementState, Refusal


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
        """True if the job is over. Only a user can change it then."""
        return self in {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED}


_FAILS = frozenset({Status.FAILED, Status.CANCELLED})
_RESTARTS = frozenset({Status.QUEUED})
TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: _FAILS | {Status.WAITING, Status.STARTING, Status.RECOVERING},
    Status.WAITING: _FAILS | _RESTARTS | {Status.STARTING},
    Status.STARTING: _FAILS | _RESTARTS | {Status.WAITING, Status.RUNNING},
    Status.RUNNING: _FAILS | _RESTARTS | {Status.RECOVERING, Status.SUCCEEDED},
    Status.RECOVERING: _FAILS | _RESTARTS | {Status.RUNNING},
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: _RESTARTS,
    Status.CANCELLED: _RESTARTS,
}
"""The changes of a job's status. `docs/jobs.md` has them as a diagram."""


class DesiredState(StrEnum):
    """The state that the user wants a job to reach."""

    RUN = "run"
    CANCEL = "cancel"
    DELETE = "delete"
    RESTART = "restart"
    """A cancelled job was resumed before its program had stopped. It restarts after the stop."""


class PlacementRole(StrEnum):
    """The role of a placement in its job. What a job gives up is no longer among its placements."""

    REQUESTED = "requested"
    """In the queue of the cloud, or about to be requested."""
    STARTING = "starting"
    """The cloud has granted the slices, and their hosts boot."""
    ACTIVE = "active"
    """The attempt runs here, or is about to start. At most one placement of a job is active."""
    HELD_BACK = "held back"
    """The slice has a bad host. The job keeps it so that the cloud cannot regrant that host."""


@dataclass(frozen=True)
class Allowance:
    """The number of times that each kind of failure may occur; None is without limit."""

    failures: int | None = 3
    bad_hosts: int | None = 10
    preemptions: int | None = None


@dataclass(frozen=True)
class Placement:
    """A request for one or more equal slices in one zone, and the slices that it has led to."""

    name: str
    zone: str
    accelerator: str
    """The accelerator of each slice."""
    hosts: int
    """The number of hosts of all slices together."""
    asked_at: float
    role: PlacementRole = PlacementRole.REQUESTED
    ready_at: float | None = None
    accepted_at: float | None = None
    """When the cloud accepted the request; None if it has not yet."""
    operation: str = ""
    """The name of the cloud's operation that creates it; empty if it is not known."""
    booting_at: float | None = None
    """When the cloud was first observed to have granted the slices."""
    slices: int = 1
    refusals: int = 0
    """The number of times in a row that the cloud refused it."""
    refusal: str = ""
    """The reason of the last refusal."""
    retry_at: float = 0.0
    """The earliest time to repeat it after a refusal."""
    first_asked_at: float | None = None
    """The time of the first of the requests in a row that this one replaces; None without any."""
    first_attempt: int | None = None
    """The number of the first attempt on these slices, once they are active."""
    proved: bool = False
    """True if the chips passed the burn-in that the job file or the host history asks for."""

    @property
    def candidate(self) -> Candidate:
        """The accelerator and the zone."""
        return Candidate(self.accelerator, self.zone)

    @property
    def waiting_since(self) -> float:
        """The time since when the job has waited for these slices."""
        return self.asked_at if self.first_asked_at is None else self.first_asked_at

    @property
    def queued(self) -> bool:
        """True if the cloud has accepted the request, and has not granted it yet."""
        return self.role is PlacementRole.REQUESTED and self.accepted_at is not None

    @property
    def chips(self) -> int:
        """The number of chips of all slices together."""
        return slice_of(self.accelerator).chips * self.slices


@dataclass(frozen=True)
class Attempt:
    """One run of the program, from the request for slices to the end of the program."""

    number: int
    started_at: float
    fence: int = 0
    """The fencing number, which grows with every attempt of any job in this database. The program
    claims its checkpoint folder with it, and programs of previous attempts can no longer write."""
    sent_at: float | None = None
    """The timestamp after which every host has the code."""
    running_at: float | None = None
    failed_at: float | None = None
    """The timestamp of the first observed failure of a host. The decision waits for the reports of
    the other hosts and for a poll of the cloud."""
    stuck_at: float | None = None
    """The timestamp at which a lack of steps was observed. The decision waits for a cloud poll."""
    stopping: bool = False
    unconfirmed_at: float | None = None
    """When a host that answers, or any host after a user's command, did not confirm the stop."""
    outputs_since: float | None = None
    """The end of the attempt, from which on its job waits for a copy of the outputs."""
    succeeded: bool = False
    """True if the program has succeeded, and the job ends as soon as its outputs are copied."""


@dataclass(frozen=True)
class Cause:
    """The reason for a failed attempt: the host that failed first, and its earliest error."""

    kind: EndReason
    host: int
    hosts: int
    error: str
    tail: tuple[str, ...] = ()
    ahead_seconds: float | None = None
    """Seconds between this error and the error of the next host that failed."""
    proof: str = ""
    """The `EvidenceType` against the bad host; empty for all other causes."""
    claimed: bool = False
    """True if only the program's output is against the host."""
    location: str = ""
    """The physical location of the chip, from libtpu's own log."""
    words: str = ""
    """The error of an ambiguous start, without numbers."""


@dataclass(frozen=True)
class Job:
    """The state of a job that `decide` depends on. Data for display is stored elsewhere."""

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
    """Seconds without a new step after which the program counts as stuck; None for no limit."""
    keep: float = 3600.0
    """Seconds that a cancelled job keeps its slices for a resume."""
    keep_failed: float = 300.0
    """Seconds that a failed job keeps its slices for a resume."""
    kept_until: float | None = None
    """The timestamp at which a finished job releases its slices; None if it has no slices."""
    wish: DesiredState = DesiredState.RUN
    deletes: int = 0
    """The number of deletes that users requested. A resume from before a delete is refused."""
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
    """Unproved bad hosts since the program last made progress. Only these use up the allowance."""
    preemptions: int = 0
    departures: int = 0
    """Consecutive attempts that exited quickly without a failure and were restarted."""
    patience: float = 1.0
    """Factor on the wait for capacity in a zone. The queue for reserved capacity moves in hours."""
    rates: tuple[float | None, ...] = ()
    """The price of each choice in dollars per hour, None if it is not known. Empty for a job that
    an earlier version created without `migrate`."""
    stays: bool = False
    """True if the job never leaves a healthy slice for a cheaper one."""
    ask: int = 1
    """The maximum number of zones with concurrent requests. A job of an older version uses one."""
    refusals: int = 0
    """Consecutive slices that were lost before they were ready."""
    turned_down: int = 0
    """Consecutive slices that the job rejected because the host history excludes a host."""
    unclear_starts: int = 0
    """Slices given up because a start failed that the host or the program may have caused."""
    unclear_words: str = ""
    """The error of the last such start, without numbers."""
    unclear_on: tuple[str, ...] = ()
    """The machines on which it appeared."""
    reached: bool = False
    """True if a host of any of its slices has ever answered."""
    unreached: int = 0
    """Consecutive slices of which no host was reached."""
    not_before: float = 0.0
    """The earliest timestamp of the next request or the next start of the program."""
    has_run: bool = False
    has_stepped: bool = False
    """True if any attempt has reported a step. Before that, the program never counts as stuck."""
    fences: bool = False
    """True if the program claims its checkpoint folder with its fencing number, as an attempt
    since the last resume has reported."""
    attempt: Attempt | None = None
    placements: tuple[Placement, ...] = ()
    """The requests and slices of the job, except those that are being deleted."""
    outputs: bool = False
    """True if the job file names outputs, which are copied to the home of the server."""
    parking: int | None = None
    """The maximum number of placements with a bad host to hold back; None for one for every few
    rejected placements in a row. The cloud cannot regrant a placement while it is held back."""
    cause: Cause | None = None
    ended_at: float | None = None

    @property
    def active(self) -> Placement | None:
        """The placement on which the attempt runs; None if there is none yet."""
        return next((p for p in self.placements if p.role is PlacementRole.ACTIVE), None)

    @property
    def requests(self) -> tuple[Placement, ...]:
        """The placements that are not ready yet."""
        return tuple(
            p
            for p in self.placements
            if p.role in {PlacementRole.REQUESTED, PlacementRole.STARTING}
        )

    @property
    def leading(self) -> Placement | None:
        """The active placement, else a starting one, else the first request; None without any."""
        order = {PlacementRole.ACTIVE: 0, PlacementRole.STARTING: 1, PlacementRole.REQUESTED: 2}
        candidates = (p for p in self.placements if p.role in order)
        return min(candidates, key=lambda p: order[p.role], default=None)

    @property
    def held_back(self) -> tuple[Placement, ...]:
        """The placements with a bad host, until the program runs elsewhere."""
        return tuple(p for p in self.placements if p.role is PlacementRole.HELD_BACK)

    @property
    def migrates(self) -> bool:
        """True if the job leaves a healthy slice for a cheaper one."""
        return bool(self.rates) and not self.stays

    def is_cheaper(self, candidate: Candidate, than: Candidate) -> bool:
        """Return True if a slice costs at least a tenth less than another one.

        A different accelerator has a different speed, so the prices are not comparable.
        """
        if candidate.accelerator != than.accelerator:
            return False
        rates = dict(zip(self.choices, self.rates, strict=False))
        rate, current = rates.get(candidate), rates.get(than)
        return rate is not None and current is not None and rate <= 0.9 * current

    def put(self, placement: Placement) -> "Job":
        """Return the job with this placement, which replaces a placement of the same name."""
        if not any(p.name == placement.name for p in self.placements):
            return replace(self, placements=(*self.placements, placement))
        placements = (placement if p.name == placement.name else p for p in self.placements)
        return replace(self, placements=tuple(placements))

    def drop(self, *placements: Placement) -> "Job":
        """Return the job without these placements."""
        names = {placement.name for placement in placements}
        return replace(self, placements=tuple(p for p in self.placements if p.name not in names))


class OldProgram(StrEnum):
    """The knowledge about the program on a slice that is being deleted."""

    UNKNOWN = ""
    NEVER = "never"
    """No program of the job was ever sent there."""
    ENDED = "ended"
    FENCED = "fenced"
    """It had claimed its checkpoint folder, so it cannot write there after the next attempt."""


@dataclass(frozen=True)
class PlacementObservation:
    """A placement as the newest successful poll of its zone shows it."""

    at: float
    """The start of the poll."""
    listed: ListedPlacement | None
    """The placement in the listing; None if the cloud does not have it."""
    refusal: Refusal | None = None
    """The error of its create operation, if the cloud does not have it."""
    creating: bool = False
    """True if the cloud does not have it yet, because its create operation is in progress."""
    last_maintenance: tuple[float, str] | None = None
    """The newest poll that listed a maintenance, as its timestamp and the cloud's message."""

    def maintenance_after(self, time: float) -> str:
        """Return the cloud's message about a maintenance listed after that time, if any."""
        if self.last_maintenance is None or self.last_maintenance[0] <= time:
            return ""
        return self.last_maintenance[1]

    @property
    def lost_reason(self) -> str | None:
        """The reason why the placement was lost; None if it was not."""
        if self.listed is None:
            return "gone from the cloud"
        return self.listed.lost_reason if self.listed.state is PlacementState.LOST else None


@dataclass(frozen=True)
class AddressError:
    """The reason why this server has not connected to the hosts of an attempt."""

    refusal: Refusal
    since: float
    """The timestamp of the first failure to read host keys or instance names."""
    at: float
    """The timestamp of the last such failure."""


@dataclass(frozen=True)
class ZoneStatus:
    """The status of a zone: open for requests or not, and the reason if not."""

    open: bool = True
    reason: str = ""
    words: str = ""
    """The cloud's own words, if it refused a request there."""
    reliable: bool = True
    """False if requests there were often refused lately, or slices soon lost."""
    crowded: bool = False
    """True if so many requests wait there that a job with other requests does not ask, too."""


@dataclass(frozen=True)
class OutputsCopy:
    """The newest copy of the outputs of the current attempt that this server has completed."""

    began_at: float
    ended_at: float
    summary: str
    """The number and size of the files, and the files without a copy, for an event."""


@dataclass(frozen=True)
class Observations:
    """Everything observed about one job."""

    placements: Mapping[str, PlacementObservation] = field(default_factory=dict)
    """The placements in the cloud, by name, from polls that started after the requests."""
    reports: tuple[HostReport, ...] = ()
    """The newest report of each host."""
    listening_since: float | None = None
    """The timestamp from which this server listens to hosts. Silence before it does not count."""
    zones: Mapping[Candidate, ZoneStatus] = field(default_factory=dict)
    old_program_may_run: bool = False
    """True if a slice that is being deleted may still run a program of this job. For a job that
    shall run, this is observed only without active slices, and programs of other jobs with the same
    checkpoint folder count too."""
    stopped: bool = False
    """True if every host confirmed that the program is stopped."""
    unreachable: tuple[int, ...] = ()
    """The hosts that did not confirm the last stop."""
    steps: Steps | None = None
    """The steps that the current attempt has reported."""
    outputs: OutputsCopy | None = None
    """The newest copy of the outputs of the current attempt; None if there is no copy."""
    mass_failure: str = ""
    """A message if so many hosts failed together that they are not the cause; otherwise empty."""
    address_error: AddressError | None = None
    """The error of the cloud because of which there are no connections and no reports."""
    deleting: frozenset[str] = frozenset()
    """The zones in which earlier requests of the job are not deleted yet."""

    def lost_reason(self, placement: Placement) -> str | None:
        """Return the reason why a placement was lost; None if it was not, as far as is known."""
        observation = self.placements.get(placement.name)
        return observation.lost_reason if observation else None


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds. The defaults are for Google Cloud."""

    waiting: float = 300.0
    """Age at which a request that waits for capacity is replaced, by one in another zone that is
    open or else by one in the same zone. The cloud grants a request within minutes, or neglects it
    for an hour although it grants new ones."""
    cheaper: float = 60.0
    """Time from the first slices that are ready in which cheaper ones that boot may become ready
    and run the program instead."""
    visible: float = 60.0
    """Delay after the acceptance of a request until listings and lookups must show it. Google shows
    a new resource up to a minute late."""
    booting: float = 2400.0
    """Wait from the grant of a slice to READY with all addresses. Large slices boot within 20
    minutes. Slices whose creation or repair failed stay in these states and use quota for ever."""
    deleting: float = 1800.0
    """Wait for the deletion of a slice, which takes minutes or, rarely, days. After this wait,
    the job continues elsewhere, if the old program has exited or cannot write checkpoints."""
    silence: float = 90.0
    """Silence of a host after which its slice counts as lost if the cloud no longer reports it as
    READY."""
    bad_silence: float = 300.0
    """Silence after which a host counts as bad although the cloud still reports its slice as READY.
    Live migrations and reboots take a few minutes."""
    first_contact: float = 600.0
    """Wait from READY to the first SSH connection. Hosts of one slice boot minutes apart."""
    settle: float = 5.0
    """Wait after the first failure for the reports of other hosts, to find which failed first."""
    shutdown: float = 45.0
    """Wait for a host to shut down after a signal terminated its program, or after the program
    saved its work and exited. A preempted host has about 30 s, and stops its programs first."""
    settled: float = 1800.0
    """Duration of a run before cheaper slices are requested, if the job file allows to leave a
    healthy slice. Most short-lived slices are preempted before that."""
    rest: float = 2.0
    """Wait before the first restart after a failure, doubled per restart up to a minute, so that a
    program does not use up its allowance during an outage of a service that it needs."""
    outputs: float = 600.0
    """Maximum duration of a copy of the outputs, for which a finished attempt keeps its slice."""
    outputs_interval: float = 60.0
    """Wait between copies of the outputs while the program runs. A slice that is preempted
    without notice loses the changes since the last copy."""
    retry: float = 10.0
    """Wait before a refused request is repeated, doubled per retry up to `RETRY_LIMIT`."""


class EffectType(StrEnum):
    """An action of the supervisor."""

    REQUEST = "ask"
    RUN = "drive"
    """Connect to the hosts, start the program if it is not running, and listen."""
    STOP = "stop"
    RELEASE = "release"
    POLL = "poll"
    COPY_OUTPUTS = "outputs"
    """Copy the outputs from the hosts to the home of the server."""
    NO_CAPACITY = "short"
    """Mark the zone of the placement as out of capacity."""


@dataclass(frozen=True)
class Effect:
    """One action on one placement."""

    kind: EffectType
    placement: Placement
    reason: str = ""
    words: str = ""
    """The cloud's own words, if it refused the request."""
    fault: FaultType = FaultType.STOCKOUT
    """The reason why the zone of the placement counts as out of capacity."""


@dataclass(frozen=True)
class Event:
    """A line of the job's history."""

    kind: EventType
    text: str
    fields: Mapping[str, str | float | None] = field(default_factory=dict)
    """The facts in the text, for programs."""


@dataclass(frozen=True)
class EndedAttempt:
    """An attempt that is over."""

    attempt: Attempt
    reason: EndReason
    detail: str
    cause: Cause | None = None


@dataclass(frozen=True)
class Decision:
    """The new state of a job, and the effects and events that follow from it."""

    job: Job
    effects: tuple[Effect, ...] = ()
    events: tuple[Event, ...] = ()
    ended: tuple[EndedAttempt, ...] = ()

    def then(self, later: "Decision") -> "Decision":
        """Return the later decision, with the effects and events of both."""
        return Decision(
            later.job,
            (*self.effects, *later.effects),
            (*self.events, *later.events),
            (*self.ended, *later.ended),
        )
