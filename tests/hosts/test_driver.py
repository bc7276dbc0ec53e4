"""One host: answers that overtake each other on their way."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts import driver as driver_module
from drumline.hosts.agent.wire import AttemptStatus, FreePort, PrepareResult, WatchLine
from drumline.hosts.connection import ConnectionLost, KnownHosts
from drumline.hosts.driver import HostRunner, RunnerResources
from drumline.hosts.session import HostPhase, StartBarrier, Timing
from drumline.hosts.values import Address, HostAssignment
from tests.jobs.fakes import VirtualTimeLoop

from .stand_in import program, until


class SlowToAnswer:
    """A host whose program has ended, and is told of as ended, before `start` is answered."""

    def __init__(self) -> None:
        self.starting = asyncio.Event()
        self.event_texts = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, _: type[Any], verb: str, *__: str, **___: Any) -> Any:
        if verb == "start":
            self.starting.set()
            await self.event_texts.wait()
            return AttemptStatus(state="running", started_at=1.0)
        known = {"status": AttemptStatus(state="none"), "prepare": PrepareResult(have_code=True)}
        return known.get(verb) or FreePort(port=1234)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await self.starting.wait()
        yield WatchLine(status=ENDED)
        self.event_texts.set()
        await asyncio.Event().wait()


class EndedUnseen:
    """A host whose program ended while nobody was connected; its last lines are still to come."""

    def __init__(self) -> None:
        self.send_log = asyncio.Event()

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return ENDED

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await self.send_log.wait()
        yield WatchLine(log=base64.b64encode(b"last words\n").decode())
        yield WatchLine(status=ENDED)
        await asyncio.Event().wait()


class Floods:
    """A host whose program runs, and writes so much that no status gets through behind it."""

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


class Rebooted:
    """A host that has forgotten the program which it ran, and says nothing more by itself."""

    async def install(self) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> AttemptStatus:
        return AttemptStatus(state="lost", started_at=1.0)

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        await asyncio.Event().wait()
        yield WatchLine()


ENDED = AttemptStatus(state="exited", exit_code=3, started_at=1.0)


class NeverAnswers:
    """A connection to a host that lets us in and answers nothing."""

    def __init__(self) -> None:
        self.opened = 0

    async def open(self, *_: object) -> "NeverAnswers":
        self.opened += 1
        return self

    async def run(self, *_: object, **__: object) -> object:
        raise ConnectionLost("connection lost")

    def abort(self) -> None:
        pass


def driver_of(folder: Path) -> HostRunner:
    resources = RunnerResources(
        key=folder / "key",
        known_hosts=KnownHosts(folder / "known"),
        log=folder / "host-0.log",
        clock=lambda: 1.0,
        timing=Timing(),
        on_change=lambda: None,
    )
    assignment = HostAssignment(0, Address("127.0.0.1", 22, "127.0.0.1"), 0, 1)
    return HostRunner(program(), assignment, StartBarrier(1, folder / "started"), resources)


@asynccontextmanager
async def driven(folder: Path, host: object) -> AsyncIterator[HostRunner]:
    driver = driver_of(folder)
    driving = asyncio.create_task(driver._use_connection(host))  # type: ignore[arg-type]
    yield driver
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)


def test_an_end_is_not_undone_by_an_answer_that_comes_late(tmp_path: Path) -> None:
    """A program that is over in no time; its host would read RUNNING for ever."""

    async def scenario() -> None:
        host = SlowToAnswer()
        async with driven(tmp_path, host) as driver:
            # It is written down once the answer to `start` has come.
            started = tmp_path / "started"
            await until(lambda: started.exists() and '"hosts": [0]' in started.read_text(), "it")
            await asyncio.sleep(0)
            assert driver.report().phase is HostPhase.EXITED
            assert driver.report().exit_code == 3

    asyncio.run(scenario())


def test_an_end_is_told_only_once_all_of_the_log_is_here(tmp_path: Path) -> None:
    """Who hears of the end lets go of the slice, and of what was not yet copied from it."""

    async def scenario() -> None:
        host = EndedUnseen()
        async with driven(tmp_path, host) as driver:
            await until(lambda: (tmp_path / "started").exists(), "the host has answered")
            await asyncio.sleep(0)
            assert driver.report().phase is not HostPhase.EXITED
            host.send_log.set()
            await until(lambda: driver.report().phase is HostPhase.EXITED, "the end")
            assert (tmp_path / "host-0.log").read_bytes() == b"last words\n"

    asyncio.run(scenario())


def test_a_host_that_floods_its_log_has_still_told_what_it_does(tmp_path: Path) -> None:
    """Else no verdict would be passed on it: one waits for what every host says of its program."""

    async def scenario() -> None:
        host = Floods()
        async with driven(tmp_path, host) as driver:
            await host.read.wait()
            assert driver.report().phase is HostPhase.RUNNING
            assert driver.report().reported_at == 1.0

    asyncio.run(scenario())


def test_a_program_that_is_lost_is_told_of_as_soon_as_its_host_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with driven(tmp_path, Rebooted()) as driver:
            await until(lambda: driver.report().phase is HostPhase.MISSING, "it is told of")
            assert driver.report().reported_at == 1.0

    asyncio.run(scenario())


def test_a_host_that_lets_us_in_and_answers_nothing_is_tried_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = NeverAnswers()
    monkeypatch.setattr(driver_module, "Connection", connection)

    async def scenario() -> None:
        driver = driver_of(tmp_path)
        driving = asyncio.create_task(driver.run_forever())
        await asyncio.sleep(600)
        driving.cancel()
        assert driver.report().heard_at is None, "to be let in is not to be answered"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    assert 20 < connection.opened < 200, "every ten seconds by then"
