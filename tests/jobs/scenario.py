"""A job with its observations, for tests of the pure core."""

from dataclasses import dataclass, field, replace

from drumline.cloud.google.errors import refusal
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError, combine
from drumline.jobs.core import lifecycle, requests
from drumline.jobs.core.causes import EXIT_FOR_RESTART
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    TRANSITIONS,
    Allowance,
    Candidate,
    Decision,
    EffectType,
    Job,
    Observations,
    OutputsCopy,
    Placement,
    PlacementObservation,
    Status,
    Timeouts,
    ZoneStatus,
)
from drumline.jobs.core.steps import Steps, update_steps
from drumline.observed import Endpoint, HostPhase, HostReport, ListedPlacement, Refusal

A = Candidate("v4-16", "us-central2-b")
B = Candidate("v4-16", "local-b")
HOSTS = 2
TIMEOUTS = Timeouts(waiting=600, silence=90, bad_silence=300, first_contact=600, settle=5, rest=2)
NO_CAPACITY = RpcError(8, 'There is no more capacity in the zone "us-central2-b"')


@dataclass
class Scenario:
    """One job and the observations of its cloud and hosts."""

    job: Job = field(
        default_factory=lambda: Job(
            id="000001", owner="me", choices=(A, B), created_at=0.0, allowance=Allowance(failures=1)
        )
    )
    now: float = 1.0
    request: ListedRequest | None = None
    node: ListedNode | None = None
    unseen: PlacementObservation | None = None
    listed: ListedPlacement | None = None
    """The listed placement, if a test sets it directly."""
    polled_at: float | None = None
    hosts: tuple[HostReport, ...] = ()
    listening_since: float | None = 0.0
    zones: dict[Candidate, ZoneStatus] = field(default_factory=dict)
    old_program_may_run: bool = False
    stopped: bool = False
    maintenance: tuple[float, str] | None = None
    """The time of the newest poll that listed a maintenance, and its words."""
    unreachable: tuple[int, ...] = ()
    """The hosts that did not confirm the last stop."""
    steps: Steps | None = None
    outputs: OutputsCopy | None = None
    effects: list[tuple[EffectType, str]] = field(default_factory=list)
    outcomes: list[EndReason] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    event_texts: list[str] = field(default_factory=list)

    @property
    def placement(self) -> Placement | None:
        """The slices that the job has or requests."""
        return self.job.leading

    def observe(self) -> Observations:
        observation = None
        if self.unseen is not None and self.placement is not None:
            observation = self.unseen
        elif self.listed is not None:
            observation = PlacementObservation(self.now, self.listed)
        elif self.polled_at is not None and self.placement is not None:
            nodes = [self.node] if self.node else []
            listed = combine(self.request, nodes) if self.request or nodes else None
            if listed is not None and listed.maintenance:
                self.maintenance = (self.polled_at, listed.maintenance)
            observation = PlacementObservation(
                self.polled_at, listed, last_maintenance=self.maintenance
            )
        observed = {}
        if observation is not None and self.placement is not None:
            observed[self.placement.name] = observation
        return Observations(
            observed,
            self.hosts,
            self.listening_since,
            self.zones,
            self.old_program_may_run,
            self.stopped,
            self.unreachable,
            self.steps,
            outputs=self.outputs,
        )

    def settle(self) -> "Scenario":
        """Decide until the job no longer changes."""
        for _ in range(10):
            before = self.job
            decision = lifecycle.decide(self.job, self.observe(), self.now, TIMEOUTS)
            self._take(decision)
            if self.job == before:
                return self
        raise AssertionError("the job never stops changing")

    def _take(self, decision: Decision) -> None:
        before, after = self.job.status, decision.job.status
        assert after is before or after in TRANSITIONS[before], f"{before} → {after}"
        self.job = decision.job
        self.effects += [(e.kind, e.placement.name) for e in decision.effects]
        self.outcomes += [ended.reason for ended in decision.ended]
        self.events += [event.kind for event in decision.events]
        self.event_texts += [event.text for event in decision.events]
        if decision.ended or self.job.active is None:
            self.hosts, self.stopped, self.steps = (), False, None
            self.unreachable = ()
        if self.placement is None:
            self.request = self.node = self.listed = self.polled_at = None

    def passes(self, seconds: float) -> "Scenario":
        self.now += seconds
        return self.settle()

    def cloud_takes_the_request(self) -> "Scenario":
        assert self.placement is not None
        name = self.placement.name
        self.job = requests.request_accepted(self.job, name, self.now, "operations/1")
        return self

    def cloud_refuses(self, code: int | None, text: str) -> "Scenario":
        assert self.placement is not None
        why = refusal(code, text, self.placement.zone)
        name = self.placement.name
        self._take(requests.request_refused(self.job, name, why, self.now, TIMEOUTS))
        return self

    def hidden(self, refusal: Refusal | None = None, *, creating: bool = False) -> "Scenario":
        """Poll the zone, which has neither the request nor a slice."""
        self.now += 1
        self.unseen = PlacementObservation(self.now, None, refusal, creating)
        self.settle()
        self.unseen = None
        return self

    def look(
        self, request: str | None, node: str | None, trouble: RpcError | None = None
    ) -> "Scenario":
        """Poll the zone."""
        self.now += 1
        placement = self.placement
        assert placement is not None
        ends = tuple(Endpoint(f"10.0.0.{i}", f"34.0.0.{i}") for i in range(HOSTS))
        self.request = (
            ListedRequest(
                placement.name, placement.zone, request, placement.accelerator, {}, trouble
            )
            if request
            else None
        )
        self.node = (
            ListedNode(placement.name, placement.zone, node, placement.accelerator, {}, ends)
            if node
            else None
        )
        self.polled_at = self.now
        return self.settle()

    def slice_is_there(self) -> "Scenario":
        return self.settle().cloud_takes_the_request().look("ACTIVE", "READY")

    def host(self, index: int, phase: HostPhase, **facts: object) -> "Scenario":
        report = HostReport(index=index, phase=phase, heard_at=self.now, rank=index)
        changed = replace(report, **facts)  # type: ignore[arg-type]
        others = [r for r in self.hosts if r.index != index]
        self.hosts = tuple(sorted([*others, changed], key=lambda r: r.index))
        return self

    def all_hosts(self, phase: HostPhase, **facts: object) -> "Scenario":
        for index in range(HOSTS):
            self.host(index, phase, **facts)
        return self.settle()

    def runs(self) -> "Scenario":
        return self.slice_is_there().all_hosts(HostPhase.RUNNING)

    def everybody_is_heard(self) -> "Scenario":
        self.hosts = tuple(replace(report, heard_at=self.now) for report in self.hosts)
        return self.settle()

    def program_fails(self, host: int = 0, code: int = 1, error: str = "boom") -> "Scenario":
        for index in range(HOSTS):
            at = self.now - (1.0 if index == host else 0.5)
            message = error if index == host else "Connection reset by peer"
            self.host(index, HostPhase.EXITED, exit_code=code, error_at=at, error=message)
        return self.settle()

    def verdict(self) -> "Scenario":
        """Poll after the failure, and stop the program."""
        self.look("ACTIVE", "READY").everybody_is_heard()
        self.stopped = True
        return self.settle()

    def send_heartbeat(self, step: int, **more: object) -> "Scenario":
        """Take a heartbeat, and reports of all hosts."""
        self.steps = update_steps(self.steps, {"step": step, **more}, self.now)
        return self.everybody_is_heard()

    def hangs(self, seconds: float) -> "Scenario":
        """Pass time with reports of the hosts and polls, but without a step."""
        self.now += seconds
        self.everybody_is_heard()
        for _ in range(2):
            self.now += TIMEOUTS.settle
            self.look("ACTIVE", "READY").everybody_is_heard()
        return self

    def leaves(self) -> "Scenario":
        """Let the program save its work and ask for a restart."""
        self.program_fails(code=EXIT_FOR_RESTART).passes(TIMEOUTS.shutdown + 1)
        return self.verdict()

    def status(self) -> Status:
        return self.job.status

    def did(self, kind: EffectType) -> list[str]:
        return [name for done, name in self.effects if done is kind]
