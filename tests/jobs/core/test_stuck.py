"""Decisions on programs whose steps stop, and on programs that save and ask for a restart."""

from dataclasses import replace

import pytest

from drumline.jobs.core.causes import EXIT_FOR_RESTART
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    EffectType,
    Status,
)
from drumline.observed import HostPhase
from tests.jobs.scenario import TIMEOUTS, Scenario

HALF_AN_HOUR = 1800.0


def training(**changes: object) -> Scenario:
    """A job whose running program has reported steps 149 to 151."""
    scenario = Scenario()
    scenario.job = replace(scenario.job, **{"stuck_after": HALF_AN_HOUR, **changes})  # type: ignore[arg-type]
    scenario.runs()
    for step in (149, 150, 151):
        scenario.now += 10
        scenario.send_heartbeat(step, total=300, checkpoint=150)
    return scenario


def test_a_program_that_stops_stepping_is_ended_and_started_again() -> None:
    scenario = training().hangs(HALF_AN_HOUR)
    assert set(scenario.did(EffectType.STOP)) == {"dl-me-000001-1"}
    assert scenario.job.reason == "no step for 30 min, the last was step 151"
    scenario.stopped = True
    scenario.settle()
    assert scenario.outcomes == [EndReason.STUCK]
    assert (scenario.job.failures, scenario.job.preemptions, scenario.job.bad_hosts) == (1, 0, 0)
    assert scenario.events[-1] == "stuck"
    scenario.passes(TIMEOUTS.rest + 1)
    assert scenario.job.attempts == 2
    assert scenario.job.asks == 1, "on the slice it has"


def test_a_program_that_hangs_again_and_again_fails_the_job() -> None:
    scenario = training().hangs(HALF_AN_HOUR)
    scenario.stopped = True
    scenario.settle().passes(60)
    scenario.all_hosts(HostPhase.RUNNING).send_heartbeat(151).send_heartbeat(152).hangs(
        HALF_AN_HOUR
    )
    scenario.stopped = True
    scenario.settle()
    assert scenario.status() is Status.FAILED
    assert scenario.job.cause is not None
    assert scenario.job.cause.kind == "stuck"


def test_a_server_that_begins_with_a_clock_set_forward_takes_no_program_for_stuck() -> None:
    scenario = training()
    scenario.now += 24 * HALF_AN_HOUR  # the wall clock was set forward while no server ran
    scenario.listening_since = scenario.now
    scenario.hangs(60)
    assert scenario.did(EffectType.STOP) == []
    scenario.hangs(HALF_AN_HOUR)
    assert scenario.did(EffectType.STOP) != [], "it is watched from then on"


def test_a_slow_step_is_waited_for() -> None:
    scenario = training().hangs(HALF_AN_HOUR - 60)
    assert scenario.send_heartbeat(152).hangs(HALF_AN_HOUR - 60).did(EffectType.STOP) == []
    assert scenario.status() is Status.RUNNING


def test_a_step_that_comes_at_the_last_moment_clears_the_suspicion() -> None:
    scenario = training()
    scenario.now += HALF_AN_HOUR + 1
    scenario.everybody_is_heard()
    assert scenario.job.attempt is not None
    assert scenario.job.attempt.stuck_at is not None
    scenario.send_heartbeat(152).hangs(60)
    assert scenario.job.attempt.stuck_at is None
    assert scenario.did(EffectType.STOP) == []


def test_going_back_to_a_checkpoint_is_a_sign_of_life() -> None:
    scenario = training().hangs(HALF_AN_HOUR - 60)
    assert scenario.send_heartbeat(150).hangs(HALF_AN_HOUR - 60).did(EffectType.STOP) == []


def test_the_first_step_may_take_three_times_as_long() -> None:
    """The program compiles before its first step, and a resumed program reports its step before
    that.
    """
    scenario = Scenario()
    scenario.job = replace(scenario.job, stuck_after=HALF_AN_HOUR)
    scenario.runs().send_heartbeat(150, checkpoint=150).hangs(2.9 * HALF_AN_HOUR)
    assert scenario.did(EffectType.STOP) == []
    assert scenario.hangs(0.2 * HALF_AN_HOUR).did(EffectType.STOP)


def test_the_end_after_the_last_step_may_take_three_times_as_long() -> None:
    scenario = training().send_heartbeat(300, total=300).hangs(2.9 * HALF_AN_HOUR)
    assert scenario.did(EffectType.STOP) == []


def test_a_program_that_never_reports_steps_is_never_stuck() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, stuck_after=HALF_AN_HOUR)
    assert scenario.runs().hangs(100 * HALF_AN_HOUR).did(EffectType.STOP) == []


def test_a_program_without_steps_since_its_restart_is_stuck() -> None:
    scenario = training().look("SUSPENDED", "PREEMPTED")
    scenario.cloud_takes_the_request().look("ACTIVE", "READY").all_hosts(HostPhase.RUNNING)
    assert scenario.hangs(2.9 * HALF_AN_HOUR).did(EffectType.STOP) == []
    scenario.hangs(0.2 * HALF_AN_HOUR)
    assert scenario.did(EffectType.STOP)
    assert "none since it started" in scenario.job.reason


def test_never_is_never() -> None:
    assert training(stuck_after=None).hangs(100 * HALF_AN_HOUR).did(EffectType.STOP) == []


def test_a_preempted_slice_explains_a_missing_step() -> None:
    scenario = training()
    scenario.now += HALF_AN_HOUR + 1
    scenario.everybody_is_heard()
    scenario.look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert scenario.job.failures == 0


def test_without_a_newer_poll_no_program_is_stuck() -> None:
    scenario = training()
    for _ in range(10):
        scenario.now += HALF_AN_HOUR
        scenario.everybody_is_heard()
    assert scenario.did(EffectType.STOP) == []
    assert scenario.look("ACTIVE", "READY").did(EffectType.STOP)


def test_hosts_we_cannot_hear_are_not_called_stuck() -> None:
    """No report for an hour, from a program that may have continued meanwhile."""
    scenario = training()
    scenario.passes(2 * HALF_AN_HOUR)
    assert scenario.did(EffectType.STOP) == []
    scenario.now += 1
    scenario.everybody_is_heard().look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.did(EffectType.STOP) == [], "the newest heartbeat is still on its way"
    scenario.send_heartbeat(400).hangs(60)
    assert scenario.did(EffectType.STOP) == []
    assert scenario.outcomes == []


def test_a_preemption_event_has_the_step_and_the_checkpoint() -> None:
    scenario = training().look("SUSPENDED", "PREEMPTED")
    assert "slice preempted at step 151 (checkpoint: step 150)" in scenario.event_texts


# Exit code 75


def test_one_that_leaves_because_its_slice_is_taken_is_preempted() -> None:
    scenario = training().program_fails(code=EXIT_FOR_RESTART)
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.did(EffectType.STOP) == [], "the host may be going down"
    scenario.passes(20).look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert (scenario.job.preemptions, scenario.job.failures) == (1, 0)


def test_one_that_leaves_at_once_every_time_is_started_ever_more_slowly() -> None:
    scenario = Scenario().runs()
    rests = []
    for attempt in range(2, 9):
        scenario.leaves()
        left = scenario.now
        while scenario.job.attempts < attempt:
            scenario.passes(0.5)
        rests.append(scenario.now - left)
        scenario.all_hosts(HostPhase.RUNNING)
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(60, abs=1)
    assert set(scenario.outcomes) == {EndReason.RESTART_REQUESTED}
    assert (scenario.job.failures, scenario.job.preemptions) == (0, 0)


def test_one_that_worked_for_a_while_before_it_left_is_started_at_once() -> None:
    scenario = Scenario().runs()
    for _ in range(3):
        scenario.now += 3600
        scenario.everybody_is_heard().leaves().passes(TIMEOUTS.rest + 0.1)
        scenario.all_hosts(HostPhase.RUNNING)
    assert scenario.job.attempts == 4


def test_hosts_that_the_signal_ended_before_a_save_do_not_change_the_outcome() -> None:
    scenario = Scenario().runs()
    scenario.host(0, HostPhase.EXITED, exit_code=143, error_at=scenario.now, error="terminated")
    scenario.host(
        1, HostPhase.EXITED, exit_code=EXIT_FOR_RESTART, error_at=scenario.now + 1
    ).settle()
    scenario.passes(TIMEOUTS.shutdown + 1).verdict()
    assert scenario.outcomes == [EndReason.RESTART_REQUESTED]


def test_a_failure_beside_one_that_left_is_a_failure() -> None:
    scenario = Scenario().runs()
    scenario.host(
        0, HostPhase.EXITED, exit_code=1, error_at=scenario.now, error="ValueError: batch"
    )
    scenario.host(
        1, HostPhase.EXITED, exit_code=EXIT_FOR_RESTART, error_at=scenario.now + 1
    ).settle()
    scenario.passes(TIMEOUTS.shutdown + 1).verdict()
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]
