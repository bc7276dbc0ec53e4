"""A job and the world around it for tests of the pure core, told in domain verbs."""

from dataclasses import dataclass, field, replace

from drumline.cloud.google.errors import refusal
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError, combine
from drumline.jobs.core import lifecycle
from drumline.jobs.core.causes import GO_ON_LATER
from drumline.jobs.core.state import (
    Allowance,
    Choice,
    Decision,
    EffectKind,
    Job,
    Outcome,
    Seen,
    Sighting,
    Status,
    Thresholds,
    Zone,
)
from drumline.jobs.core.steps import Steps, advance
from drumline.observed.hosts import HostPhase, HostReport
from drumline.observed.placements import Endpoint, ListedPlacement

A = Choice("v4-16", "us-central2-b")
B = Choice("v4-16", "local-b")
HOSTS = 2
PATIENCE = Thresholds(waiting=600, silence=90, bad_silence=300, first_contact=600, settle=5, rest=2)
NO_CAPACITY = RpcError(8, 'There is no more capacity in the zone "us-central2-b"')


@dataclass
class Story:
    """One job and the world around it, told in domain verbs."""

    job: Job = field(
        default_factory=lambda: Job(
            id="000001", owner="me", choices=(A, B), created_at=0.0, allowance=Allowance(failures=1)
        )
    )
    now: float = 1.0
    request: ListedRequest | None = None
    node: ListedNode | None = None
    listed: ListedPlacement | None = None
    """What the cloud lists, where a test says it in the core's own words."""
    looked_at: float | None = None
    hosts: tuple[HostReport, ...] = ()
    listening_since: float | None = 0.0
    zones: dict[Choice, Zone] = field(default_factory=dict)
    old_slice_alive: bool = False
    stopped: bool = False
    steps: Steps | None = None
    effects: list[tuple[EffectKind, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def seen(self) -> Seen:
        sighting = None
        if self.listed is not None:
            sighting = Sighting(self.now, self.listed)
        elif self.looked_at is not None and self.job.placement is not None:
            nodes = [self.node] if self.node else []
            listed = combine(self.request, nodes) if self.request or nodes else None
            sighting = Sighting(self.looked_at, listed)
        return Seen(
            sighting,
            self.hosts,
            self.listening_since,
            self.zones,
            self.old_slice_alive,
            self.stopped,
            self.steps,
        )

    def settle(self) -> "Story":
        """Decide until nothing changes any more."""
        for _ in range(10):
            before = self.job
            decision = lifecycle.decide(self.job, self.seen(), self.now, PATIENCE)
            self._take(decision)
            if self.job == before:
                return self
        raise AssertionError("the job never comes to rest")

    def _take(self, decision: Decision) -> None:
        self.job = decision.job
        self.effects += [(e.kind, e.placement.name) for e in decision.effects]
        self.outcomes += [ended.outcome for ended in decision.ended]
        self.events += [event.kind for event in decision.events]
        self.told += [event.text for event in decision.events]
        if decision.ended or self.job.placement is None:
            self.hosts, self.stopped, self.steps = (), False, None
        if self.job.placement is None:
            self.request = self.node = self.listed = self.looked_at = None

    def passes(self, seconds: float) -> "Story":
        self.now += seconds
        return self.settle()

    def cloud_takes_the_request(self) -> "Story":
        self.job = lifecycle.asked(self.job)
        return self

    def cloud_refuses(self, code: int | None, text: str) -> "Story":
        assert self.job.placement is not None
        why = refusal(code, text, self.job.placement.zone)
        self._take(lifecycle.refused(self.job, why, self.now, PATIENCE))
        return self

    def look(
        self, request: str | None, node: str | None, trouble: RpcError | None = None
    ) -> "Story":
        """A fresh look at the zone."""
        self.now += 1
        held = self.job.placement
        assert held is not None
        ends = tuple(Endpoint(f"10.0.0.{i}", f"34.0.0.{i}") for i in range(HOSTS))
        self.request = (
            ListedRequest(held.name, held.zone, request, held.accelerator, {}, trouble)
            if request
            else None
        )
        self.node = (
            ListedNode(held.name, held.zone, node, held.accelerator, {}, ends) if node else None
        )
        self.looked_at = self.now
        return self.settle()

    def slice_is_there(self) -> "Story":
        return self.settle().cloud_takes_the_request().look("ACTIVE", "READY")

    def host(self, index: int, phase: HostPhase, **facts: object) -> "Story":
        report = HostReport(index=index, phase=phase, heard=self.now, rank=index)
        changed = replace(report, **facts)  # type: ignore[arg-type]
        others = [r for r in self.hosts if r.index != index]
        self.hosts = tuple(sorted([*others, changed], key=lambda r: r.index))
        return self

    def all_hosts(self, phase: HostPhase, **facts: object) -> "Story":
        for index in range(HOSTS):
            self.host(index, phase, **facts)
        return self.settle()

    def runs(self) -> "Story":
        return self.slice_is_there().all_hosts(HostPhase.RUNNING)

    def everybody_is_heard(self) -> "Story":
        self.hosts = tuple(replace(report, heard=self.now) for report in self.hosts)
        return self.settle()

    def program_fails(self, host: int = 0, code: int = 1, error: str = "boom") -> "Story":
        for index in range(HOSTS):
            at = self.now - (1.0 if index == host else 0.5)
            said = error if index == host else "Connection reset by peer"
            self.host(index, HostPhase.EXITED, exit_code=code, error_at=at, error=said)
        return self.settle()

    def verdict(self) -> "Story":
        """The look that is newer than the failure, and the stop that follows."""
        self.look("ACTIVE", "READY").everybody_is_heard()
        self.stopped = True
        return self.settle()

    def tells(self, step: int, **more: object) -> "Story":
        """A heartbeat, from hosts that are all heard."""
        self.steps = advance(self.steps, {"step": step, **more}, self.now)
        return self.everybody_is_heard()

    def hangs(self, seconds: float) -> "Story":
        """Time passes, the hosts are heard and the cloud is well, but no step comes."""
        self.now += seconds
        self.everybody_is_heard()
        for _ in range(2):
            self.now += PATIENCE.settle
            self.look("ACTIVE", "READY").everybody_is_heard()
        return self

    def leaves(self) -> "Story":
        """The program saves its work and leaves; the slice stays."""
        self.program_fails(code=GO_ON_LATER).passes(PATIENCE.shutdown + 1)
        return self.verdict()

    def status(self) -> Status:
        return self.job.status

    def did(self, kind: EffectKind) -> list[str]:
        return [name for done, name in self.effects if done is kind]
