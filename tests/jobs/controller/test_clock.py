"""Clocks that step, machines that sleep: order and duration come from a clock that does neither."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.clock import SteadyClock
from drumline.jobs.core import lifecycle
from tests.jobs.pretend import HOUR, Office, play
from tests.jobs.story import Story


@pytest.mark.parametrize("step", [-HOUR, HOUR, -24 * HOUR])
def test_a_wall_clock_that_steps_makes_no_request_and_loses_no_slice(
    tmp_path: Path, step: float
) -> None:
    async def story(office: Office) -> None:
        running = await office.create()
        await office.reaches(running, "RUNNING")
        office.stepped += step
        await asyncio.sleep(HOUR)
        assert office.cloud.count("ask") == 1
        later = await office.create()
        await office.reaches(later, "RUNNING")
        office.stepped -= step / 2
        for job in (running, later):
            (session,) = office.starts(job)
            session.ends(0)
            await office.reaches(job, "SUCCEEDED")
        await office.until(lambda: not office.cloud.requested)
        assert office.cloud.count("ask") == 2
        assert [job["preemptions"] for job in map(office.show, (running, later))] == [0, 0]

    play(tmp_path, story)


def test_metrics_are_kept_though_those_on_record_lie_in_the_future(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        for step in range(3):
            office.starts(job)[-1].tells(step=step, loss=1.0)
            await asyncio.sleep(60)
        office.stepped -= 24 * HOUR
        await office.restart()
        await office.until(lambda: len(office.starts(job)) == 2)
        for step in range(3, 6):
            office.starts(job)[-1].tells(step=step, loss=1.0)
            await asyncio.sleep(60)
        points = office.supervisor.store.metrics.points(job)
        assert [point.step for point in points] == [0, 1, 2, 3, 4, 5]

    play(tmp_path, story)


def test_a_program_that_hangs_is_found_by_a_server_whose_clock_is_behind(tmp_path: Path) -> None:
    """The steps on record lie in its future, and would count as recent until it has caught up."""

    async def story(office: Office) -> None:
        job = await office.create(stuck_after="10m")
        await office.reaches(job, "RUNNING")
        for step in range(3):
            office.starts(job)[-1].tells(step=step)
            await asyncio.sleep(60)
        office.stepped -= 24 * HOUR
        await office.restart()
        await office.until(lambda: len(office.starts(job)) == 2)
        office.starts(job)[-1].tells(step=2)
        await office.until(lambda: bool(office.show(job)["failures"]), within=HOUR)

    play(tmp_path, story)


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_slice_is_crossed_off_only_when_it_is_gone_whatever_the_clock_says(
    tmp_path: Path, step: float
) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.cloud.deaf = True
        await office.desk.verb(job, "delete", {})
        await office.reaches(job, "CANCELLED", within=120)
        office.stepped += step
        await asyncio.sleep(600)
        assert office.cloud.held, "the cloud did not listen"
        (row,) = office.supervisor.store.releasing()
        assert row.gone is None
        office.cloud.deaf = False
        await office.until(lambda: not office.cloud.held, within=600)
        await office.until(lambda: not office.supervisor.store.releasing())

    play(tmp_path, story)


def test_a_machine_that_slept_blames_no_host(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        (session,) = office.starts(job)
        session.connection(there=False)
        office.machine_sleeps(HOUR)
        await asyncio.sleep(60)
        assert office.status(job) == "RUNNING", "a reconnect takes a while"
        session.connection(there=True)
        await asyncio.sleep(HOUR)
        shown = office.show(job)
        assert (shown["status"], shown["bad_hosts"], shown["preemptions"]) == ("RUNNING", 0, 0)
        assert len(office.starts(job)) == 1

    play(tmp_path, story)


def test_a_host_that_stays_silent_after_the_sleep_is_found_all_the_same(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        (session,) = office.starts(job)
        session.connection(there=False)
        office.machine_sleeps(HOUR)
        await office.until(lambda: office.show(job)["bad_hosts"] == 1, within=600)

    play(tmp_path, story)


def test_times_of_an_earlier_server_that_lie_in_the_future_are_drawn_back() -> None:
    story = Story().runs().program_fails().verdict()
    ahead = replace(story.job, not_before=story.now + 24 * HOUR)
    mended = lifecycle.clamp_times(ahead, story.now)
    assert mended.not_before <= story.now + 120
    story.job = mended
    story.passes(121)
    assert story.job.attempts == 2
    kept = replace(mended, kept_until=story.now + 24 * HOUR)
    assert lifecycle.clamp_times(kept, story.now).kept_until == story.now + kept.keep
    early = lifecycle.clamp_times(Story().runs().job, 0.5)
    assert early.placement is not None
    assert early.attempt is not None
    assert (early.placement.asked_at, early.attempt.started_at) == (0.5, 0.5)


def test_the_steady_clock_begins_with_the_wall_and_never_steps() -> None:
    wall, passed = 1_000_000.0, 50.0
    clock = SteadyClock(lambda: wall, lambda: passed)
    assert clock() == wall
    passed += 7
    wall -= HOUR
    assert clock() == 1_000_007.0


def test_a_pause_of_the_loop_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        with caplog.at_level(logging.INFO):
            office.machine_sleeps(HOUR)
            await asyncio.sleep(600)
        told = [r for r in caplog.records if "nothing was heard" in r.getMessage()]
        assert len(told) == 1

    play(tmp_path, story)
