"""HostRunner with answers of the agent that arrive out of order."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts import driver as driver_module
from drumline.hosts.agent.wire import (
    AttemptStatus,
    FreePort,
    PrepareResult,
    StepResult,
    WatchLine,
)
from drumline.hosts.connection import ConnectionLost, KnownHosts
from drumline.hosts.driver import HostRunner, RunnerResources
from drumline.hosts.session import HostPhase, StartBarrier, Timing
from drumline.hosts.values import Address, HostAssignment, Step
from tests.jobs.fakes import VirtualTimeLoop

from .stand_in import program, until


class ExitBeforeAnswer:
    """A host that reports the exit of its program before it answers `start`."""

    def __init__(self) -> None:
        self.starting = asyncio.Event()
        self.exit_sent = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, _: type[Any], verb: str, *__: str, **___: Any) -> Any:
        if verb == "start":
            self.starting.set()
            await self.exit_sent.wait()
            return AttemptStatus(state="running", started_at=1.0)
        answers = {"status": AttemptStatus(state="none"), "prepare": PrepareResult(have_code=True)}
        return answers.get(verb) or FreePort(port=1234)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await self.starting.wait()
        yield WatchLine(status=EXITED)
        self.exit_sent.set()
        await asyncio.Event().wait()


class ExitWhileDisconnected:
    """A host whose program has exited before the connection, and whose log is not yet sent."""

    def __init__(self) -> None:
        self.send_log = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return EXITED

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await self.send_log.wait()
        yield WatchLine(log=base64.b64encode(b"last words\n").decode())
        yield WatchLine(status=EXITED)
        await asyncio.Event().wait()


class LogFlood:
    """A host whose program writes so much that no status is sent."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return AttemptStatus(state="running", started_at=1.0)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        for piece in range(3):
            yield WatchLine(log=base64.b64encode(b"y\n").decode(), offset=2 * piece)
        self.read.set()
        await asyncio.Event().wait()


class RebootedHost:
    """A host that was rebooted and sends only its status."""

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return AttemptStatus(state="lost", started_at=1.0)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await asyncio.Event().wait()
        yield WatchLine()


class StoppedWatch:
    """A host that answers each command, and whose `watch` sends nothing any more."""

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return AttemptStatus(state="running", started_at=1.0)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        yield WatchLine(beat=1.0)
        await asyncio.Event().wait()


class RepeatedStep:
    """A host whose set-up step is repeated because of an error that passes."""

    def __init__(self) -> None:
        self.starts = asyncio.Event()
        self.passes = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, _: type[Any], verb: str, *__: str, **___: Any) -> Any:
        if verb == "step":
            self.starts.set()
            await self.passes.wait()
            return StepResult(exit_code=0)
        answers = {"status": AttemptStatus(state="none"), "prepare": PrepareResult(have_code=True)}
        return answers.get(verb) or await asyncio.Event().wait()

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await self.starts.wait()
        yield WatchLine(status=AttemptStatus(state="none", repeating="no names\n; retry 1 of 20"))
        await self.passes.wait()
        yield WatchLine(status=AttemptStatus(state="none", repeating="too late"))
        await asyncio.Event().wait()


EXITED = AttemptStatus(state="exited", exit_code=3, started_at=1.0)


class NoAnswers:
    """A connection to a host that accepts logins and answers nothing."""

    def __init__(self) -> None:
        self.opened = 0

    async def open(self, *_: object) -> "NoAnswers":
        self.opened += 1
        return self

    async def run(self, *_: object, **__: object) -> object:
        raise ConnectionLost("connection lost")

    def abort(self) -> None:
        pass


def make_runner(folder: Path, **parts: Any) -> HostRunner:
    resources = RunnerResources(
        key=folder / "key",
        known_hosts=KnownHosts(folder / "known"),
        log=folder / "host-0.log",
        clock=lambda: 1.0,
        timing=Timing(),
        on_change=lambda: None,
    )
    assignment = HostAssignment(0, Address("127.0.0.1", 22, "127.0.0.1"), 0, 1)
    return HostRunner(program(**parts), assignment, StartBarrier(1, folder / "started"), resources)


@asynccontextmanager
async def connected_runner(folder: Path, agent: object, **parts: Any) -> AsyncIterator[HostRunner]:
    runner = make_runner(folder, **parts)
    task = asyncio.create_task(runner._use_connection(agent))  # type: ignore[arg-type]
    yield runner
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_exit_is_not_undone_by_a_late_answer(tmp_path: Path) -> None:
    """Otherwise the host of a program that exits at once would stay RUNNING."""

    async def scenario() -> None:
        host = ExitBeforeAnswer()
        async with connected_runner(tmp_path, host) as runner:
            # The file is written after the answer to `start`.
            started = tmp_path / "started"
            await until(lambda: started.exists() and '"hosts": [0]' in started.read_text(), "it")
            await asyncio.sleep(0)
            assert runner.report().phase is HostPhase.EXITED
            assert runner.report().exit_code == 3

    asyncio.run(scenario())


def test_an_exit_is_reported_only_after_the_whole_log(tmp_path: Path) -> None:
    """After the exit the slice is released, with the rest of the log."""

    async def scenario() -> None:
        host = ExitWhileDisconnected()
        async with connected_runner(tmp_path, host) as runner:
            await until(lambda: (tmp_path / "started").exists(), "the host has answered")
            await asyncio.sleep(0)
            assert runner.report().phase is not HostPhase.EXITED
            host.send_log.set()
            await until(lambda: runner.report().phase is HostPhase.EXITED, "the end")
            assert (tmp_path / "host-0.log").read_bytes() == b"last words\n"

    asyncio.run(scenario())


def test_a_host_that_floods_its_log_still_has_a_status_time(tmp_path: Path) -> None:
    """Otherwise a verdict would wait for the status of this host forever."""

    async def scenario() -> None:
        host = LogFlood()
        async with connected_runner(tmp_path, host) as runner:
            await host.read.wait()
            assert runner.report().phase is HostPhase.RUNNING
            assert runner.report().reported_at == 1.0

    asyncio.run(scenario())


def test_a_lost_program_is_reported_as_soon_as_its_host_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected_runner(tmp_path, RebootedHost()) as runner:
            await until(lambda: runner.report().phase is HostPhase.MISSING, "it is reported")
            assert runner.report().reported_at == 1.0

    asyncio.run(scenario())


def test_the_reason_for_the_repetition_of_a_step_is_reported(tmp_path: Path) -> None:
    """Otherwise a job seems to hang in its set-up for minutes."""

    async def scenario() -> None:
        host = RepeatedStep()
        steps = (Step("uv", "uv sync"),)
        async with connected_runner(tmp_path, host, steps=steps) as runner:
            detail = "setup: uv: no names; retry 1 of 20"
            await until(lambda: runner.report().detail == detail, "the reason is reported")
            host.passes.set()
            await until(lambda: runner.report().phase is HostPhase.READY, "the step has passed")
            await asyncio.sleep(0)
            assert runner.report().detail == ""

    asyncio.run(scenario())


def test_a_connection_whose_watch_sends_nothing_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        runner = make_runner(tmp_path)
        with pytest.raises(ConnectionLost, match="the agent reported nothing for 180 s"):
            async with asyncio.timeout(600):
                await runner._use_connection(StoppedWatch())  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as loop:
        loop.run(scenario())


def test_reconnects_to_a_host_that_answers_nothing_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = NoAnswers()
    monkeypatch.setattr(driver_module, "Connection", connection)

    async def scenario() -> None:
        runner = make_runner(tmp_path)
        task = asyncio.create_task(runner.run_forever())
        await asyncio.sleep(600)
        task.cancel()
        assert runner.report().heard_at is None, "a login is not an answer"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as loop:
        loop.run(scenario())
    assert 20 < connection.opened < 200, "every ten seconds by then"
