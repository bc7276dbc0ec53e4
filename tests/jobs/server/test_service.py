"""A call that waits for events ends when the server stops."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.fakes import ServerHarness, run_scenario

WAITS: dict[str, Callable[[ServerHarness, str], Awaitable[Any]]] = {
    "events": lambda harness, job: harness.service.events(job, after=10**9, wait=3600),
    "clean": lambda harness, job: harness.service.verb(job, "clean", {}),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_wait_for_events_stops(tmp_path: Path, wait: str) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.running.cancel()  # from here on, only the test runs rounds
        await asyncio.wait({harness.running})
        waiting = asyncio.ensure_future(WAITS[wait](harness, job))
        await asyncio.sleep(0.1)
        async with harness.supervisor.changed:
            harness.supervisor.changed.notify_all()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled()

    run_scenario(tmp_path, scenario)
