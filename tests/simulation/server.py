"""The server under simulation: the real one, life after life, on clocks that the world moves.

Its users speak HTTP to it, without a socket in between.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import sqlite3
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

from starlette.types import ASGIApp, Message

from drumline.hosts import driver
from drumline.jobs.config import read
from drumline.jobs.controller import slices, supervisor
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.server.api import JobsApi
from drumline.jobs.server.service import JobService
from drumline.jobs.store.records import Store
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.environment import Environment
from tests.simulation.hosts import SimulatedConnection
from tests.simulation.loop import PARTY, NotSimulated

KEY = "ssh-ed25519 AAAA drumline"


INSUFFICIENT_STORAGE = 507
SWEEP_SECONDS = 4 * 3600.0
"""Between two looks at zones in which nothing of ours should be."""
ASKS_A_MINUTE = 12.0
"""Requests for slices that the server may make; one that has just started, a minute's more."""


class ServerKilled(Exception):
    """The server was killed before it answered."""


class Refused(Exception):
    """The server answered that it will not."""

    def __init__(self, code: int, error: str) -> None:
        """`code` is the HTTP status."""
        super().__init__(error)
        self.code = code


class Server:
    """One home folder, and whoever serves it now."""

    def __init__(
        self,
        environment: Environment,
        cloud: SimulatedCloud,
        home: Path,
        settings: str,
        name: str = "server",
    ) -> None:
        """Nobody serves it yet."""
        self._environment, self._cloud, self._home = environment, cloud, home
        self._name = name
        self.owner = ""
        """The id of its database."""
        (home / "config.yaml").write_text(settings)
        self._config = replace(read(home), requests_per_minute=ASKS_A_MINUTE)
        self.lives = 0
        self.started: list[float] = []
        """When each life began."""
        self.stepped = 0.0
        """Seconds by which the wall clock is off."""
        self._slept = 0.0
        """Seconds that the machine's own clock did not count."""
        self.asleep = False
        self._party = ""
        self._graveyard: list[Any] = []
        self._supervisor: Supervisor | None = None
        self.service: JobService | None = None
        self._application: ASGIApp | None = None
        self._died: asyncio.Event = asyncio.Event()

    def wall(self) -> float:
        """What the server takes for the date."""
        return self._environment.now() + self.stepped

    def monotonic(self) -> float:
        """What the server takes for the time that has passed."""
        return self._environment.now() - self._slept

    @property
    def alive(self) -> bool:
        """Whether somebody serves."""
        return self.service is not None

    def start(self) -> None:
        """A new life."""
        self.lives += 1
        self._party = f"{self._name}-{self.lives}"
        self._died = asyncio.Event()
        self._environment.note("server starts", self.lives)
        context = copy_context()
        context.run(PARTY.set, self._party)
        context.run(self._begin)

    def _begin(self) -> None:
        store = Store(self._home / "jobs.db")
        self.owner = store.owner
        self.started.append(self._environment.now())
        self._supervisor = Supervisor(
            store, self._cloud, self._config, KEY, wall=self.wall, monotonic=self.monotonic
        )
        self.service = JobService(self._supervisor)
        self._application = JobsApi(self.service, lambda: None, lambda: None).application()
        self._environment.spawn(self._supervisor.run(), self._party)

    def kill(self) -> None:
        """As `kill -9` does: nothing that it had begun goes on, nothing is put away."""
        if self.service is None:
            return
        self._environment.note("server killed", self.lives)
        self._environment.loop.kill(self._party)
        self._graveyard += [self._environment.loop.under_way(), self._supervisor, self.service]
        self.service.store.close()
        self._supervisor = self.service = self._application = None
        self._died.set()

    async def sleep(self, seconds: float, counts: bool) -> None:
        """The machine sleeps; whether its own clock counts that differs between machines."""
        party = self._party
        self._environment.note("machine sleeps", seconds)
        self.asleep = True
        self._environment.loop.put_to_sleep(party)
        await asyncio.sleep(seconds)
        self.asleep = False
        if party != self._party:
            return  # it lost its power meanwhile
        if not counts:
            self._slept += seconds
        for host in self._environment.hosts.values():
            host.cut()  # nobody had answered them
        self._environment.loop.wake_up(party)

    def fill_disk(self, full: bool) -> None:
        """Whether the database can grow no more."""
        if self.service is not None:
            pages = 1 if full else 1 << 30
            with contextlib.suppress(sqlite3.Error):
                self.service.store._db.execute(f"PRAGMA max_page_count = {pages}")

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """What a user's command asks of the server that runs now. Raises Died and Refused."""
        if self._application is None:
            raise ServerKilled
        answer: asyncio.Future[tuple[int, Any]] = self._environment.loop.create_future()
        asking = _ask(self._application, method, path, urlencode(query), body, answer)
        self._environment.spawn(asking, self._party)
        died = asyncio.ensure_future(self._died.wait())
        waits: set[asyncio.Future[Any]] = {answer, died}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if not answer.done():
            raise ServerKilled
        code, response = answer.result()
        if code >= 400:
            raise Refused(code, response["error"])
        return response


async def _ask(
    application: ASGIApp,
    method: str,
    path: str,
    query: str,
    body: Any,
    answer: "asyncio.Future[tuple[int, Any]]",
) -> None:
    """One request as a web server hands it on, and its answer."""
    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "root_path": "",
        "raw_path": path.encode(), "query_string": query.encode(), "headers": [], "scheme": "http",
        "server": ("drumline", None), "client": None,
    }  # fmt: skip
    sent = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}]
    code, content = 0, b""

    async def receive() -> Message:
        return sent.pop() if sent else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal code, content
        code = message.get("status", code)
        content += message.get("body", b"")

    try:
        await application(scope, receive, send)
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result((code, json.loads(content)))


def _forbidden(environment: Environment, what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        # Noted too: whoever asked for it may catch what is raised.
        environment.fail(f"not simulated: {what}")
        raise NotSimulated(what)

    return refuse


@contextlib.contextmanager
def isolate(environment: Environment, server: Server, round_pause: float = 0.02) -> Iterator[None]:
    """No wall clock, thread, socket or chance but the simulation's own."""
    stream = environment.streams["server"]
    SimulatedConnection.environment = environment
    chance, clock = "unseeded chance", "a clock that is not simulated"
    forbidden = (
        (time, "monotonic_ns", clock),
        (time, "perf_counter", clock),
        (time, "sleep", "a sleep of the whole process"),
        (os, "urandom", chance),
        (random, "random", chance),
        (random, "uniform", chance),
        (random, "choice", chance),
        (random, "randint", chance),
        (random, "shuffle", chance),
        (uuid, "uuid4", chance),
        (threading.Thread, "start", "a thread"),
        (socket.socket, "connect", "a socket"),
        (subprocess.Popen, "__init__", "a process"),
    )
    with contextlib.ExitStack() as patches:
        for target, name, put in (
            (time, "time", server.wall),
            (time, "time_ns", lambda: int(server.wall() * 1e9)),
            (time, "monotonic", server.monotonic),
            (supervisor, "ROUND_PAUSE", round_pause),
            (slices, "SWEEP_SECONDS", SWEEP_SECONDS),
            (driver, "Connection", SimulatedConnection),
            (driver, "random", stream),
            (secrets, "token_hex", lambda n: f"{stream.getrandbits(8 * n):0{2 * n}x}"),
            *((target, name, _forbidden(environment, what)) for target, name, what in forbidden),
        ):
            patches.enter_context(patch.object(target, name, put))
        yield
