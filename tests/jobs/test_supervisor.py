"""The loop itself: it ends when it is told to, whatever happens at that moment."""

import asyncio
from pathlib import Path

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
