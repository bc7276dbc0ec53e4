"""Clock jumps and machine sleep: order and durations come from a steady clock."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.clock import SteadyClock
from drumline.jobs.core import lifecycle
from tests.jobs.fakes import HOUR, ServerHarness, run_scenario
from tests.jobs.scenario import Scenario


@pytest.mark.parametrize("step", [-HOUR, HOUR, -24 * HOUR])
def test_a_wall_clock_that_steps_makes_no_request_and_loses_no_slice(
    tmp_path: Path, step: float
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        running = await harness.create()
        await harness.reaches(running, "RUNNING")
        harness.stepped += step
        await asyncio.sleep(HOUR)
        assert harness.cloud.count("ask") == 1
        later = await harness.create()
        await harness.reaches(later, "RUNNING")
        harness.stepped -= step / 2
        for job in (running, later):
            (session,) = harness.starts(job)
            session.ends(0)
            await harness.reaches(job, "SUCCEEDED")
        await harness.until(lambda: not harness.cloud.requested)
        assert harness.cloud.count("ask") == 2
        assert [job["preemptions"] for job in map(harness.show, (running, later))] == [0, 0]

    run_scenario(tmp_path, scenario)


def test_metrics_are_kept_though_those_on_record_lie_in_the_future(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        for step in range(3):
            harness.starts(job)[-1].send_heartbeat(step=step, loss=1.0)
            await asyncio.sleep(60)
        harness.stepped -= 24 * HOUR
        await harness.restart()
        await harness.until(lambda: len(harness.starts(job)) == 2)
        for step in range(3, 6):
            harness.starts(job)[-1].send_heartbeat(step=step, loss=1.0)
            await asyncio.sleep(60)
        points = harness.supervisor.store.metrics.points(job)
        assert [point.step for point in points] == [0, 1, 2, 3, 4, 5]

    run_scenario(tmp_path, scenario)


def test_a_program_that_hangs_is_found_by_a_server_whose_clock_is_behind(tmp_path: Path) -> None:
    """The recorded steps lie in the future, and would count as recent until the clock has caught
    up.
    """

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(stuck_after="10m")
        await harness.reaches(job, "RUNNING")
        for step in range(3):
            harness.starts(job)[-1].send_heartbeat(step=step)
            await asyncio.sleep(60)
        harness.stepped -= 24 * HOUR
        await harness.restart()
        await harness.until(lambda: len(harness.starts(job)) == 2)
        harness.starts(job)[-1].send_heartbeat(step=2)
        await harness.until(lambda: bool(harness.show(job)["failures"]), within=HOUR)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_slice_is_crossed_off_only_when_it_is_gone_in_spite_of_clock_jumps(
    tmp_path: Path, step: float
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.ignores_deletes = True
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED", within=120)
        harness.stepped += step
        await asyncio.sleep(600)
        assert harness.cloud.held, "the cloud did not listen"
        (row,) = harness.supervisor.store.releasing()
        assert row.gone is None
        harness.cloud.ignores_deletes = False
        await harness.until(lambda: not harness.cloud.held, within=600)
        await harness.until(lambda: not harness.supervisor.store.releasing())

    run_scenario(tmp_path, scenario)


def test_after_a_sleep_of_the_machine_no_host_is_blamed(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.connection(there=False)
        harness.machine_sleeps(HOUR)
        await asyncio.sleep(60)
        assert harness.status(job) == "RUNNING", "a reconnect takes a while"
        session.connection(there=True)
        await asyncio.sleep(HOUR)
        shown = harness.show(job)
        assert (shown["status"], shown["bad_hosts"], shown["preemptions"]) == ("RUNNING", 0, 0)
        assert len(harness.starts(job)) == 1

    run_scenario(tmp_path, scenario)


def test_a_host_that_stays_silent_after_the_sleep_is_found_all_the_same(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.connection(there=False)
        harness.machine_sleeps(HOUR)
        await harness.until(lambda: harness.show(job)["bad_hosts"] == 1, within=600)

    run_scenario(tmp_path, scenario)


def test_times_of_an_earlier_server_that_lie_in_the_future_are_drawn_back() -> None:
    scenario = Scenario().runs().program_fails().verdict()
    ahead = replace(scenario.job, not_before=scenario.now + 24 * HOUR)
    mended = lifecycle.adapt_times(ahead, scenario.now)
    assert mended.not_before <= scenario.now + 120
    scenario.job = mended
    scenario.passes(121)
    assert scenario.job.attempts == 2
    kept = replace(mended, kept_until=scenario.now + 24 * HOUR)
    assert lifecycle.adapt_times(kept, scenario.now).kept_until == scenario.now + kept.keep
    early = lifecycle.adapt_times(Scenario().runs().job, 0.5)
    assert early.active is not None
    assert early.attempt is not None
    assert (early.active.asked_at, early.attempt.started_at) == (0.5, 0.5)


def test_the_steady_clock_begins_with_the_wall_and_never_steps() -> None:
    wall, passed = 1_000_000.0, 50.0
    clock = SteadyClock(lambda: wall, lambda: passed)
    assert clock() == wall
    passed += 7
    wall -= HOUR
    assert clock() == 1_000_007.0


def test_a_pause_of_the_loop_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        with caplog.at_level(logging.INFO):
            harness.machine_sleeps(HOUR)
            await asyncio.sleep(600)
        warnings = [r for r in caplog.records if "this server did not run" in r.getMessage()]
        assert len(warnings) == 1

    run_scenario(tmp_path, scenario)
