"""Finds the emulator, starts it, stops it, and calls its controls.

Many commands import this module, so it uses the standard library only.

The emulator listens on a TCP port, as Google's client requires, and every user of the machine can
connect to it. Therefore callers need a token. The emulator writes the token and its address to a
file that only its owner can read.
"""

import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from drumline.errors import CloudError

ENDPOINT = "endpoint.json"
# It starts in about a second, or in many seconds on a busy machine.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_RESPONSE_SECONDS = 30.0


# The emulator outlives this process. If it ends first, its parent must reap it.
_started: list["subprocess.Popen[bytes]"] = []


class EmulatorError(CloudError):
    """The emulator could not be started or called, or it rejected a call."""


class Access(NamedTuple):
    """The address of an emulator and its token."""

    url: str
    token: str
    pid: int
    storage: str = ""
    """The URL of its Cloud Storage API, which is secret and replaces a token."""


def find(home: Path) -> Access | None:
    """Return the access to the emulator of a home, or None if none runs. Send no call.

    After a crash, the port may belong to another user, who must not get the token. Therefore the
    file counts only while an emulator holds the lock.
    """
    try:
        saved = json.loads((home / ENDPOINT).read_text())
        url, token, pid = str(saved["url"]), str(saved["token"]), int(saved["pid"])
        access = Access(url, token, pid, str(saved.get("storage", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return access if _lock_is_held(home) else None


def endpoint(home: Path) -> str | None:
    """Return the base URL of the emulator of a home, or None if none answers."""
    _started[:] = [process for process in _started if process.poll() is None]
    access = find(home)
    if access is None:
        return None
    try:
        _call(access, "status")
    except EmulatorError:
        return None
    return access.url


def ensure_running(home: Path) -> str:
    """Return the base URL of the emulator of a home, and start it if it does not run.

    It runs in its own session and outlives the caller. Concurrent callers start only one.
    """
    if url := endpoint(home):
        return url
    make_private(home)
    with open(home / "launch.lock", "w", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if url := endpoint(home):
            return url
        with open(home / "log", "ab", opener=open_private) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drumline.cloud.emulator", "--home", str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            access = find(home)
            if access and access.pid == process.pid and (url := endpoint(home)):
                _started.append(process)
                return url
            if process.poll() is not None:
                raise EmulatorError(f"the emulator did not start: {_last_line(home / 'log')}")
            time.sleep(0.02)
        process.kill()
        process.wait()
        raise EmulatorError(f"the emulator does not answer; see {home / 'log'}")


def stop(home: Path) -> bool:
    """Stop the emulator of a home and all its hosts. Return False if none runs."""
    access = find(home)
    if access is None:
        return False
    try:
        _call(access, "stop")
    except EmulatorError:
        # It hangs or is exiting. The process in the file holds the lock.
        with contextlib.suppress(ProcessLookupError):
            os.kill(access.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _lock_is_held(home):
        if time.monotonic() > deadline:
            # Its hosts exit when it dies.
            with contextlib.suppress(ProcessLookupError):
                os.kill(access.pid, signal.SIGKILL)
        time.sleep(0.02)
    for process in _started:
        if process.pid == access.pid:
            process.wait()
    return True


def control(home: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """Call the control `/emulator/<verb>`."""
    access = find(home)
    if access is None:
        raise EmulatorError(f"no emulator runs in {home}")
    return _call(access, verb, **arguments)


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can enter, and its missing parents."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
        if os.getuid() not in (owner, 0):
            raise EmulatorError(
                f"{folder} belongs to another user; set DRUMLINE_HOME to a folder of your own"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise EmulatorError(f"{folder} cannot be used: {error.strerror}") from error


def _call(access: Access, verb: str, **arguments: Any) -> dict[str, Any]:
    is_read = verb in {"status", "resources"}
    address = urlsplit(access.url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=_RESPONSE_SECONDS
    )
    try:
        connection.request(
            "GET" if is_read else "POST",
            f"/emulator/{verb}",
            None if is_read else json.dumps(arguments),
            {"Authorization": f"Bearer {access.token}"}
            | ({} if is_read else {"Content-Type": "application/json"}),
        )
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EmulatorError(f"the emulator at {access.url} does not answer: {error}") from error
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise EmulatorError(f"the server at {access.url} is not an emulator")
    if response.status >= 400:
        raise EmulatorError(str(body.get("error", body)))
    return body


def _lock_is_held(home: Path) -> bool:
    """Return True if an emulator runs. Takes the lock for a moment, which a start allows for."""
    try:
        with (home / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def open_private(path: str, flags: int) -> int:
    """Open a file so that only its owner can read it."""
    return os.open(path, flags, 0o600)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {log}"
