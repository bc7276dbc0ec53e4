"""The outputs of a job are copied while it runs, and before its slices go or the job ends."""

from dataclasses import replace

import pytest

from drumline.jobs.core.lifecycle import adapt_times
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    DesiredState,
    EffectType,
    OutputsCopy,
    Status,
)
from drumline.observed import HostPhase
from tests.jobs.scenario import TIMEOUTS, Scenario

COPY = EffectType.COPY_OUTPUTS
SUMMARY = "3 files are in /home/lab/outputs"


def runs(**changes: object) -> Scenario:
    scenario = Scenario()
    scenario.job = replace(scenario.job, outputs=True, **changes)  # type: ignore[arg-type]
    return scenario.runs()


def copied(scenario: Scenario, seconds: float = 1.0) -> Scenario:
    """End a copy that begins now."""
    began_at = scenario.now
    scenario.now += seconds
    scenario.outputs = OutputsCopy(began_at, scenario.now, SUMMARY)
    return scenario.everybody_is_heard()


def succeeds(scenario: Scenario) -> Scenario:
    scenario.effects.clear()
    return scenario.all_hosts(HostPhase.EXITED, exit_code=0)


def test_a_job_without_outputs_ends_at_once() -> None:
    scenario = succeeds(Scenario().runs())
    assert scenario.status() is Status.SUCCEEDED
    assert not scenario.did(COPY)
    assert "outputs" not in scenario.events


def test_a_success_waits_for_a_copy_that_began_after_it() -> None:
    scenario = runs()
    began_at = scenario.now
    scenario.now += 10
    succeeds(scenario)
    assert scenario.status() is Status.RUNNING
    assert scenario.job.reason == "copying the outputs"
    assert scenario.did(COPY)
    assert not scenario.did(EffectType.RELEASE)
    scenario.outputs = OutputsCopy(began_at, scenario.now, SUMMARY)
    scenario.settle()
    assert scenario.status() is Status.RUNNING, "that copy may miss the last changes"
    copied(scenario)
    assert scenario.status() is Status.SUCCEEDED
    assert len(set(scenario.did(EffectType.RELEASE))) == 1
    assert scenario.event_texts[scenario.events.index("outputs")] == SUMMARY


def test_a_success_stays_one_if_the_slice_is_lost_before_the_copy() -> None:
    scenario = succeeds(runs()).look("SUSPENDED", "PREEMPTED")
    assert scenario.status() is Status.SUCCEEDED
    assert scenario.outcomes == [EndReason.SUCCEEDED]
    assert "the first copy had not ended when the slice was lost" in scenario.event_texts


def test_a_success_stays_one_for_a_new_server_that_finds_no_slice() -> None:
    scenario = succeeds(runs())
    scenario.hosts = ()
    scenario.job = adapt_times(scenario.job, scenario.now)
    scenario.look(None, None)
    assert scenario.outcomes == [EndReason.SUCCEEDED]


@pytest.mark.parametrize("wish", [DesiredState.CANCEL, DesiredState.DELETE])
def test_a_success_stays_one_if_the_user_stops_the_job_during_the_copy(wish: DesiredState) -> None:
    scenario = succeeds(runs())
    scenario.job = replace(scenario.job, wish=wish)
    copied(scenario.settle())
    assert scenario.status() is Status.SUCCEEDED
    assert scenario.placement is None


def test_a_copy_that_does_not_end_delays_the_end_for_a_limited_time() -> None:
    scenario = succeeds(runs())
    scenario.passes(TIMEOUTS.outputs - 1)
    assert scenario.status() is Status.RUNNING
    scenario.passes(2)
    assert scenario.status() is Status.SUCCEEDED
    assert "the copy of the last changes took longer than 10 min" in scenario.event_texts


def test_the_last_failure_waits_for_a_copy() -> None:
    scenario = runs(allowance=Allowance(failures=0)).program_fails().verdict()
    assert not scenario.status().ended
    copied(scenario)
    assert scenario.status() is Status.FAILED
    assert scenario.events.count("outputs") == 1


def test_a_restart_on_the_same_slices_does_not_wait() -> None:
    scenario = runs().program_fails().verdict()
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]
    assert not scenario.status().ended


@pytest.mark.parametrize("wish", [DesiredState.CANCEL, DesiredState.DELETE])
def test_a_stop_by_the_user_waits_for_a_copy_after_the_program_has_stopped(
    wish: DesiredState,
) -> None:
    scenario = runs()
    scenario.job = replace(scenario.job, wish=wish)
    scenario.settle()
    assert not scenario.did(COPY), "the program may still write"
    scenario.stopped = True
    scenario.settle()
    assert scenario.did(COPY)
    assert not scenario.status().ended
    copied(scenario)
    assert scenario.status() is Status.CANCELLED


def test_a_preemption_does_not_wait_and_says_from_when_the_outputs_are() -> None:
    scenario = copied(runs())
    scenario.now += 40
    scenario.look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    text = scenario.event_texts[scenario.events.index("outputs")]
    assert text == f"copied 42 s before the slice was lost: {SUMMARY}"


def test_a_bad_host_is_replaced_after_a_copy_from_the_others() -> None:
    scenario = runs()
    scenario.host(0, HostPhase.MISSING, detail="restarted").everybody_is_heard()
    scenario.look("ACTIVE", "READY").passes(TIMEOUTS.settle)
    for _ in range(3):
        if scenario.did(COPY):
            break
        scenario.passes(TIMEOUTS.bad_silence).look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.did(COPY)
    assert scenario.outcomes == []
    copied(scenario)
    assert scenario.outcomes == [EndReason.BAD_HOST]


def test_outputs_are_copied_at_intervals_while_the_program_runs() -> None:
    scenario = runs()
    assert not scenario.did(COPY)
    scenario.now += TIMEOUTS.outputs_interval
    scenario.everybody_is_heard()
    assert scenario.did(COPY)
    copied(scenario)
    scenario.effects.clear()
    scenario.now += TIMEOUTS.outputs_interval - 1
    scenario.everybody_is_heard()
    assert not scenario.did(COPY)
    scenario.now += 1
    scenario.everybody_is_heard()
    assert scenario.did(COPY)


def test_a_long_copy_is_followed_by_a_longer_pause() -> None:
    scenario = copied(runs(), seconds=100)
    scenario.effects.clear()
    scenario.now += 399
    scenario.everybody_is_heard()
    assert not scenario.did(COPY)
    scenario.now += 1
    scenario.everybody_is_heard()
    assert scenario.did(COPY)


def test_outputs_are_copied_often_while_a_host_is_about_to_shut_down() -> None:
    scenario = copied(runs())
    scenario.effects.clear()
    scenario.host(1, HostPhase.RUNNING, shutdown_reason="preempted").passes(2)
    assert scenario.did(COPY)


def test_nothing_is_copied_before_the_hosts_have_the_code() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, outputs=True)
    scenario.slice_is_there().all_hosts(HostPhase.PREPARING, detail="code")
    scenario.passes(TIMEOUTS.outputs_interval + 1)
    assert not scenario.did(COPY)


def test_a_host_that_comes_back_ends_the_wait() -> None:
    """A wait for the copy at the end of an attempt does not shorten a later one."""
    scenario = runs()
    attempt = scenario.job.attempt
    assert attempt is not None
    scenario.job = replace(scenario.job, attempt=replace(attempt, outputs_since=scenario.now))
    scenario.everybody_is_heard()
    assert scenario.job.attempt is not None
    assert scenario.job.attempt.outputs_since is None
