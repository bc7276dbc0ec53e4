"""An idle server exits by itself."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from drumline.cloud.emulator import launch
from drumline.cloud.idle_exit import IdleExit


class Inn:
    """A server with its own clock."""

    def __init__(self, patience: float | None = 60.0) -> None:
        self.now = 0.0
        self.busy = False
        self.served = 0
        app = Starlette(routes=[Route("/", self._serve), Route("/status", self._serve)])
        self.visits = IdleExit(
            app, lambda: self.busy, patience, ignored_paths={"/status"}, clock=lambda: self.now
        )

    async def _serve(self, _: Request) -> PlainTextResponse:
        self.served += 1
        self.during()
        return PlainTextResponse("welcome")

    def during(self) -> None:
        """The handler of a running request."""

    def call(self, path: str = "/") -> int:
        """Call this path and return the status of the response."""
        codes: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(message: Message) -> None:
            codes.append(message.get("status", 0))

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        asyncio.run(self.visits(scope, receive, send))
        return codes[0]


def test_it_exits_some_time_after_the_last_call() -> None:
    inn = Inn()
    inn.now = 50.0
    assert inn.visits.seconds_left() == 10.0
    inn.call()
    assert inn.visits.seconds_left() == 60.0
    inn.now = 80.0
    inn.call("/status")
    assert inn.visits.seconds_left() == 30.0


def test_it_stays_while_it_is_busy_and_some_time_longer() -> None:
    inn = Inn()
    inn.busy, inn.now = True, 1000.0
    assert inn.visits.seconds_left() is None
    inn.busy, inn.now = False, 1001.0
    assert inn.visits.seconds_left() == 59.0


def test_it_stays_during_an_open_call() -> None:
    inn = Inn()
    seen: list[float | None] = []

    def serving() -> None:
        inn.now = 500.0
        seen.append(inn.visits.seconds_left())

    inn.during = serving  # type: ignore[method-assign]
    inn.call()
    assert seen == [None]
    assert inn.visits.seconds_left() == 60.0


def test_without_a_timeout_it_never_exits() -> None:
    inn = Inn(patience=None)
    inn.now = 1e9
    assert inn.visits.seconds_left() is None


def test_a_call_during_the_exit_is_rejected_without_effect() -> None:
    inn = Inn()
    inn.now = 60.0
    asyncio.run(asyncio.wait_for(inn.visits.wait_until_idle(), 5))
    assert inn.call() == 503
    assert inn.served == 0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_an_idle_emulator_exits_unless_faults_are_set(
    tmp_path: Path,
) -> None:
    def started(home: Path) -> "subprocess.Popen[bytes]":
        words = ["-m", "drumline.cloud.emulator", "--home", str(home), "--idle", "1"]
        process = subprocess.Popen([sys.executable, *words])
        until(lambda: launch.endpoint(home), "the emulator answers")
        return process

    idle = started(tmp_path / "idle")
    commanded = started(tmp_path / "told")
    try:
        launch.control(tmp_path / "told", "faults", fail=0.5)
        assert idle.wait(20) == 0
        assert launch.find(tmp_path / "idle") is None
        assert launch.endpoint(tmp_path / "told")
        launch.control(tmp_path / "told", "faults", clear=True)
        assert commanded.wait(20) == 0
    finally:
        for one in (idle, commanded):
            one.kill()
            one.wait()
