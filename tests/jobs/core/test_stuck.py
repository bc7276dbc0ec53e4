"""A program whose steps stop coming, and one that leaves to go on later: what is decided."""

from dataclasses import replace

import pytest

from drumline.jobs.core.causes import EXIT_FOR_RESTART
from drumline.jobs.core.state import EffectKind, Outcome, Status
from drumline.observed import HostPhase
from tests.jobs.story import PATIENCE, Story

HALF_AN_HOUR = 1800.0


def training(**changes: object) -> Story:
    """A job whose program runs and has told steps 149 to 151."""
    story = Story()
    story.job = replace(story.job, **{"stuck_after": HALF_AN_HOUR, **changes})  # type: ignore[arg-type]
    story.runs()
    for step in (149, 150, 151):
        story.now += 10
        story.tells(step, total=300, checkpoint=150)
    return story


def test_a_program_that_stops_stepping_is_ended_and_started_again() -> None:
    story = training().hangs(HALF_AN_HOUR)
    assert set(story.did(EffectKind.STOP)) == {"dl-me-000001-1"}
    assert story.job.reason == "no step for 30 min, the last was step 151"
    story.stopped = True
    story.settle()
    assert story.outcomes == [Outcome.STUCK]
    assert (story.job.failures, story.job.preemptions, story.job.bad_hosts) == (1, 0, 0)
    assert story.events[-1] == "stuck"
    story.passes(PATIENCE.rest + 1)
    assert story.job.attempts == 2
    assert story.job.asks == 1, "on the slice it has"


def test_a_program_that_hangs_again_and_again_fails_the_job() -> None:
    story = training().hangs(HALF_AN_HOUR)
    story.stopped = True
    story.settle().passes(60)
    story.all_hosts(HostPhase.RUNNING).tells(151).tells(152).hangs(HALF_AN_HOUR)
    story.stopped = True
    story.settle()
    assert story.status() is Status.FAILED
    assert story.job.cause is not None
    assert story.job.cause.kind == "stuck"


def test_a_server_that_begins_with_a_clock_set_forward_takes_no_program_for_stuck() -> None:
    story = training()
    story.now += 24 * HALF_AN_HOUR  # the wall was set forward while no server ran
    story.listening_since = story.now
    story.hangs(60)
    assert story.did(EffectKind.STOP) == []
    story.hangs(HALF_AN_HOUR)
    assert story.did(EffectKind.STOP) != [], "it is watched from then on"


def test_a_slow_step_is_waited_for() -> None:
    story = training().hangs(HALF_AN_HOUR - 60)
    assert story.tells(152).hangs(HALF_AN_HOUR - 60).did(EffectKind.STOP) == []
    assert story.status() is Status.RUNNING


def test_a_step_that_comes_at_the_last_moment_clears_the_suspicion() -> None:
    story = training()
    story.now += HALF_AN_HOUR + 1
    story.everybody_is_heard()
    assert story.job.attempt is not None
    assert story.job.attempt.stuck_at is not None
    story.tells(152).hangs(60)
    assert story.job.attempt.stuck_at is None
    assert story.did(EffectKind.STOP) == []


def test_going_back_to_a_checkpoint_is_a_sign_of_life() -> None:
    story = training().hangs(HALF_AN_HOUR - 60)
    assert story.tells(150).hangs(HALF_AN_HOUR - 60).did(EffectKind.STOP) == []


def test_the_first_step_may_take_three_times_as_long() -> None:
    """Before it the program compiles, and a program that resumed tells its step before that."""
    story = Story()
    story.job = replace(story.job, stuck_after=HALF_AN_HOUR)
    story.runs().tells(150, checkpoint=150).hangs(2.9 * HALF_AN_HOUR)
    assert story.did(EffectKind.STOP) == []
    assert story.hangs(0.2 * HALF_AN_HOUR).did(EffectKind.STOP)


def test_what_follows_the_last_step_may_take_three_times_as_long() -> None:
    story = training().tells(300, total=300).hangs(2.9 * HALF_AN_HOUR)
    assert story.did(EffectKind.STOP) == []


def test_a_program_that_never_told_a_step_is_left_alone() -> None:
    story = Story()
    story.job = replace(story.job, stuck_after=HALF_AN_HOUR)
    assert story.runs().hangs(100 * HALF_AN_HOUR).did(EffectKind.STOP) == []


def test_one_that_told_steps_before_and_none_since_its_restart_is_not() -> None:
    story = training().look("SUSPENDED", "PREEMPTED")
    story.cloud_takes_the_request().look("ACTIVE", "READY").all_hosts(HostPhase.RUNNING)
    assert story.hangs(2.9 * HALF_AN_HOUR).did(EffectKind.STOP) == []
    story.hangs(0.2 * HALF_AN_HOUR)
    assert story.did(EffectKind.STOP)
    assert "none since it started" in story.job.reason


def test_never_is_never() -> None:
    assert training(stuck_after=None).hangs(100 * HALF_AN_HOUR).did(EffectKind.STOP) == []


def test_a_slice_that_was_taken_explains_why_no_step_came() -> None:
    story = training()
    story.now += HALF_AN_HOUR + 1
    story.everybody_is_heard()
    story.look("SUSPENDED", "PREEMPTED")
    assert story.outcomes == [Outcome.PREEMPTED]
    assert story.job.failures == 0


def test_without_a_newer_look_at_the_cloud_nobody_is_called_stuck() -> None:
    story = training()
    for _ in range(10):
        story.now += HALF_AN_HOUR
        story.everybody_is_heard()
    assert story.did(EffectKind.STOP) == []
    assert story.look("ACTIVE", "READY").did(EffectKind.STOP)


def test_hosts_we_cannot_hear_are_not_called_stuck() -> None:
    """Nothing was heard for an hour, from a program that may have run on all the while."""
    story = training()
    story.passes(2 * HALF_AN_HOUR)
    assert story.did(EffectKind.STOP) == []
    story.now += 1
    story.everybody_is_heard().look("ACTIVE", "READY").everybody_is_heard()
    assert story.did(EffectKind.STOP) == [], "the newest heartbeat is still on its way"
    story.tells(400).hangs(60)
    assert story.did(EffectKind.STOP) == []
    assert story.outcomes == []


def test_the_preemption_says_how_far_it_came_and_what_is_saved() -> None:
    story = training().look("SUSPENDED", "PREEMPTED")
    assert "slice taken by the cloud at step 151 (checkpoint: step 150)" in story.told


# Exit code 75


def test_one_that_leaves_because_its_slice_is_taken_is_preempted() -> None:
    story = training().program_fails(code=EXIT_FOR_RESTART)
    story.look("ACTIVE", "READY").everybody_is_heard()
    assert story.did(EffectKind.STOP) == [], "the host may be going down"
    story.passes(20).look("SUSPENDED", "PREEMPTED")
    assert story.outcomes == [Outcome.PREEMPTED]
    assert (story.job.preemptions, story.job.failures) == (1, 0)


def test_one_that_leaves_at_once_every_time_is_started_ever_more_slowly() -> None:
    story = Story().runs()
    rests = []
    for attempt in range(2, 9):
        story.leaves()
        left = story.now
        while story.job.attempts < attempt:
            story.passes(0.5)
        rests.append(story.now - left)
        story.all_hosts(HostPhase.RUNNING)
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(60, abs=1)
    assert set(story.outcomes) == {Outcome.RESTARTED}
    assert (story.job.failures, story.job.preemptions) == (0, 0)


def test_one_that_worked_for_a_while_before_it_left_is_started_at_once() -> None:
    story = Story().runs()
    for _ in range(3):
        story.now += 3600
        story.everybody_is_heard().leaves().passes(PATIENCE.rest + 0.1)
        story.all_hosts(HostPhase.RUNNING)
    assert story.job.attempts == 4


def test_siblings_that_the_signal_ended_before_they_could_save_change_nothing() -> None:
    story = Story().runs()
    story.host(0, HostPhase.EXITED, exit_code=143, error_at=story.now, error="terminated")
    story.host(1, HostPhase.EXITED, exit_code=EXIT_FOR_RESTART, error_at=story.now + 1).settle()
    story.passes(PATIENCE.shutdown + 1).verdict()
    assert story.outcomes == [Outcome.RESTARTED]


def test_a_failure_beside_one_that_left_is_a_failure() -> None:
    story = Story().runs()
    story.host(0, HostPhase.EXITED, exit_code=1, error_at=story.now, error="ValueError: batch")
    story.host(1, HostPhase.EXITED, exit_code=EXIT_FOR_RESTART, error_at=story.now + 1).settle()
    story.passes(PATIENCE.shutdown + 1).verdict()
    assert story.outcomes == [Outcome.PROGRAM_FAILED]
