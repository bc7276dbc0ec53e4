"""The emulator's process: `python -m drumline.cloud.emulator --home DIR [--port P]`.

A lock allows one emulator per home. When it is ready, it writes `endpoint.json` with a new token.
It removes the file when it exits. If its home is deleted, it exits and leaves a new home alone.
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

from drumline import __version__
from drumline.cloud import serving
from drumline.cloud.emulator.api import control, rest, storage
from drumline.cloud.emulator.api.login import Login
from drumline.cloud.emulator.config import EmulatorConfig, load
from drumline.cloud.emulator.launch import ENDPOINT, EmulatorError, make_private, open_private
from drumline.cloud.emulator.running_hosts import HostSettings
from drumline.cloud.emulator.service import Service
from drumline.cloud.idle_exit import IdleExit
from drumline.errors import UserError
from drumline.files import write_atomically

USER_ERROR = 2
_LOCK_SECONDS = 1.0
ENDPOINT_CHECK_SECONDS = 1.0
"""The interval of checks that the endpoint file still exists."""
IDLE_SECONDS = 1800.0
"""The seconds without slices and calls after which it exits. The next command starts another."""


def main() -> int:
    """Run the emulator until it is stopped. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m drumline.cloud.emulator", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="the port; by default any free port")
    parser.add_argument(
        "--idle",
        type=float,
        default=IDLE_SECONDS,
        help="seconds without slices and calls after which it exits",
    )
    arguments = parser.parse_args()
    home: Path = arguments.home.resolve()
    try:
        make_private(home)
        config = load(home / "config.yaml")
    except (UserError, EmulatorError) as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    _allow_many_hosts()
    with open(home / "lock", "w", opener=open_private) as lock:
        if not _acquire(lock):
            print(f"an emulator already runs in {home}", file=sys.stderr)
            return USER_ERROR
        # Remove the endpoint file of an emulator that was killed.
        (home / ENDPOINT).unlink(missing_ok=True)
        asyncio.run(_serve(home, lock, config, arguments.port, arguments.idle))
    return 0


def _acquire(lock: IO[str]) -> bool:
    # `launch` takes the lock for a moment to check if an emulator runs.
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
    """A server that ignores signals. uvicorn would exit before the hosts are ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def _allow_many_hosts() -> None:
    # Each host takes three descriptors, and the default limit is often 1,024.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


async def _serve(home: Path, lock: IO[str], config: EmulatorConfig, port: int, idle: float) -> None:
    settings = HostSettings(home, config.boot_seconds)
    service = Service(config, settings)
    service.hosts.remove_leftovers()
    service.machines.remove_all()
    service.hosts.start_fork_server()
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(serving.BACKLOG)

    def stop() -> None:
        server.should_exit = True

    token = secrets.token_urlsafe(32)
    storage_path, storage_route = storage.mount(settings.buckets)
    app = Starlette(
        routes=[*control.routes(service, stop), *rest.routes(service), storage_route],
        exception_handlers=rest.EXCEPTION_HANDLERS,
    )
    # Wrapped by the login, so that calls without the token do not count.
    idle_exit = IdleExit(app, lambda: _is_busy(service, config), idle)
    server = _Server(
        uvicorn.Config(
            Login(idle_exit, token, storage_path),
            # A line for each call would fill the disk over time.
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
            # Long, because closing an idle connection at the moment of a call looks like a fault,
            # and faults must occur only on request.
            timeout_keep_alive=600,
        )
    )
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    endpoint = json.dumps(
        {
            "pid": os.getpid(),
            "version": __version__,
            "url": url,
            "token": token,
            "storage": f"{url}{storage_path}",
            "started": time.time(),
        }
    )
    _write_endpoint(home, endpoint)
    endpoint_task = asyncio.create_task(_keep_endpoint_file(home, lock, endpoint))
    endpoint_task.add_done_callback(lambda _: stop())
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop)
    advance_task = asyncio.create_task(service.run())
    idle_task = asyncio.create_task(idle_exit.wait_until_idle())
    idle_task.add_done_callback(lambda _: stop())
    try:
        await serving.serve(server, listening)
    finally:
        for task in (advance_task, idle_task, endpoint_task):
            task.cancel()
        await service.hosts.close()
        if _owns_home(home, lock):
            service.machines.remove_all()
            (home / ENDPOINT).unlink(missing_ok=True)


def _is_busy(service: Service, config: EmulatorConfig) -> bool:
    """Return True if the emulator has state that a restart would lose."""
    fleet, initial = service.fleet, config.limits()
    changed = service.faults != config.faults or any(
        fleet.limits.capacity.get(zone, {}) != initial.capacity.get(zone, {})
        for zone in {*fleet.limits.capacity, *initial.capacity}
    )
    return bool(fleet.requests or fleet.nodes or changed or service.machines.broken)


def _write_endpoint(home: Path, endpoint: str) -> None:
    write_atomically(home / ENDPOINT, endpoint, mode=0o600)


def _owns_home(home: Path, lock: IO[str]) -> bool:
    """Return False if the home was deleted. Another emulator may run in a new one by now."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(home / "lock"))
    except FileNotFoundError:
        return False
    except OSError:
        return True


async def _keep_endpoint_file(home: Path, lock: IO[str], endpoint: str) -> None:
    """Restore the endpoint file if it was removed or changed, until the home is deleted.

    Callers find the emulator by this file.
    """
    while _owns_home(home, lock):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            try:
                content = (home / ENDPOINT).read_text()
            except FileNotFoundError:
                content = ""
            if content != endpoint and _owns_home(home, lock):
                _write_endpoint(home, endpoint)
        await asyncio.sleep(ENDPOINT_CHECK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
