"""The loop itself: it ends when it is told to, whatever happens at that moment."""

import asyncio
from pathlib import Path
from typing import Any

from tests.jobs.pretend import Office, play


def test_the_loop_ends_even_if_there_is_news_at_that_very_moment(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        await asyncio.sleep(1)
        office.supervisor.wake()
        office.running.cancel()
        await asyncio.wait({office.running}, timeout=60)
        assert office.running.done()

    play(tmp_path, story)


def test_closing_ends_even_if_a_host_has_news_at_that_very_moment(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        await asyncio.sleep(0.5)
        office.starts(job)[0].changed.set()
        closing = asyncio.create_task(office.supervisor.close())
        await asyncio.wait({closing}, timeout=60)
        assert closing.done()

    play(tmp_path, story)


def test_heartbeats_are_heard_without_a_round_for_each(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create(progress=None)
        await office.reaches(job, "RUNNING")
        (session,) = office.starts(job)
        session.tells(step=0)
        await asyncio.sleep(60)
        rounds = office.rounds()
        for step in range(1, 601):
            session.tells(step=step, loss=1 / step)
            await asyncio.sleep(0.1)
            assert office.show(job)["progress"]["step"] == step
        assert rounds() <= 60 / office.supervisor.config.poll_seconds + 12

    play(tmp_path, story)


def test_a_program_that_only_ever_leaves_is_not_started_in_a_hot_loop(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create(retry={"failures": 0})
        deadline = office.clock() + 3600
        seen = 0
        while office.clock() < deadline:
            starts = office.starts(job)
            if len(starts) > seen:
                seen = len(starts)
                starts[-1].ends(75)
            await asyncio.sleep(1)
        assert 20 < seen < 60
        shown = office.show(job)
        assert (shown["failures"], shown["preemptions"], shown["ended"]) == (0, 0, None)
        assert office.cloud.count("ask") == 1, "all on one slice"

    play(tmp_path, story)


def test_a_program_that_hangs_is_ended_after_the_time_the_job_file_sets(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create(stuck_after="10m")
        await office.reaches(job, "RUNNING")
        (first,) = office.starts(job)
        for step in (1, 2, 3):
            first.tells(step=step)
            await asyncio.sleep(30)
        hung = office.clock()
        await office.until(lambda: len(office.starts(job)) == 2, within=900)
        assert 540 < office.clock() - hung < 660
        (attempt, _) = office.show(job)["attempts"]
        assert (attempt["outcome"], attempt["course"]["step"]) == ("stuck", 3)
        second = office.starts(job)[1]
        second.tells(step=4)
        second.ends(0)
        await office.reaches(job, "SUCCEEDED")

    play(tmp_path, story)


def test_why_jobs_wait_is_told_anew_without_a_write_for_each(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.given = ("WAITING_FOR_RESOURCES", None)
        jobs = [await office.create() for _ in range(20)]
        await asyncio.sleep(120)
        before = [office.show(job)["reason"] for job in jobs]
        writes = 0
        save = office.supervisor.store.save

        def counted(*given: Any) -> None:
            nonlocal writes
            writes += 1
            save(*given)

        office.supervisor.store.save = counted  # type: ignore[method-assign,assignment]
        await asyncio.sleep(600)
        after = [office.show(job)["reason"] for job in jobs]
        assert sum(one != other for one, other in zip(before, after, strict=True)) >= 8
        assert any("no capacity in us-central2-b for 11 min" in reason for reason in after), after
        assert writes == 0

    play(tmp_path, story)
