"""Run a test's coroutine on a session with stand-in hosts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drumline.hosts.session import HostPhase, HostReport, SliceSession

from .stand_in import Slice, program, until

Story = Callable[[Slice], Coroutine[Any, Any, None]]


def on_hosts(folder: Path, hosts: int, story: Story) -> None:
    """Run a scenario on a slice of stand-in hosts."""

    async def play() -> None:
        async with asyncio.timeout(180), Slice(folder, hosts) as stand_ins:
            await story(stand_ins)

    asyncio.run(play())


def phases(session: SliceSession) -> set[HostPhase]:
    return {report.phase for report in session.reports()}


async def reach(session: SliceSession, phase: HostPhase) -> tuple[HostReport, ...]:
    await until(lambda: phases(session) == {phase}, f"all hosts {phase}: {session.reports()}")
    return session.reports()


@asynccontextmanager
async def running(stand_ins: Slice, run: str, **parts: Any) -> AsyncIterator[SliceSession]:
    session = stand_ins.session(program(run=run, **parts))
    session.start()
    await reach(session, HostPhase.RUNNING)
    yield session


def work(host_home: Path, job: str = "000012") -> Path:
    return next((host_home / ".drumline" / "work" / job).iterdir())
