"""The supervisor's loop ends when requested, in every state."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

from drumline.cloud.protocol import CloudError
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.slices import Releases
from drumline.jobs.core import lifecycle
from drumline.jobs.core.state import Decision, Job
from drumline.jobs.store.records import SliceRow
from tests.jobs.fakes import UNAVAILABLE, FakeCloud, ServerHarness, run_scenario


def test_the_loop_ends_even_if_there_is_news_at_that_very_moment(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        await asyncio.sleep(1)
        harness.supervisor.wake()
        harness.running.cancel()
        await asyncio.wait({harness.running}, timeout=60)
        assert harness.running.done()

    run_scenario(tmp_path, scenario)


def test_closing_ends_even_if_a_host_has_news_at_that_very_moment(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        await asyncio.sleep(0.5)
        harness.starts(job)[0].changed.set()
        closing = asyncio.create_task(harness.supervisor.close())
        await asyncio.wait({closing}, timeout=60)
        assert closing.done()

    run_scenario(tmp_path, scenario)


def test_heartbeats_are_heard_without_a_round_for_each(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(progress=None)
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.send_heartbeat(step=0)
        await asyncio.sleep(60)
        rounds = harness.rounds()
        for step in range(1, 601):
            session.send_heartbeat(step=step, loss=1 / step)
            await asyncio.sleep(0.1)
            assert harness.show(job)["progress"]["step"] == step
        assert rounds() <= 60 / harness.supervisor.config.poll_seconds + 12

    run_scenario(tmp_path, scenario)


def test_a_program_that_only_ever_leaves_is_not_started_in_a_hot_loop(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(retry={"failures": 0})
        deadline = harness.clock() + 3600
        seen = 0
        while harness.clock() < deadline:
            starts = harness.starts(job)
            if len(starts) > seen:
                seen = len(starts)
                starts[-1].ends(75)
            await asyncio.sleep(1)
        assert 20 < seen < 60
        shown = harness.show(job)
        assert (shown["failures"], shown["preemptions"], shown["ended"]) == (0, 0, None)
        assert harness.cloud.count("ask") == 1, "all on one slice"

    run_scenario(tmp_path, scenario)


def test_a_program_that_hangs_is_ended_after_the_time_the_job_file_sets(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(stuck_after="10m")
        await harness.reaches(job, "RUNNING")
        (first,) = harness.starts(job)
        for step in (1, 2, 3):
            first.send_heartbeat(step=step)
            await asyncio.sleep(30)
        hung = harness.clock()
        await harness.until(lambda: len(harness.starts(job)) == 2, within=900)
        assert 540 < harness.clock() - hung < 660
        (attempt, _) = harness.show(job)["attempts"]
        assert (attempt["outcome"], attempt["course"]["step"]) == ("stuck", 3)
        second = harness.starts(job)[1]
        second.send_heartbeat(step=4)
        second.ends(0)
        await harness.reaches(job, "SUCCEEDED")

    run_scenario(tmp_path, scenario)


def test_a_new_waiting_reason_is_not_saved_for_each_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        jobs = [await harness.create() for _ in range(20)]
        await asyncio.sleep(120)
        before = [harness.show(job)["reason"] for job in jobs]
        writes = 0
        save = harness.supervisor.store.save

        def counted(*arguments: Any) -> None:
            nonlocal writes
            writes += 1
            save(*arguments)

        harness.supervisor.store.save = counted  # type: ignore[method-assign,assignment]
        await asyncio.sleep(600)
        after = [harness.show(job)["reason"] for job in jobs]
        assert sum(one != other for one, other in zip(before, after, strict=True)) >= 8
        assert any("no capacity in us-central2-b for 11 min" in reason for reason in after), after
        # Each of the 8 requests is replaced twice: the new request is saved, and its acceptance.
        assert writes <= 8 * 2 * 2

    run_scenario(tmp_path, scenario)


def test_a_bug_is_not_retried_for_ever_and_costs_no_other_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        broken = await harness.create()
        other = await harness.create()
        await harness.reaches(broken, "RUNNING")
        await harness.reaches(other, "RUNNING")
        decide, tries = lifecycle.decide, 0

        def buggy(job: Job, *rest: Any) -> Decision:
            nonlocal tries
            if job.id == broken:
                tries += 1
                raise KeyError("dl-1")
            return decide(job, *rest)

        with patch.object(lifecycle, "decide", buggy):
            await harness.reaches(broken, "FAILED", within=300)
            await asyncio.sleep(600)
        assert tries < 12
        shown = harness.show(broken)
        assert "internal error in drumline (test_supervisor.py:" in shown["reason"]
        assert "server.log" in shown["reason"]
        assert f"drumline resume {broken}" in shown["reason"]
        assert harness.status(other) == "RUNNING"
        assert len(harness.cloud.held) == 1, "its slice is released"
        await harness.service.verb(broken, "resume", {})
        await harness.reaches(broken, "RUNNING")

    run_scenario(tmp_path, scenario)


def test_an_outage_is_not_taken_for_a_bug(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        decide = lifecycle.decide

        def unlucky(*_: object) -> Decision:
            raise CloudError("no answer")

        with patch.object(lifecycle, "decide", unlucky):
            await asyncio.sleep(3600)
        assert lifecycle.decide is decide
        await harness.reaches(job, "RUNNING", within=120)

    run_scenario(tmp_path, scenario)


def test_a_requested_poll_that_is_overdue_begins_in_the_next_round() -> None:
    now = 0.0
    polls = ZonePolls(FakeCloud(lambda: now), interval=100.0, clock=lambda: now)
    assert polls.take_due({"us-central2-b"}) == ["us-central2-b"]
    now = 50.0
    polls.poll_soon("us-central2-b")
    assert polls.next_due() == 0.0
    polls.take_due({"us-central2-b"})
    assert polls.next_due() == 100.0


def test_a_release_that_fails_after_its_slice_was_seen_gone_is_forgotten(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        releases = harness.supervisor.releases
        row = SliceRow("dl-x-000001-1", "000001", "us-central2-b", "v4-8", 1.0, 1.0, 2.0, None)
        harness.cloud.no_release = UNAVAILABLE
        await releases.release(row)
        assert releases.errors == {}

    run_scenario(tmp_path, scenario)


def test_a_failing_delete_is_repeated_within_ten_minutes_however_rare_polls_are(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        releases, clock = harness.supervisor.releases, harness.clock
        harness.supervisor.polls.interval = 1200.0
        row = SliceRow("dl-x-000001-1", "000001", "us-central2-b", "v4-8", 1.0, 1.0, 2.0, None)
        harness.cloud.no_release = UNAVAILABLE
        for _ in range(5):
            releases.rows = [row]
            (due,) = releases.due(clock(), ())
            await releases.release(due)
            await asyncio.sleep(1200 + 600)

    run_scenario(tmp_path, scenario)


def test_a_slice_that_was_released_before_a_failed_round_is_deleted(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        releases = harness.supervisor.releases
        row = SliceRow("dl-x-000001-1", "000001", "us-central2-b", "v4-8", 1.0, 1.0, 2.0, None)
        releases.rows = [row]
        polls: ZonePolls = harness.supervisor.polls
        await polls.poll("us-central2-b")
        assert isinstance(releases, Releases)
        assert list(releases.due(harness.clock(), ())) == [row]

    run_scenario(tmp_path, scenario)
