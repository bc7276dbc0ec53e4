"""Programs that end because their host shuts down have not failed."""

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    EffectType,
)
from drumline.observed import HostPhase
from tests.jobs.fakes import ServerHarness, run_scenario
from tests.jobs.scenario import TIMEOUTS, Scenario


@pytest.mark.parametrize("code", [-15, 143])
def test_a_program_ended_by_a_sigterm_of_the_host_is_a_preemption(code: int) -> None:
    scenario = Scenario(job=replace(Scenario().job, allowance=Allowance(failures=0))).runs()
    scenario.program_fails(code=code, error="Terminated")
    scenario.look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert scenario.job.failures == 0


@pytest.mark.parametrize("code", [-15, 143])
def test_a_sigterm_that_we_did_not_send_counts_as_no_failure_on_a_slice_that_stays(
    code: int,
) -> None:
    scenario = Scenario().runs().program_fails(code=code, error="Terminated")
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.outcomes == [], "the host may be going down"
    scenario.passes(TIMEOUTS.shutdown + 1).verdict()
    assert scenario.outcomes == [EndReason.SIGTERM]
    assert (scenario.job.failures, scenario.job.preemptions) == (0, 0)
    assert "SIGTERM" in scenario.event_texts[-1]


def test_no_program_starts_on_a_host_that_shuts_down() -> None:
    scenario = Scenario().runs()
    for index in (0, 1):
        scenario.host(index, HostPhase.EXITED, exit_code=143, error="", shutdown_reason="preempted")
    scenario.settle().passes(1)
    assert scenario.outcomes == [EndReason.PREEMPTED], "though the cloud still says READY"
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert any("host 0 is going down: preempted" in text for text in scenario.event_texts)


def test_one_host_that_goes_down_takes_its_siblings_errors_with_it() -> None:
    scenario = Scenario().runs()
    scenario.host(0, HostPhase.EXITED, exit_code=134, error="closed by peer", error_at=scenario.now)
    scenario.host(1, HostPhase.EXITED, exit_code=-15, error="", shutdown_reason="preempted")
    scenario.settle().passes(1)
    assert scenario.outcomes == [EndReason.PREEMPTED]


def test_a_program_that_saves_its_work_on_a_host_that_goes_is_let_finish() -> None:
    scenario = Scenario().runs()
    for index in (0, 1):
        scenario.host(index, HostPhase.RUNNING, shutdown_reason="preempted")
    scenario.settle()
    assert scenario.outcomes == []
    assert scenario.job.reason == "host 0 is going down: preempted"


def test_a_job_without_allowance_survives_a_notice(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(retry={"failures": 0})
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.goes_down("preempted")
        session.ends(-15)
        await harness.until(lambda: len(harness.starts(job)) == 2, within=120)
        shown = harness.show(job)
        assert (shown["failures"], shown["preemptions"]) == (0, 1)
        assert harness.cloud.count("ask") == 2

    run_scenario(tmp_path, scenario)


def test_a_failure_that_passed_before_the_start_does_not_shorten_the_wait_for_a_reboot() -> None:
    """A host fails its first set-up, and much later another host reboots."""
    scenario = Scenario().slice_is_there()
    scenario.host(0, HostPhase.FAILED, error="no space").host(1, HostPhase.READY).settle()
    scenario.passes(1).all_hosts(HostPhase.RUNNING).passes(60)
    scenario.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset by peer")
    scenario.passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY")
    assert scenario.job.cause is None, "the other host has not reported since then"
    scenario.host(1, HostPhase.MISSING).look("ACTIVE", "READY").passes(TIMEOUTS.settle + 1)
    scenario.look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]
