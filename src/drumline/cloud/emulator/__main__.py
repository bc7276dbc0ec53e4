"""The emulator's process: `python -m drumline.cloud.emulator --home DIR [--port P]`.

One at a time in a home, which a lock there sees to. It writes `endpoint.json` when it answers, with
a token that is new each time, and removes it when it ends in order.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import uvicorn
from starlette.applications import Starlette

from drumline.cloud.emulator.api import control, rest, storage
from drumline.cloud.emulator.api.login import Login
from drumline.cloud.emulator.config import BadConfig, EmulatorConfig, load
from drumline.cloud.emulator.hosts.running import HostSettings
from drumline.cloud.emulator.launch import ENDPOINT, EmulatorError, for_owner, make_private
from drumline.cloud.emulator.service import Service
from drumline.cloud.visits import Visits

MISTAKE = 2
_LOCK_SECONDS = 1.0
ANNOUNCE_SECONDS = 1.0
"""Seconds between two checks that others can still find us."""
IDLE_SECONDS = 1800.0
"""Seconds without a slice or a call after which it exits; the next command starts another."""


def main() -> int:
    """Run until stopped."""
    parser = argparse.ArgumentParser(prog="python -m drumline.cloud.emulator", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="any free one unless given")
    parser.add_argument(
        "--idle", type=float, default=IDLE_SECONDS, help="seconds with nothing to do until it ends"
    )
    given = parser.parse_args()
    home: Path = given.home.resolve()
    try:
        make_private(home)
        config = load(home / "config.yaml")
    except (BadConfig, EmulatorError) as wrong:
        print(wrong, file=sys.stderr)
        return MISTAKE
    _allow_many_hosts()
    with open(home / "lock", "w", opener=for_owner) as lock:
        if not _take(lock):
            print(f"an emulator already runs in {home}", file=sys.stderr)
            return MISTAKE
        # The endpoint file of a killed emulator must not be taken for ours.
        (home / ENDPOINT).unlink(missing_ok=True)
        asyncio.run(_serve(home, config, given.port, given.idle))
    return 0


def _take(lock: IO[str]) -> bool:
    # A check whether an emulator runs takes the lock briefly.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            return True


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would exit before the hosts are ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _allow_many_hosts() -> None:
    # Each host takes three descriptors, and the default limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(home: Path, config: EmulatorConfig, port: int, idle: float) -> None:
    settings = HostSettings(home, config.boot_seconds)
    service = Service(config, settings)
    service.hosts.clear_away()
    service.machines.clear_away()
    service.hosts.warm_up()
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(512)

    def stop() -> None:
        server.should_exit = True

    token = secrets.token_urlsafe(32)
    storage_path, storage_route = storage.mount(settings.buckets)
    app = Starlette(
        routes=[*control.routes(service, stop), *rest.routes(service), storage_route],
        exception_handlers=rest.EXCEPTION_HANDLERS,
    )
    # Inside the login: a call without the token does not count.
    visits = Visits(app, lambda: _needed(service, config), idle)
    server = _Server(
        uvicorn.Config(
            Login(visits, token, storage_path),
            # A line for each call would fill the disk of a user who leaves it running.
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
            # Closing an idle connection just when a caller uses it again looks like a fault, and
            # faults here must come only on request.
            timeout_keep_alive=600,
        )
    )
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    announcement = json.dumps(
        {
            "pid": os.getpid(),
            "url": url,
            "token": token,
            "storage": f"{url}{storage_path}",
            "started": time.time(),
        }
    )
    _announce(home, announcement)
    announcing = asyncio.create_task(_keep_announced(home, announcement))
    for asked_to_end in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(asked_to_end, stop)
    advancing = asyncio.create_task(service.run())
    leaving = asyncio.create_task(visits.over())
    leaving.add_done_callback(lambda _: stop())
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in (advancing, leaving, announcing):
            task.cancel()
        await service.hosts.close()
        service.machines.clear_away()
        (home / ENDPOINT).unlink(missing_ok=True)


def _needed(service: Service, config: EmulatorConfig) -> bool:
    """Whether it holds anything, or was changed by controls, which the next one would not be."""
    fleet, first = service.fleet, config.limits()
    changed = service.faults != config.faults or any(
        fleet.limits.capacity.get(zone, {}) != first.capacity.get(zone, {})
        for zone in {*fleet.limits.capacity, *first.capacity}
    )
    return bool(fleet.requests or fleet.nodes or changed or service.machines.broken)


def _announce(home: Path, announcement: str) -> None:
    draft = home / f"{ENDPOINT}.{os.getpid()}"
    with open(draft, "w", opener=for_owner) as file:
        file.write(announcement)
    draft.replace(home / ENDPOINT)


async def _keep_announced(home: Path, announcement: str) -> None:
    """Restore the endpoint file if it was removed or spoilt: otherwise nobody could find us."""
    while True:
        await asyncio.sleep(ANNOUNCE_SECONDS)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            try:
                known = (home / ENDPOINT).read_text()
            except FileNotFoundError:
                known = ""
            if known != announcement and home.is_dir():
                _announce(home, announcement)


if __name__ == "__main__":
    sys.exit(main())
