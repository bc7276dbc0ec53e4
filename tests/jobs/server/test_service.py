"""Waiting for events ends when its task is cancelled, even while new events arrive."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.pretend import Office, play

WAITS: dict[str, Callable[[Office, str], Awaitable[Any]]] = {
    "events": lambda office, job: office.desk.events(job, after=10**9, wait=3600),
    "clean": lambda office, job: office.desk.verb(job, "clean", {}),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_wait_for_events_stops(tmp_path: Path, wait: str) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.running.cancel()  # no rounds but ours from here on
        await asyncio.wait({office.running})
        waiting = asyncio.ensure_future(WAITS[wait](office, job))
        await asyncio.sleep(0.1)
        async with office.supervisor.changed:
            office.supervisor.changed.notify_all()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled()

    play(tmp_path, story)
