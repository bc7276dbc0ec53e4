"""A job is CANCELLED only after every host confirmed the stop, or its slice is gone."""

from dataclasses import replace

import pytest

from drumline.jobs.core.lifecycle import adapt_times
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    DesiredState,
    EffectType,
    Status,
)
from tests.jobs.scenario import TIMEOUTS, Scenario

SLICE = "dl-me-000001-1"


def stopping(wish: DesiredState, keep: float = 3600.0) -> Scenario:
    """Return a running job whose user asked to end it while host 1 cannot be reached."""
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=wish, keep=keep)
    scenario.settle()
    scenario.unreachable = (1,)
    return scenario.settle()


def test_a_cancel_waits_for_the_host_that_cannot_be_reached() -> None:
    scenario = stopping(DesiredState.CANCEL)
    assert not scenario.status().ended
    assert scenario.job.reason == "stopping: host 1 cannot be reached"
    scenario.effects.clear()
    scenario.passes(60.0)
    assert set(scenario.did(EffectType.STOP)) == {SLICE}, "the stop is repeated"
    assert not scenario.did(EffectType.RELEASE)
    scenario.unreachable, scenario.stopped = (), True
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.placement is not None, "kept for a resume"


def test_a_cancel_waits_for_the_program_on_an_earlier_slice_that_is_never_deleted() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=DesiredState.CANCEL, keep=3600.0)
    scenario.stopped, scenario.old_program_may_run = True, True
    scenario.settle()
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert not scenario.status().ended
    assert scenario.job.reason == "stopping: waiting for its slice to be deleted"
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.outcomes == [EndReason.CANCELLED]


def test_a_cancel_ends_when_the_slice_of_the_host_is_gone() -> None:
    scenario = stopping(DesiredState.CANCEL).look(None, None)
    assert scenario.status() is Status.CANCELLED
    assert scenario.outcomes == [EndReason.CANCELLED]


def test_a_slice_with_a_host_that_stays_unreachable_is_not_kept() -> None:
    scenario = stopping(DesiredState.CANCEL)
    scenario.old_program_may_run = True
    scenario.passes(TIMEOUTS.bad_silence + 1)
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert not scenario.status().ended
    assert scenario.job.reason == (
        "stopping: a host cannot be reached, waiting for its slice to be deleted"
    )
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.outcomes == [EndReason.CANCELLED]


@pytest.mark.parametrize(
    ("wish", "keep"), [(DesiredState.DELETE, 3600.0), (DesiredState.CANCEL, 0.0)]
)
def test_a_slice_that_is_not_kept_is_released_to_confirm_the_stop(
    wish: DesiredState, keep: float
) -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=wish, keep=keep)
    scenario.settle()
    scenario.unreachable, scenario.old_program_may_run = (0, 1), True
    scenario.settle()
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert not scenario.status().ended, "its program may still run"
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.status() is Status.CANCELLED


def test_a_slice_that_is_being_deleted_may_still_run_the_program() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=DesiredState.CANCEL)
    scenario.old_program_may_run = True
    scenario.look("DELETING", "READY")
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert not scenario.status().ended
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.status() is Status.CANCELLED


def test_a_resume_waits_for_the_host_too() -> None:
    scenario = stopping(DesiredState.CANCEL)
    scenario.job = replace(scenario.job, wish=DesiredState.RESTART)
    scenario.settle()
    assert scenario.job.attempts == 1
    scenario.unreachable, scenario.stopped = (), True
    scenario.settle()
    assert (scenario.job.attempts, scenario.job.asks) == (2, 1)
    assert scenario.job.wish is DesiredState.RUN


def test_a_resume_after_the_release_waits_for_the_old_slice() -> None:
    scenario = stopping(DesiredState.CANCEL)
    scenario.old_program_may_run = True
    scenario.passes(TIMEOUTS.bad_silence + 1)
    scenario.job = replace(scenario.job, wish=DesiredState.RESTART)
    scenario.settle()
    assert scenario.job.asks == 1
    assert scenario.job.reason == "waiting for the previous slice to be deleted"
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.job.asks == 2


def failed_with_a_host_out_of_reach() -> Scenario:
    scenario = Scenario().runs().program_fails().look("ACTIVE", "READY").everybody_is_heard()
    scenario.unreachable = (1,)
    return scenario.settle()


def test_a_failed_program_is_started_again_when_every_host_confirmed_its_stop() -> None:
    scenario = failed_with_a_host_out_of_reach()
    assert scenario.outcomes == []
    scenario.effects.clear()
    scenario.settle()
    assert scenario.did(EffectType.STOP)
    scenario.unreachable, scenario.stopped = (), True
    scenario.settle().passes(TIMEOUTS.rest + 1)
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]
    assert scenario.job.attempts == 2


def test_a_host_that_answers_and_never_confirms_is_replaced() -> None:
    scenario = failed_with_a_host_out_of_reach()
    for _ in range(5):
        scenario.now += TIMEOUTS.bad_silence / 4
        scenario.everybody_is_heard()
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.did(EffectType.RELEASE) == [SLICE]


def test_a_host_that_is_back_after_a_long_silence_is_told_to_stop_again() -> None:
    scenario = failed_with_a_host_out_of_reach()
    scenario.passes(TIMEOUTS.bad_silence + 60)
    assert scenario.outcomes == [], "no poll has shown yet what the slice does"
    scenario.effects.clear()
    scenario.everybody_is_heard()
    assert scenario.outcomes == []
    assert scenario.did(EffectType.STOP)
    scenario.unreachable, scenario.stopped = (), True
    scenario.settle()
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]


def test_time_in_which_the_server_did_not_listen_does_not_count_against_a_host() -> None:
    scenario = failed_with_a_host_out_of_reach().everybody_is_heard()
    scenario.now += 3600.0
    scenario.listening_since = scenario.now
    scenario.everybody_is_heard().settle()
    assert scenario.outcomes == []


@pytest.mark.parametrize("wish", [DesiredState.RUN, DesiredState.CANCEL])
def test_the_wait_begins_again_with_a_new_server(wish: DesiredState) -> None:
    scenario = failed_with_a_host_out_of_reach().everybody_is_heard()
    scenario.job = replace(scenario.job, wish=wish)
    scenario.settle()
    scenario.now += 24 * 3600.0
    scenario.listening_since = None
    scenario.job = adapt_times(scenario.job, scenario.now)
    scenario.everybody_is_heard()
    assert scenario.outcomes == []
    assert not scenario.did(EffectType.RELEASE)
