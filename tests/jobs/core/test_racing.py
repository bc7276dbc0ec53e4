"""A job that asks in several zones at once: one slice wins, and all others are released."""

from dataclasses import dataclass, field, replace

import pytest

from drumline.jobs.core import lifecycle, requests
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    Candidate,
    Decision,
    DesiredState,
    EffectType,
    Job,
    Observations,
    Placement,
    PlacementObservation,
    PlacementRole,
    Status,
    Timeouts,
    ZoneStatus,
)
from drumline.observed import (
    Endpoint,
    Fault,
    FaultType,
    HostPhase,
    HostReport,
    ListedPlacement,
    ListedSlice,
    PlacementState,
    Refusal,
    Scope,
)
from tests.jobs.scenario import TIMEOUTS

A, B, C, D = (Candidate("v4-8", f"zone-{letter}") for letter in "abcd")
STOCKOUT = Refusal(Fault(FaultType.STOCKOUT, Scope.ZONE), "no capacity in zone-b")
QUOTA = Refusal(Fault(FaultType.QUOTA, Scope.ZONE), "quota of zone-b used up")
SERVICE_FAILS = Refusal(Fault(FaultType.TRANSIENT, Scope.ZONE), "backend error")
INVALID = Refusal(Fault(FaultType.INVALID, Scope.REQUEST), "the image is not known")


@dataclass
class Race:
    """A job, and its placements in the cloud by zone."""

    job: Job = field(default_factory=lambda: Job("000001", "me", (A, B, C), created_at=0.0, ask=3))
    now: float = 1.0
    listed: dict[str, ListedPlacement | None] = field(default_factory=dict)
    """The placements as the cloud lists them, by name; None for one that is gone."""
    hosts: tuple[HostReport, ...] = ()
    zones: dict[Candidate, ZoneStatus] = field(default_factory=dict)
    old_program_may_run: bool = False
    stopped: bool = False
    decisions: list[Decision] = field(default_factory=list)

    def settle(self) -> "Race":
        """Decide until the job no longer changes."""
        for _ in range(10):
            before = self.job
            seen = {
                name: PlacementObservation(self.now, listed) for name, listed in self.listed.items()
            }
            observations = Observations(
                seen,
                self.hosts,
                listening_since=0.0,
                zones=self.zones,
                old_program_may_run=self.old_program_may_run,
                stopped=self.stopped,
            )
            self.take(lifecycle.decide(self.job, observations, self.now, TIMEOUTS))
            if self.job == before:
                return self
        raise AssertionError("the job never stops changing")

    def take(self, decision: Decision) -> None:
        self.job = decision.job
        self.decisions.append(decision)
        for effect in decision.effects:
            if effect.kind is EffectType.NO_CAPACITY:
                self.zones[effect.placement.candidate] = ZoneStatus(False, effect.reason)
        if decision.ended or self.job.active is None:
            self.hosts, self.stopped = (), False

    def passes(self, seconds: float) -> "Race":
        self.now += seconds
        return self.settle()

    def request(self, zone: str) -> Placement:
        (placement,) = [p for p in self.job.placements if p.zone == zone]
        return placement

    def accept_all(self) -> "Race":
        for request in self.job.requests:
            self.job = requests.request_accepted(self.job, request.name, self.now)
        return self.settle()

    def refuse(self, zone: str, refusal: Refusal) -> "Race":
        name = self.request(zone).name
        self.take(requests.request_refused(self.job, name, refusal, self.now, TIMEOUTS))
        return self.settle()

    def becomes(self, zone: str, state: PlacementState, lost_reason: str = "") -> "Race":
        """Let the cloud list the placement in a zone in this state."""
        self.lists(zone, state, lost_reason)
        return self.passes(1)

    def lists(self, zone: str, state: PlacementState, lost_reason: str = "") -> None:
        placement = self.request(zone)
        ends = (Endpoint("10.0.0.1", "34.0.0.1"),) if state is PlacementState.READY else ()
        self.listed[placement.name] = ListedPlacement(
            placement.name,
            zone,
            state,
            placement.accelerator,
            labels={},
            cloud_state=state.value,
            slices=(ListedSlice(placement.name, ends),),
            lost_reason=lost_reason,
        )

    def answers(self, phase: HostPhase = HostPhase.PREPARING) -> "Race":
        self.hosts = (HostReport(index=0, phase=phase, heard_at=self.now, rank=0),)
        return self.settle()

    def names(self, kind: EffectType) -> list[str]:
        effects = [e for decision in self.decisions for e in decision.effects if e.kind is kind]
        return list(dict.fromkeys(effect.placement.zone for effect in effects))

    def reasons(self, kind: EffectType) -> list[str]:
        return [e.reason for decision in self.decisions for e in decision.effects if e.kind is kind]

    def outcomes(self) -> list[EndReason]:
        return [ended.reason for decision in self.decisions for ended in decision.ended]


def waiting() -> Race:
    """Return a race in which all three requests wait."""
    race = Race().settle().accept_all()
    for zone in ("zone-a", "zone-b", "zone-c"):
        race.becomes(zone, PlacementState.QUEUED)
    return race


def test_a_job_asks_in_three_zones_and_the_first_whose_hosts_answer_wins() -> None:
    race = waiting()
    assert race.names(EffectType.REQUEST) == ["zone-a", "zone-b", "zone-c"]
    assert race.job.reason == "no capacity in zone-a, zone-b and zone-c for 3 s"
    race.becomes("zone-b", PlacementState.BOOTING)
    assert race.job.status is Status.STARTING
    assert "slice is booting in zone-b; no capacity in zone-a and zone-c" in race.job.reason
    race.becomes("zone-b", PlacementState.READY)
    assert race.names(EffectType.RUN) == ["zone-b"]
    assert race.names(EffectType.RELEASE) == []
    race.answers()
    assert race.names(EffectType.RELEASE) == ["zone-a", "zone-c"]
    assert [placement.role for placement in race.job.placements] == [PlacementRole.ACTIVE]


def test_of_two_slices_that_are_ready_in_the_same_second_one_runs_the_program() -> None:
    race = waiting()
    for zone in ("zone-a", "zone-c"):
        race.lists(zone, PlacementState.READY)
    race.passes(1).answers(HostPhase.RUNNING)
    assert race.names(EffectType.RUN) == ["zone-a"]
    assert race.names(EffectType.RELEASE) == ["zone-b", "zone-c"]
    assert race.job.attempts == 1


def test_the_next_slice_takes_over_when_the_first_is_lost_before_its_hosts_answer() -> None:
    race = waiting().becomes("zone-a", PlacementState.READY).becomes("zone-b", PlacementState.READY)
    active = race.job.active
    assert active is not None
    assert active.zone == "zone-a"
    race.becomes("zone-a", PlacementState.LOST, "node PREEMPTED")
    active = race.job.active
    assert active is not None
    assert active.zone == "zone-b"
    assert (race.job.preemptions, race.outcomes()) == (1, [EndReason.PREEMPTED])
    race.answers(HostPhase.RUNNING)
    assert race.names(EffectType.RELEASE) == ["zone-a", "zone-c"]
    assert race.job.status is Status.RUNNING


def test_a_slice_lost_before_it_is_ready_does_not_end_the_attempt() -> None:
    race = waiting().becomes("zone-a", PlacementState.BOOTING)
    race.becomes("zone-a", PlacementState.LOST, "node PREEMPTED")
    assert (race.job.preemptions, race.outcomes()) == (0, []), "the others may still be granted"
    assert race.job.attempts == 1
    assert [request.zone for request in race.job.requests] == ["zone-b", "zone-c"]
    race.zones.clear()
    assert len(race.settle().job.requests) == 3, "the zone is asked again after its backoff"


def test_no_slice_runs_the_program_while_the_old_one_may_run() -> None:
    race = waiting()
    race.old_program_may_run = True
    race.becomes("zone-a", PlacementState.READY)
    assert race.job.active is None
    assert race.job.reason == "waiting for the previous slice to be deleted"
    race.old_program_may_run = False
    assert race.passes(60).job.active is not None


def test_a_ready_slice_does_not_wait_for_ever_for_a_deletion() -> None:
    race = waiting()
    race.old_program_may_run = True
    race.becomes("zone-a", PlacementState.READY).passes(TIMEOUTS.deleting + 1)
    assert "zone-a" in race.names(EffectType.RELEASE)
    assert "the previous slice is still not deleted" in race.reasons(EffectType.RELEASE)


@pytest.mark.parametrize("refusal", [STOCKOUT, QUOTA])
def test_one_zone_that_refuses_leaves_the_other_requests_alone(refusal: Refusal) -> None:
    race = Race().settle().refuse("zone-b", refusal)
    assert race.names(EffectType.NO_CAPACITY) == ["zone-b"]
    assert [request.zone for request in race.accept_all().job.requests] == ["zone-a", "zone-c"]
    race.zones.clear()
    assert [request.zone for request in race.settle().job.requests][2:] == ["zone-b"]


def test_a_request_that_fails_is_repeated_without_delaying_the_others() -> None:
    race = Race().settle()
    race.refuse("zone-b", SERVICE_FAILS)
    assert race.request("zone-b").retry_at > race.now
    race.accept_all().becomes("zone-a", PlacementState.READY)
    assert race.job.active is not None


def test_a_request_that_keeps_failing_gives_way_to_a_zone_that_was_not_asked() -> None:
    job = Job("000001", "me", (A, B, C, D), created_at=0.0, ask=3)
    race = Race(job).settle()
    assert race.names(EffectType.REQUEST) == ["zone-a", "zone-b", "zone-c"]
    for _ in range(3):
        race.refuse("zone-b", SERVICE_FAILS).passes(300)
    assert [request.zone for request in race.job.requests] == ["zone-a", "zone-c", "zone-d"]


def test_a_zone_that_is_long_out_of_capacity_gives_way_to_a_zone_that_was_not_asked() -> None:
    job = Job("000001", "me", (A, B), created_at=0.0, ask=1)
    race = Race(job).settle().accept_all().becomes("zone-a", PlacementState.QUEUED)
    race.zones[B] = ZoneStatus(open=False, reason="no capacity in zone-b")
    race.passes(2 * TIMEOUTS.waiting)
    assert [request.zone for request in race.job.requests] == ["zone-a"]
    race.zones[B] = ZoneStatus()
    race.accept_all().becomes("zone-a", PlacementState.QUEUED)
    assert [request.zone for request in race.job.requests] == ["zone-b"]


def test_a_long_wait_leaves_one_zone_at_a_time() -> None:
    job = Job("000001", "me", (A, B, C, D), created_at=0.0, ask=3)
    race = Race(job).settle().accept_all()
    for zone in ("zone-a", "zone-b", "zone-c"):
        race.becomes(zone, PlacementState.QUEUED)
    race.zones[D] = ZoneStatus()
    race.passes(TIMEOUTS.waiting + 1)
    assert [request.zone for request in race.job.requests] == ["zone-b", "zone-c", "zone-d"]


def test_a_request_that_waits_for_long_is_replaced_by_a_new_one_in_the_same_zone() -> None:
    race = waiting()
    names = [request.name for request in race.job.requests]
    race.passes(TIMEOUTS.waiting - 10)
    assert [request.name for request in race.job.requests] == names
    race.passes(20).accept_all()
    assert [request.zone for request in race.job.requests] == ["zone-a", "zone-b", "zone-c"]
    assert not {request.name for request in race.job.requests} & {*names}
    assert race.names(EffectType.RELEASE) == ["zone-a", "zone-b", "zone-c"]
    assert race.names(EffectType.NO_CAPACITY) == [], "a backoff would keep the job out of the zones"
    assert race.job.reason == "no capacity in zone-a, zone-b and zone-c for 10 min"


def test_a_request_in_a_crowded_zone_is_replaced_later_and_not_with_all_others() -> None:
    race = waiting()
    race.zones |= {A: ZoneStatus(), B: ZoneStatus(crowded=True), C: ZoneStatus(crowded=True)}
    names = {request.zone: request.name for request in race.job.requests}
    replaced_at: dict[str, float] = {}
    start = race.now
    while len(replaced_at) < len(names):
        race.passes(10)
        for request in race.job.requests:
            if request.name != names[request.zone]:
                replaced_at.setdefault(request.zone, race.now - start)
    assert replaced_at["zone-a"] <= TIMEOUTS.waiting + 10
    later = [replaced_at[zone] for zone in ("zone-b", "zone-c")]
    assert all(2 * TIMEOUTS.waiting <= at <= 4 * TIMEOUTS.waiting + 10 for at in later)
    assert abs(later[0] - later[1]) > 10


def test_a_request_that_may_have_been_granted_since_the_last_poll_is_not_replaced() -> None:
    race = waiting()
    names = [request.name for request in race.job.requests]
    polled_at, race.now = race.now, race.now + 2 * TIMEOUTS.waiting
    seen = {name: PlacementObservation(polled_at, listed) for name, listed in race.listed.items()}
    race.take(lifecycle.decide(race.job, Observations(seen), race.now, TIMEOUTS))
    assert [request.name for request in race.job.requests] == names


def test_a_replaced_request_may_use_up_the_quota_until_it_is_deleted() -> None:
    race = waiting().passes(TIMEOUTS.waiting + 1)
    for _ in range(3):
        assert race.names(EffectType.NO_CAPACITY) == []
        race.refuse("zone-b", QUOTA).passes(120)
    assert race.names(EffectType.NO_CAPACITY) == [], "the job has no other zone"
    race.refuse("zone-b", QUOTA)
    assert race.names(EffectType.NO_CAPACITY) == ["zone-b"]


def test_a_job_with_reserved_capacity_keeps_its_place_in_the_queue() -> None:
    race = waiting()
    race.job = replace(race.job, patience=36.0)
    assert race.passes(40 * TIMEOUTS.waiting).names(EffectType.RELEASE) == []


def test_of_two_slices_that_are_ready_the_cheaper_one_runs_the_program() -> None:
    race = waiting()
    race.job = replace(race.job, rates=RATES, stays=True)
    for zone in ("zone-a", "zone-b", "zone-c"):
        race.lists(zone, PlacementState.READY)
    race.passes(1).answers(HostPhase.RUNNING)
    assert race.names(EffectType.RUN) == ["zone-c"]
    assert race.names(EffectType.RELEASE) == ["zone-a", "zone-b"]


def test_a_slice_that_is_ready_waits_a_minute_for_a_cheaper_one_that_boots() -> None:
    race = waiting()
    race.job = replace(race.job, rates=RATES, stays=True)
    race.becomes("zone-c", PlacementState.BOOTING).becomes("zone-a", PlacementState.READY)
    assert race.passes(TIMEOUTS.cheaper - 2).job.active is None
    active = race.becomes("zone-c", PlacementState.READY).job.active
    assert active is not None
    assert active.zone == "zone-c"


def test_a_slice_that_is_ready_does_not_wait_longer_for_a_cheaper_one() -> None:
    race = waiting()
    race.job = replace(race.job, rates=RATES, stays=True)
    race.becomes("zone-c", PlacementState.BOOTING).becomes("zone-a", PlacementState.READY)
    active = race.passes(TIMEOUTS.cheaper).job.active
    assert active is not None
    assert active.zone == "zone-a"


@pytest.mark.parametrize("state", [PlacementState.QUEUED, PlacementState.LOST])
def test_a_slice_that_is_ready_does_not_wait_for_a_cheaper_one_that_does_not_boot(
    state: PlacementState,
) -> None:
    race = waiting()
    race.job = replace(race.job, rates=RATES, stays=True)
    race.becomes("zone-c", PlacementState.BOOTING).becomes("zone-a", PlacementState.READY)
    active = race.becomes("zone-c", state).job.active
    assert active is not None
    assert active.zone == "zone-a"


def test_a_crowded_zone_gets_only_first_requests() -> None:
    race = Race(zones={B: ZoneStatus(crowded=True), C: ZoneStatus(crowded=True)}).settle()
    assert [request.zone for request in race.job.requests] == ["zone-a"]
    only_b = Race(replace(Race().job, choices=(B, C)), zones={B: ZoneStatus(crowded=True)}).settle()
    assert [request.zone for request in only_b.job.requests] == ["zone-b", "zone-c"]


def test_unreliable_zones_are_asked_last() -> None:
    race = Race(replace(Race().job, ask=2), zones={A: ZoneStatus(reliable=False)}).settle()
    assert [request.zone for request in race.job.requests] == ["zone-b", "zone-c"]


def test_a_job_with_reserved_capacity_waits_longer_for_a_zone() -> None:
    race = Race(replace(Race().job, choices=(A, B), ask=1, patience=36.0))
    race.zones[B] = ZoneStatus()
    race.settle().accept_all()
    race.becomes("zone-a", PlacementState.QUEUED).passes(10 * TIMEOUTS.waiting)
    assert [request.zone for request in race.job.requests] == ["zone-a"]
    race.passes(30 * TIMEOUTS.waiting)
    assert [request.zone for request in race.job.requests] == ["zone-b"]


RATES = (2.0, 1.9, 1.0)
"""The prices of zone-a, zone-b and zone-c."""


def running(rates: tuple[float | None, ...]) -> Race:
    """Return a race in which zone-a was the first and runs the program, for longer than settled."""
    race = Race(replace(Race().job, rates=rates), zones={c: ZoneStatus() for c in (A, B, C)})
    race.settle().accept_all().becomes("zone-a", PlacementState.READY)
    race.answers(HostPhase.PREPARING).answers(HostPhase.RUNNING)
    assert race.job.status is Status.RUNNING
    race.now += TIMEOUTS.settled + 1
    race.lists("zone-a", PlacementState.READY)
    return race.answers(HostPhase.RUNNING)


def test_a_job_never_leaves_a_healthy_slice_by_default() -> None:
    race = running(rates=())
    assert [placement.zone for placement in race.job.placements] == ["zone-a"]


def test_a_job_that_may_migrate_moves_when_a_cheaper_slice_is_ready() -> None:
    race = running(RATES)
    assert [request.zone for request in race.job.requests] == ["zone-c"], "zone-b saves too little"
    race.accept_all().answers(HostPhase.RUNNING).becomes("zone-c", PlacementState.QUEUED)
    race.answers(HostPhase.RUNNING)
    assert race.job.status is Status.RUNNING
    assert race.names(EffectType.STOP) == []
    race.becomes("zone-c", PlacementState.READY)
    assert race.names(EffectType.STOP) == ["zone-a"]
    race.stopped = True
    race.settle()
    assert race.outcomes() == [EndReason.MOVED]
    active = race.job.active
    assert active is not None
    assert active.zone == "zone-c"
    assert "zone-a" in race.names(EffectType.RELEASE)
    counts = (race.job.failures, race.job.bad_hosts, race.job.preemptions)
    assert (race.job.status, counts) == (Status.RECOVERING, (0, 0, 0))


def test_a_job_stays_if_the_cheaper_slice_is_lost_during_the_stop() -> None:
    race = running(RATES)
    race.accept_all().answers(HostPhase.RUNNING).becomes("zone-c", PlacementState.READY)
    assert race.names(EffectType.STOP) == ["zone-a"]
    race.becomes("zone-c", PlacementState.LOST, "node PREEMPTED")
    race.stopped = True
    race.settle()
    assert race.outcomes() == [EndReason.MOVED]
    active = race.job.active
    assert active is not None
    assert active.zone == "zone-a"
    assert race.names(EffectType.RELEASE) == ["zone-b", "zone-c"]


def test_the_cheaper_slice_is_released_when_the_user_cancels() -> None:
    race = running(RATES)
    race.accept_all().answers(HostPhase.RUNNING).becomes("zone-c", PlacementState.READY)
    race.job = replace(race.job, wish=DesiredState.CANCEL)
    race.settle()
    assert race.job.requests == ()


def test_another_accelerator_is_not_a_cheaper_slice() -> None:
    job = Job("000001", "me", (A, Candidate("v5litepod-1", "zone-c")), 0.0, rates=(2.0, 0.1))
    assert not job.is_cheaper(job.choices[1], job.choices[0])


def test_a_lost_request_does_not_use_up_the_allowance() -> None:
    race = waiting()
    race.job = replace(race.job, allowance=Allowance(preemptions=0))
    race.becomes("zone-a", PlacementState.BOOTING)
    race.becomes("zone-a", PlacementState.LOST, "node PREEMPTED")
    assert race.job.status is Status.WAITING


def test_an_invalid_request_does_not_end_a_job_whose_request_was_accepted_elsewhere() -> None:
    race = Race().settle()
    name = race.request("zone-a").name
    race.job = requests.request_accepted(race.job, name, race.now)
    race.refuse("zone-b", INVALID)
    assert race.job.status is Status.WAITING


def test_held_back_slices_stay_while_other_requests_are_open() -> None:
    bad = Placement("bad", "zone-b", "v4-8", 1, 0.0, PlacementRole.HELD_BACK, ready_at=0.0)
    race = Race(replace(Race().job, choices=(A,), ask=1).put(bad)).settle().accept_all()
    race.becomes("zone-a", PlacementState.QUEUED).passes(TIMEOUTS.waiting + 1)
    race.refuse("zone-a", QUOTA)
    assert race.job.held_back == ()


def test_a_ready_slice_does_not_wait_for_a_cheaper_one_whose_request_has_no_answer() -> None:
    race = Race(replace(Race().job, rates=RATES, stays=True)).settle()
    for zone in ("zone-a", "zone-b"):
        name = race.request(zone).name
        race.job = requests.request_accepted(race.job, name, race.now)
    race.lists("zone-c", PlacementState.READY)
    race.lists("zone-a", PlacementState.READY)
    race.passes(1)
    assert race.job.active is not None
    assert race.job.active.zone == "zone-a"


def test_a_reserved_job_of_an_earlier_version_keeps_its_patience() -> None:
    job = replace(Race().job, patience=36.0)
    assert lifecycle.adapt_times(job, 1.0).patience * Timeouts().waiting == 6 * 3600
