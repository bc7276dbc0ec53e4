"""The server under simulation: the real one, life after life, on clocks that the world moves."""

import asyncio
import contextlib
import random
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from drumline.hosts import driver
from drumline.jobs.config import read
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.server.service import JobService
from drumline.jobs.store.records import Store
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.hosts import SimulatedConnection
from tests.simulation.loop import PARTY, NotSimulated
from tests.simulation.nature import Nature

Result = TypeVar("Result")
KEY = "ssh-ed25519 AAAA drumline"


class Died(Exception):
    """The server was killed before it answered."""


class Server:
    """One home folder, and whoever serves it now."""

    def __init__(self, nature: Nature, cloud: SimulatedCloud, home: Path, settings: str) -> None:
        """Nobody serves it yet."""
        self._nature, self._cloud, self._home = nature, cloud, home
        (home / "config.yaml").write_text(settings)
        self.lives = 0
        self.stepped = 0.0
        """Seconds by which the wall clock is off."""
        self._slept = 0.0
        """Seconds that the machine's own clock did not count."""
        self._party = ""
        self._graveyard: list[Any] = []
        self._supervisor: Supervisor | None = None
        self.service: JobService | None = None
        self._died: asyncio.Event = asyncio.Event()

    def wall(self) -> float:
        """What the server takes for the date."""
        return self._nature.now() + self.stepped

    def monotonic(self) -> float:
        """What the server takes for the time that has passed."""
        return self._nature.now() - self._slept

    @property
    def alive(self) -> bool:
        """Whether somebody serves."""
        return self.service is not None

    def start(self) -> None:
        """A new life."""
        self.lives += 1
        self._party = f"server-{self.lives}"
        self._died = asyncio.Event()
        self._nature.note("server starts", self.lives)
        context = copy_context()
        context.run(PARTY.set, self._party)
        context.run(self._begin)

    def _begin(self) -> None:
        store = Store(self._home / "jobs.db")
        self._supervisor = Supervisor(
            store, self._cloud, read(self._home), KEY, wall=self.wall, monotonic=self.monotonic
        )
        self.service = JobService(self._supervisor)
        self._nature.spawn(self._supervisor.run(), self._party)

    def kill(self) -> None:
        """As `kill -9` does: nothing that it had begun goes on, nothing is put away."""
        if self.service is None:
            return
        self._nature.note("server killed", self.lives)
        self._nature.loop.kill(self._party)
        self._graveyard += [self._nature.keep(), self._supervisor, self.service]
        self.service.store.close()
        self._supervisor = self.service = None
        self._died.set()

    async def sleep(self, seconds: float, counts: bool) -> None:
        """The machine sleeps; whether its own clock counts that differs between machines."""
        party = self._party
        self._nature.note("machine sleeps", seconds)
        self._nature.loop.put_to_sleep(party)
        await asyncio.sleep(seconds)
        if not counts:
            self._slept += seconds
        self._nature.loop.wake_up(party)

    def fill_disk(self, full: bool) -> None:
        """Whether the database can grow no more."""
        if self.service is not None:
            pages = 1 if full else 1 << 30
            with contextlib.suppress(sqlite3.Error):
                self.service.store._db.execute(f"PRAGMA max_page_count = {pages}")

    async def call(self, work: Callable[[JobService], Awaitable[Result]]) -> Result:
        """What a user's command asks of the server that runs now."""
        if self.service is None:
            raise Died
        answer: asyncio.Future[Result] = self._nature.loop.create_future()
        service = self.service

        async def serve() -> None:
            try:
                result = await work(service)
            except Exception as wrong:
                answer.set_exception(wrong)
            else:
                answer.set_result(result)

        self._nature.spawn(serve(), self._party)
        died = asyncio.ensure_future(self._died.wait())
        waits: set[asyncio.Future[Any]] = {answer, died}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if not answer.done():
            raise Died
        return answer.result()


def _forbidden(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotSimulated(what)

    return refuse


@contextlib.contextmanager
def nothing_real(nature: Nature, server: Server) -> Iterator[None]:
    """No wall clock, thread, socket or chance but the simulation's own."""
    dice = nature.streams["server"]
    SimulatedConnection.nature = nature
    with contextlib.ExitStack() as patches:
        for target, name, put in (
            (time, "time", server.wall),
            (time, "monotonic", server.monotonic),
            (time, "sleep", _forbidden("the server slept")),
            (driver, "Connection", SimulatedConnection),
            (driver, "random", dice),
            (secrets, "token_hex", lambda n: f"{dice.getrandbits(8 * n):0{2 * n}x}"),
            (random, "random", _forbidden("unseeded chance")),
            (random, "uniform", _forbidden("unseeded chance")),
        ):
            patches.enter_context(patch.object(target, name, put))
        patches.enter_context(patch("threading.Thread.start", _forbidden("a thread was started")))
        patches.enter_context(patch("socket.socket.connect", _forbidden("a socket was opened")))
        patches.enter_context(patch("subprocess.Popen.__init__", _forbidden("a process started")))
        yield
