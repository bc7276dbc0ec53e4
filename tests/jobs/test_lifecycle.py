"""Stories of jobs: what the cloud and the hosts show, and what is decided."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cloud.protocol import Endpoint, Node, Request, Trouble
from drumline.hosts.values import HostPhase, HostReport
from drumline.jobs import lifecycle
from drumline.jobs.causes import GO_ON_LATER
from drumline.jobs.state import (
    Allowance,
    Choice,
    Decision,
    EffectKind,
    Job,
    Look,
    Outcome,
    Patience,
    Seen,
    SlicePhase,
    Status,
    Wish,
    Zone,
)

A = Choice("v4-16", "us-central2-b")
B = Choice("v4-16", "local-b")
HOSTS = 2
PATIENCE = Patience(waiting=600, silence=90, bad_silence=300, first_contact=600, settle=5, rest=2)
NO_CAPACITY = Trouble(8, 'There is no more capacity in the zone "us-central2-b"')


@dataclass
class Story:
    """One job and the world around it, told in domain verbs."""

    job: Job = field(
        default_factory=lambda: Job(
            id="000001", owner="me", choices=(A, B), created_at=0.0, allowance=Allowance(failures=1)
        )
    )
    now: float = 1.0
    request: Request | None = None
    node: Node | None = None
    looked_at: float | None = None
    hosts: tuple[HostReport, ...] = ()
    listening_since: float | None = 0.0
    zones: dict[Choice, Zone] = field(default_factory=dict)
    old_slice_alive: bool = False
    stopped: bool = False
    effects: list[tuple[EffectKind, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def seen(self) -> Seen:
        look = None
        if self.looked_at is not None and self.job.slice is not None:
            look = Look(self.looked_at, self.request, self.node)
        return Seen(
            look,
            self.hosts,
            self.listening_since,
            self.zones,
            self.old_slice_alive,
            self.stopped,
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
        self.effects += [(e.kind, e.slice.name) for e in decision.effects]
        self.outcomes += [ended.outcome for ended in decision.ended]
        self.events += [event.kind for event in decision.events]
        if decision.ended or self.job.slice is None:
            self.hosts, self.stopped = (), False
        if self.job.slice is None:
            self.request = self.node = self.looked_at = None

    def passes(self, seconds: float) -> "Story":
        self.now += seconds
        return self.settle()

    def cloud_takes_the_request(self) -> "Story":
        self.job = lifecycle.asked(self.job)
        return self

    def cloud_refuses(self, code: int | None, text: str) -> "Story":
        self._take(lifecycle.refused(self.job, code, text, self.now))
        return self

    def look(
        self, request: str | None, node: str | None, trouble: Trouble | None = None
    ) -> "Story":
        """A fresh look at the zone."""
        self.now += 1
        held = self.job.slice
        assert held is not None
        ends = tuple(Endpoint(f"10.0.0.{i}", f"34.0.0.{i}") for i in range(HOSTS))
        self.request = (
            Request(held.name, held.zone, request, held.accelerator, {}, trouble)
            if request
            else None
        )
        self.node = Node(held.name, held.zone, node, held.accelerator, {}, ends) if node else None
        self.looked_at = self.now
        return self.settle()

    def slice_is_there(self) -> "Story":
        return self.settle().cloud_takes_the_request().look("ACTIVE", "READY")

    def host(self, index: int, phase: HostPhase, **facts: object) -> "Story":
        report = HostReport(index=index, phase=phase, heard=self.now)
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

    def status(self) -> Status:
        return self.job.status

    def did(self, kind: EffectKind) -> list[str]:
        return [name for done, name in self.effects if done is kind]


def test_an_undisturbed_job_asks_runs_and_releases() -> None:
    story = Story().runs()
    assert story.status() is Status.RUNNING
    story.all_hosts(HostPhase.EXITED, exit_code=0)
    assert story.status() is Status.SUCCEEDED
    assert story.outcomes == [Outcome.SUCCEEDED]
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


def test_the_name_of_a_slice_is_written_before_it_is_asked_for() -> None:
    story = Story().settle()
    assert story.job.slice is not None
    assert story.job.slice.phase is SlicePhase.ASKING
    assert set(story.did(EffectKind.ASK)) == {story.job.slice.name}


def test_one_host_that_is_done_early_does_not_end_the_job() -> None:
    story = Story().runs()
    story.host(0, HostPhase.EXITED, exit_code=0).settle()
    assert story.status() is Status.RUNNING


@pytest.mark.parametrize(
    ("request_state", "node"),
    [
        ("SUSPENDED", "PREEMPTED"),
        ("SUSPENDING", "READY"),
        ("ACTIVE", "TERMINATED"),
        ("ACTIVE", "PREEMPTED"),
        (None, None),
        ("FAILED", None),
    ],
)
def test_a_taken_slice_is_released_and_the_job_asks_again(
    request_state: str | None, node: str | None
) -> None:
    story = Story().runs().look(request_state, node)
    assert story.outcomes == [Outcome.PREEMPTED]
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]
    assert story.status() is Status.RECOVERING
    assert story.job.slice is not None
    assert story.job.slice.name == "dl-me-000001-2"
    assert (story.job.preemptions, story.job.failures, story.job.bad_hosts) == (1, 0, 0)


def test_a_job_preempted_while_it_waits_asks_again() -> None:
    story = Story().settle().cloud_takes_the_request()
    story.look("SUSPENDED", None, Trouble(3, "update is not supported while in state PREEMPTED"))
    assert story.job.preemptions == 1
    assert story.job.slice is not None
    assert story.job.slice.name == "dl-me-000001-2"


def test_a_job_preempted_in_set_up_is_not_the_users_failure() -> None:
    story = Story().slice_is_there()
    story.host(0, HostPhase.PREPARING, detail="setup")
    story.host(1, HostPhase.FAILED, error="Connection lost", exit_code=255).settle()
    assert story.job.failures == 0
    story.look("SUSPENDED", "PREEMPTED")
    assert (story.job.preemptions, story.job.failures) == (1, 0)


def test_without_a_fresh_look_nothing_is_lost() -> None:
    story = Story().settle().cloud_takes_the_request()
    story.passes(100_000)
    assert story.job.slice is not None
    assert story.did(EffectKind.RELEASE) == []


def test_a_new_slice_waits_until_the_old_one_can_no_longer_run() -> None:
    story = Story().runs()
    story.old_slice_alive = True
    story.look("SUSPENDING", "READY")
    assert story.job.slice is None
    story.old_slice_alive = False
    story.settle()
    assert story.job.slice is not None


def test_no_capacity_moves_to_the_next_zone_and_says_why() -> None:
    story = Story().settle()
    story.zones = {A: Zone(open=False, why="no capacity in us-central2-b"), B: Zone()}
    story.cloud_refuses(8, NO_CAPACITY.message)
    assert story.did(EffectKind.SHORT) == ["dl-me-000001-1"]
    assert "no capacity in us-central2-b" in story.job.reason
    story.settle()
    assert story.job.slice is not None
    assert story.job.slice.zone == "local-b"
    assert story.job.attempts == 1


def test_a_request_that_waits_too_long_moves_only_when_another_zone_is_open() -> None:
    story = Story().settle().cloud_takes_the_request()
    story.zones = {A: Zone(), B: Zone(open=False, why="no capacity in local-b")}
    story.look("WAITING_FOR_RESOURCES", None)
    story.passes(700)
    assert story.job.slice is not None
    assert story.job.slice.zone == A.zone
    assert story.status() is Status.WAITING
    story.zones = {A: Zone(), B: Zone()}
    story.zones[A] = Zone(open=False, why="short")
    story.settle()
    assert story.job.slice is not None
    assert story.job.slice.zone == B.zone


def test_all_zones_short_says_so_and_asks_for_nothing() -> None:
    story = Story()
    story.zones = {A: Zone(False, "no capacity in us-central2-b"), B: Zone(False, "quota used up")}
    story.passes(5)
    assert story.effects == []
    assert story.job.reason == "no capacity in us-central2-b; quota used up"


@pytest.mark.parametrize("code", [None, 14, 16, 13])
def test_a_call_that_fails_changes_nothing_but_the_reason(code: int | None) -> None:
    story = Story().settle()
    before = story.job.slice
    story.cloud_refuses(code, "backend error")
    assert story.job.slice == before
    assert story.job.status is not Status.FAILED


def test_a_failing_program_is_retried_as_often_as_allowed_and_then_fails() -> None:
    story = Story().runs().program_fails(host=1, error="ValueError: batch 250").verdict()
    assert story.job.failures == 1
    assert story.job.slice is not None
    story.passes(60)
    assert story.job.attempts == 2
    story.all_hosts(HostPhase.RUNNING).program_fails(
        host=1, error="ValueError: batch 250"
    ).verdict()
    assert story.status() is Status.FAILED
    assert story.outcomes == [Outcome.PROGRAM_FAILED, Outcome.PROGRAM_FAILED]
    assert story.job.cause is not None
    assert (story.job.cause.host, story.job.cause.error) == (1, "ValueError: batch 250")
    assert story.job.cause.ahead_seconds == 0.5
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


def test_a_failure_is_judged_only_after_a_newer_look_at_the_cloud() -> None:
    story = Story().runs().program_fails()
    story.passes(60)
    assert story.outcomes == []
    story.look("SUSPENDED", "PREEMPTED")
    assert story.outcomes == [Outcome.PREEMPTED]
    assert story.job.failures == 0


def test_a_program_ended_by_a_signal_is_judged_only_if_its_host_lives_on() -> None:
    story = Story().runs().program_fails(code=143, error="terminated")
    story.look("ACTIVE", "READY").everybody_is_heard()
    assert story.outcomes == [], "the host may be going down"
    story.passes(PATIENCE.shutdown + 1).look("ACTIVE", "READY").everybody_is_heard()
    story.stopped = True
    story.settle()
    assert story.outcomes == [Outcome.PROGRAM_FAILED]


def test_siblings_of_a_silent_host_fail_and_are_not_blamed() -> None:
    story = Story().runs()
    story.now += 11
    story.host(0, HostPhase.EXITED, exit_code=134, error="heartbeat timeout", error_at=story.now)
    story.look("ACTIVE", "READY")
    story.passes(30).look("ACTIVE", "READY")
    assert story.outcomes == []
    story.passes(400).look("ACTIVE", "READY")
    assert story.outcomes == [Outcome.BAD_HOST]
    assert (story.job.bad_hosts, story.job.failures) == (1, 0)


def test_silence_counts_only_while_we_listen() -> None:
    """A server that was down for an hour has heard nobody; that is not the hosts' fault."""
    story = Story().runs()
    story.now += 3600
    story.listening_since = story.now
    story.hosts = tuple(replace(report, heard=None) for report in story.hosts)
    story.settle().look("ACTIVE", "READY").passes(PATIENCE.first_contact - 10)
    assert story.outcomes == []
    story.passes(30).look("ACTIVE", "READY")
    assert story.outcomes == [Outcome.BAD_HOST]


def test_a_silent_host_of_a_slice_that_is_no_longer_ready_is_a_preemption() -> None:
    story = Story().runs()
    story.passes(100).look("ACTIVE", "REPAIRING")
    assert story.outcomes == [Outcome.PREEMPTED]


def test_a_rebooted_host_outranks_the_siblings_that_crashed_first() -> None:
    story = Story().runs()
    story.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset", error_at=story.now)
    story.host(1, HostPhase.MISSING).settle()
    story.look("ACTIVE", "READY").everybody_is_heard()
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.failures == 0


def test_a_chip_that_cannot_be_opened_is_a_bad_host_not_a_failure() -> None:
    story = Story().runs()
    story.program_fails(host=1, error="Failed to initialize TPU system: open(/dev/vfio/0): busy")
    story.look("ACTIVE", "READY").everybody_is_heard()
    assert story.outcomes == [Outcome.BAD_HOST]
    assert (story.job.bad_hosts, story.job.failures) == (1, 0)


def test_a_program_that_saved_and_left_is_started_again_and_nothing_is_counted() -> None:
    story = Story().runs().program_fails(code=GO_ON_LATER).verdict()
    assert (story.job.failures, story.job.bad_hosts) == (0, 0)
    assert story.job.attempts == 2


def test_cancel_keeps_the_slice_and_resume_uses_it() -> None:
    story = Story().runs()
    story.job = replace(story.job, wish=Wish.CANCEL)
    story.settle()
    assert story.did(EffectKind.STOP)
    assert story.status() is Status.RUNNING
    story.stopped = True
    story.settle()
    assert story.status() is Status.CANCELLED
    assert story.did(EffectKind.RELEASE) == []
    story.job = lifecycle.resume(story.job)
    story.settle()
    assert story.job.attempts == 2
    assert story.job.asks == 1


def test_a_kept_slice_that_is_taken_is_released() -> None:
    story = Story().runs()
    story.job = replace(story.job, wish=Wish.CANCEL)
    story.stopped = True
    story.settle().look("SUSPENDED", "PREEMPTED")
    assert story.status() is Status.CANCELLED
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


@pytest.mark.parametrize("wish", [Wish.CANCEL, Wish.DELETE])
def test_a_job_ended_while_it_waits_leaves_nothing_behind(wish: Wish) -> None:
    story = Story().settle().cloud_takes_the_request()
    story.job = replace(story.job, wish=wish)
    story.settle()
    assert story.status() is Status.CANCELLED
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


def test_delete_stops_the_program_and_releases() -> None:
    story = Story().runs()
    story.job = replace(story.job, wish=Wish.DELETE)
    story.settle()
    story.stopped = True
    story.settle()
    assert story.status() is Status.CANCELLED
    assert story.job.slice is None
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


def test_an_invalid_request_fails_the_job_with_the_clouds_words() -> None:
    story = Story().settle().cloud_refuses(3, "Invalid value for acceleratorType")
    assert story.status() is Status.FAILED
    assert story.outcomes == [Outcome.REFUSED]


_STEPS = st.sampled_from(
    ["taken", "look", "blind", "fail", "silent", "reboot", "short", "run", "time", "heard", "stop"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_whatever_happens_every_slice_but_the_one_held_is_released(steps: list[str]) -> None:
    """The invariants that cost money or progress when they break."""
    story = Story(job=replace(Story().job, allowance=Allowance(2, 2, 3)))
    for step in steps:
        story.settle()
        job = story.job
        if job.slice is None:
            story.passes(30)
            continue
        ready = job.slice.phase is SlicePhase.READY
        match step:
            case "taken":
                story.cloud_takes_the_request().look("SUSPENDED", "PREEMPTED")
            case "look" if not ready:
                story.cloud_takes_the_request().look("ACTIVE", "READY")
            case "look":
                story.look("ACTIVE", "READY")
            case "blind":
                story.passes(1000)
            case "short":
                story.cloud_refuses(8, NO_CAPACITY.message)
            case "run" if ready and job.attempt:
                story.all_hosts(HostPhase.RUNNING)
            case "fail" if ready and job.attempt and story.hosts:
                story.program_fails()
            case "reboot" if ready and job.attempt and story.hosts:
                story.host(1, HostPhase.MISSING).settle()
            case "silent" | "time":
                story.passes(400)
            case "heard":
                story.everybody_is_heard()
            case "stop":
                story.stopped = True
                story.settle()
            case _:
                continue
    asked = set(story.did(EffectKind.ASK))
    released = set(story.did(EffectKind.RELEASE))
    held = {story.job.slice.name} if story.job.slice else set()
    assert asked - released == held
    assert held.isdisjoint(released)
