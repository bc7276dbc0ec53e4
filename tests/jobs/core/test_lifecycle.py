"""Stories of jobs: what the cloud and the hosts show, and what is decided."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cloud.google.placements import RpcError
from drumline.jobs.core import lifecycle
from drumline.jobs.core.state import (
    Allowance,
    EffectKind,
    Outcome,
    PlacementPhase,
    Status,
    Wish,
    Zone,
)
from drumline.observed.hosts import HostPhase
from drumline.observed.placements import Endpoint, ListedPlacement, ListedSlice, PlacementState
from tests.jobs.story import NO_CAPACITY, PATIENCE, A, B, Story


def test_an_undisturbed_job_asks_runs_and_releases() -> None:
    story = Story().runs()
    assert story.status() is Status.RUNNING
    story.all_hosts(HostPhase.EXITED, exit_code=0)
    assert story.status() is Status.SUCCEEDED
    assert story.outcomes == [Outcome.SUCCEEDED]
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


def test_a_program_that_is_over_at_once_is_told_like_any_other() -> None:
    long, short = Story().runs(), Story().slice_is_there()
    for story in (long, short):
        story.all_hosts(HostPhase.EXITED, exit_code=0)
        assert story.status() is Status.SUCCEEDED
    assert short.events == long.events
    assert "run" in short.events


def test_the_name_of_a_slice_is_written_before_it_is_asked_for() -> None:
    story = Story().settle()
    assert story.job.placement is not None
    assert story.job.placement.phase is PlacementPhase.ASKING
    assert set(story.did(EffectKind.ASK)) == {story.job.placement.name}


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
    assert story.job.placement is not None
    assert story.job.placement.name == "dl-me-000001-2"
    assert (story.job.preemptions, story.job.failures, story.job.bad_hosts) == (1, 0, 0)


def test_a_job_preempted_while_it_waits_asks_again() -> None:
    story = Story().settle().cloud_takes_the_request()
    story.look("SUSPENDED", None, RpcError(3, "update is not supported while in state PREEMPTED"))
    assert story.job.preemptions == 1
    assert story.job.placement is None
    story.passes(PATIENCE.retry + 1)
    assert story.job.placement is not None
    assert story.job.placement.name == "dl-me-000001-2"


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
    assert story.job.placement is not None
    assert story.did(EffectKind.RELEASE) == []


def test_a_new_slice_waits_until_the_old_one_can_no_longer_run() -> None:
    story = Story().runs()
    story.old_slice_alive = True
    story.look("SUSPENDING", "READY")
    assert story.job.placement is None
    story.old_slice_alive = False
    story.settle()
    assert story.job.placement is not None


def test_several_slices_are_one_placement_that_is_held_and_lost_together() -> None:
    story = Story()
    story.job = replace(story.job, slices=2)
    story.settle()
    wanted = story.job.placement
    assert wanted is not None
    assert (wanted.slices, wanted.hosts, wanted.chips) == (2, 4, 16)
    story.cloud_takes_the_request()
    ends = tuple(Endpoint(f"10.0.0.{n}", f"34.0.0.{n}") for n in range(2))
    story.listed = ListedPlacement(
        wanted.name, wanted.zone, PlacementState.BOOTING, "v4-16", {}, "CREATING",
        (ListedSlice("a", ends), ListedSlice("b")),
    )  # fmt: skip
    story.passes(1)
    assert story.status() is Status.STARTING
    slices = (ListedSlice("a", ends), ListedSlice("b", ends))
    story.listed = replace(story.listed, state=PlacementState.READY, word="READY", slices=slices)
    story.passes(1)
    assert set(story.did(EffectKind.DRIVE)) == {wanted.name}
    lost = replace(story.listed, state=PlacementState.LOST, why_lost="node PREEMPTED")
    story.listed = lost
    story.passes(1)
    assert story.did(EffectKind.RELEASE) == [wanted.name]
    assert story.outcomes == [Outcome.PREEMPTED]


def test_no_capacity_moves_to_the_next_zone_and_says_why() -> None:
    story = Story().settle()
    story.zones = {A: Zone(open=False, why="no capacity in us-central2-b"), B: Zone()}
    story.cloud_refuses(8, NO_CAPACITY.message)
    assert story.did(EffectKind.SHORT) == ["dl-me-000001-1"]
    assert "no capacity in us-central2-b" in story.job.reason
    story.settle()
    assert story.job.placement is not None
    assert story.job.placement.zone == "local-b"
    assert story.job.attempts == 1


def test_a_request_that_waits_too_long_moves_only_when_another_zone_is_open() -> None:
    story = Story().settle().cloud_takes_the_request()
    story.zones = {A: Zone(), B: Zone(open=False, why="no capacity in local-b")}
    story.look("WAITING_FOR_RESOURCES", None)
    story.passes(700)
    assert story.job.placement is not None
    assert story.job.placement.zone == A.zone
    assert story.status() is Status.WAITING
    story.zones = {A: Zone(), B: Zone()}
    story.zones[A] = Zone(open=False, why="short")
    story.settle()
    assert story.job.placement is not None
    assert story.job.placement.zone == B.zone


def test_all_zones_short_says_so_and_asks_for_nothing() -> None:
    story = Story()
    story.zones = {A: Zone(False, "no capacity in us-central2-b"), B: Zone(False, "quota used up")}
    story.passes(5)
    assert story.effects == []
    assert story.job.reason == "no capacity in us-central2-b; quota used up"


@pytest.mark.parametrize("code", [None, 14, 16, 13])
def test_a_call_that_fails_changes_nothing_but_the_reason(code: int | None) -> None:
    story = Story().settle()
    before = story.job.placement
    story.cloud_refuses(code, "backend error")
    assert story.job.placement == before
    assert story.job.status is not Status.FAILED


def test_a_failing_program_is_retried_as_often_as_allowed_and_then_fails() -> None:
    story = Story().runs().program_fails(host=1, error="ValueError: batch 250").verdict()
    assert story.job.failures == 1
    assert story.job.placement is not None
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


def test_a_program_that_was_killed_is_judged_only_if_its_host_lives_on() -> None:
    story = Story().runs().program_fails(code=137, error="killed")
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
    story = Story().runs().leaves()
    assert story.outcomes == [Outcome.LEFT]
    assert (story.job.failures, story.job.bad_hosts, story.job.preemptions) == (0, 0, 0)
    story.passes(PATIENCE.rest + 1)
    assert story.job.attempts == 2
    assert story.job.asks == 1


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
    assert story.job.placement is None
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
        if job.placement is None:
            story.passes(30)
            continue
        ready = job.placement.phase is PlacementPhase.READY
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
    held = {story.job.placement.name} if story.job.placement else set()
    assert asked - released == held
    assert held.isdisjoint(released)


def test_a_failing_set_up_is_a_failure_of_the_set_up_not_of_the_program() -> None:
    story = Story().slice_is_there()
    error = "setup:2  pip install nope  exit code 1: no matching distribution"
    for last in (False, True):
        story.all_hosts(HostPhase.FAILED, exit_code=1, error=error, detail="setup: setup")
        story.passes(PATIENCE.settle + 1).verdict()
        if not last:
            story.passes(60)
    assert story.outcomes == [Outcome.SETUP_FAILED] * 2
    assert story.status() is Status.FAILED
    where = f"set-up failed on host 0 of 2: {error}"
    assert story.job.reason == f"2 failures, the last of the set-up; {where}"
    assert "program" not in " ".join(story.told)


def test_the_code_is_told_when_all_hosts_have_it_and_the_set_up_when_it_is_done() -> None:
    story = Story().slice_is_there()
    story.host(0, HostPhase.PREPARING, detail="setup: uv")
    story.host(1, HostPhase.PREPARING, detail="code").settle()
    assert "code" not in story.events
    story.all_hosts(HostPhase.PREPARING, detail="setup: uv")
    assert story.events[-1] == "code"
    story.passes(30).all_hosts(HostPhase.RUNNING)
    assert story.events[-2:] == ["code", "run"]
    story.passes(1)
    assert story.events.count("code") == 1


@pytest.mark.parametrize("server", ["the same", "a new one"])
def test_siblings_of_a_host_that_rebooted_are_not_blamed_before_it_has_said_so(server: str) -> None:
    story = Story().runs()
    at = story.now
    before = (HostPhase.RUNNING, at) if server == "the same" else (HostPhase.CONNECTING, None)
    story.host(1, before[0], reported_at=before[1])
    story.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset by peer", error_at=at)
    story.settle().passes(PATIENCE.settle + 1)
    # It is back: connected, and not yet asked what became of the program.
    story.look("ACTIVE", "READY").host(1, before[0], reported_at=before[1])
    story.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset by peer", error_at=at)
    story.settle()
    assert story.did(EffectKind.STOP) == []
    story.host(1, HostPhase.MISSING)
    story.settle()
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.failures == 0


def test_a_program_that_failed_is_judged_though_its_host_says_no_more() -> None:
    story = Story().runs()
    at = story.now
    for index in range(2):
        error = {"error": "ValueError", "error_at": at, "reported_at": at}
        story.host(index, HostPhase.EXITED, exit_code=1, **error)
    story.settle().passes(PATIENCE.settle + 1).look("ACTIVE", "READY").settle()
    assert story.job.attempt is not None
    assert story.job.attempt.stopping


def test_a_host_that_ended_its_program_and_is_silent_since_is_a_bad_one() -> None:
    """By a signal: it may be shutting down, so it has to show that it lives on."""
    story = Story().runs()
    at = story.now
    for index in range(2):
        story.host(index, HostPhase.EXITED, exit_code=-15, error_at=at, reported_at=at)
    story.settle()
    hosts = tuple(replace(report, heard=at) for report in story.hosts)
    for _ in range(20):
        story.passes(60)
        story.hosts = hosts
        story.look("ACTIVE", "READY").settle()
        if story.outcomes:
            break
    assert story.outcomes == [Outcome.BAD_HOST]
