"""The real server, restarted after each kill, on simulated clocks.

Its users send HTTP requests to it without a socket.
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
from drumline.jobs.server.process import make_runner
from drumline.jobs.server.service import JobService
from drumline.jobs.store.records import Store
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.environment import Environment
from tests.simulation.hosts import BEAT, SimulatedConnection
from tests.simulation.loop import PARTY, NotSimulated

KEY = "ssh-ed25519 AAAA drumline"


INSUFFICIENT_STORAGE = 507
SWEEP_SECONDS = 4 * 3600.0
"""Seconds between two polls of zones without jobs."""
REQUESTS_PER_MINUTE = 12.0
"""Requests for slices that the server may make per minute.

A new server starts with a full minute's.
"""
WATCH_SILENCE = 2 * BEAT
"""Seconds without a line of `watch` after which the server replaces the connection."""


class ServerKilled(Exception):
    """The server was killed before it answered."""


class Refused(Exception):
    """The server refused the command."""

    def __init__(self, code: int, error: str) -> None:
        """`code` is the HTTP status."""
        super().__init__(error)
        self.code = code


class Server:
    """One home folder with its current server process."""

    def __init__(
        self,
        environment: Environment,
        cloud: SimulatedCloud,
        home: Path,
        settings: str,
        name: str = "server",
    ) -> None:
        """Prepare the home. `start` starts the first server."""
        self._environment, self._cloud, self._home = environment, cloud, home
        self._name = name
        self.owner = ""
        """The id of its database."""
        (home / "config.yaml").write_text(settings)
        config = read(home)
        self._config = replace(
            config,
            requests_per_minute=REQUESTS_PER_MINUTE,
            timing=replace(config.timing, watch_silence=WATCH_SILENCE),
        )
        self.starts = 0
        self.started: list[float] = []
        """The start time of each server process."""
        self.clock_offset = 0.0
        """Seconds by which the wall clock is off."""
        self._slept = 0.0
        """Seconds for which the machine's own clock stood still."""
        self.asleep = False
        self.awake_since = 0.0
        """The time of the last start or wake-up."""
        self._party = ""
        self._killed_objects: list[Any] = []
        self._supervisor: Supervisor | None = None
        self.service: JobService | None = None
        self._application: ASGIApp | None = None
        self._killed: asyncio.Event = asyncio.Event()

    def wall(self) -> float:
        """Return the date from the server's view."""
        return self._environment.now() + self.clock_offset

    def monotonic(self) -> float:
        """Return the server's monotonic time."""
        return self._environment.now() - self._slept

    @property
    def alive(self) -> bool:
        """True if a server runs."""
        return self.service is not None

    def start(self) -> None:
        """Start a new server process."""
        self.starts += 1
        self.awake_since = self._environment.now()
        self._party = f"{self._name}-{self.starts}"
        self._killed = asyncio.Event()
        self._environment.note("server starts", self.starts)
        context = copy_context()
        context.run(PARTY.set, self._party)
        context.run(self._begin)

    def _begin(self) -> None:
        store = Store(self._home / "jobs.db")
        self.owner = store.owner
        self.started.append(self._environment.now())
        self._supervisor = Supervisor(
            store,
            self._cloud,
            self._config,
            make_runner(self._config, self._cloud, KEY),
            wall=self.wall,
            monotonic=self.monotonic,
        )
        self.service = JobService(self._supervisor)
        self._application = JobsApi(self.service, lambda: None, lambda: None).application()
        self._environment.spawn(self._supervisor.run(), self._party)

    def kill(self) -> None:
        """Kill the server like `kill -9`: nothing continues, nothing is cleaned up."""
        if self.service is None:
            return
        self._environment.note("server killed", self.starts)
        self._environment.loop.kill(self._party)
        self._killed_objects += [
            self._environment.loop.pending_tasks(),
            self._supervisor,
            self.service,
        ]
        self.service.store.close()
        self._supervisor = self.service = self._application = None
        self._killed.set()

    async def sleep(self, seconds: float, counts: bool) -> None:
        """Let the machine sleep. `counts` is True if its monotonic clock continues meanwhile."""
        party = self._party
        self._environment.note("machine sleeps", seconds)
        self.asleep = True
        self._environment.loop.put_to_sleep(party)
        await asyncio.sleep(seconds)
        self.asleep, self.awake_since = False, self._environment.now()
        if party != self._party:
            return  # it was killed meanwhile
        if not counts:
            self._slept += seconds
        for host in self._environment.hosts.values():
            host.cut()  # keepalives had no answer
        self._environment.loop.wake_up(party)

    def fill_disk(self, full: bool) -> None:
        """Stop the database from growing, or let it grow again."""
        if self.service is not None:
            pages = 1 if full else 1 << 30
            with contextlib.suppress(sqlite3.Error):
                self.service.store._db.execute(f"PRAGMA max_page_count = {pages}")

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Send a user's request to the current server. Raises ServerKilled and Refused."""
        if self._application is None:
            raise ServerKilled
        response_future: asyncio.Future[tuple[int, Any]] = self._environment.loop.create_future()
        handling = _handle_request(
            self._application, method, path, urlencode(query), body, response_future
        )
        self._environment.spawn(handling, self._party)
        killed = asyncio.ensure_future(self._killed.wait())
        pending: set[asyncio.Future[Any]] = {response_future, killed}
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not response_future.done():
            raise ServerKilled
        code, response = response_future.result()
        if code >= 400:
            raise Refused(code, response["error"])
        return response


async def _handle_request(
    application: ASGIApp,
    method: str,
    path: str,
    query: str,
    body: Any,
    response_future: "asyncio.Future[tuple[int, Any]]",
) -> None:
    """Pass one request to the application like a web server, and set its response."""
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
        response_future.set_exception(error)
    else:
        response_future.set_result((code, json.loads(content)))


def _forbidden(environment: Environment, use: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        # Recorded as well, because the caller may catch the exception.
        environment.fail(f"not simulated: {use}")
        raise NotSimulated(use)

    return refuse


@contextlib.contextmanager
def isolate(environment: Environment, server: Server, round_pause: float = 0.02) -> Iterator[None]:
    """Replace clocks, threads, sockets and random numbers by simulated ones, or forbid them."""
    stream = environment.streams["server"]
    SimulatedConnection.environment = environment
    randomness, clock = "unseeded chance", "a clock that is not simulated"
    forbidden = (
        (time, "monotonic_ns", clock),
        (time, "perf_counter", clock),
        (time, "sleep", "a sleep of the whole process"),
        (os, "urandom", randomness),
        (random, "random", randomness),
        (random, "uniform", randomness),
        (random, "choice", randomness),
        (random, "randint", randomness),
        (random, "shuffle", randomness),
        (uuid, "uuid4", randomness),
        (threading.Thread, "start", "a thread"),
        (socket.socket, "connect", "a socket"),
        (subprocess.Popen, "__init__", "a process"),
    )
    with contextlib.ExitStack() as patches:
        for target, name, replacement in (
            (time, "time", server.wall),
            (time, "time_ns", lambda: int(server.wall() * 1e9)),
            (time, "monotonic", server.monotonic),
            (supervisor, "ROUND_PAUSE", round_pause),
            (slices, "SWEEP_SECONDS", SWEEP_SECONDS),
            (driver, "Connection", SimulatedConnection),
            (driver, "random", stream),
            (secrets, "token_hex", lambda n: f"{stream.getrandbits(8 * n):0{2 * n}x}"),
            *((target, name, _forbidden(environment, use)) for target, name, use in forbidden),
        ):
            patches.enter_context(patch.object(target, name, replacement))
        yield
