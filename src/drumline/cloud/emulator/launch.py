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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from drumline import __version__
from drumline.errors import CloudError

ENDPOINT = "endpoint.json"
# It starts in about a second, or in many seconds on a busy machine.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_EXIT_SECONDS = 2.0
_RESPONSE_SECONDS = 30.0
# An emulator writes its endpoint file seconds after it has taken the lock, and restores it within
# a second. Then no client can find it.
_ENDPOINT_SECONDS = 20.0
RESTART = "drumline emulator stop, then drumline emulator start"

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
    version: str = ""
    """The version of Drumline; empty for one that did not write it yet."""


def find(home: Path) -> Access | None:
    """Return the access to the emulator of a home, or None if none runs. Send no call.

    After a crash, the port may belong to another user, who must not get the token. Therefore the
    file counts only while an emulator holds the lock.
    """
    try:
        saved = json.loads((home / ENDPOINT).read_text())
        # The first emulators had no token.
        url, token, pid = str(saved["url"]), str(saved.get("token", "")), int(saved["pid"])
        access = Access(
            url, token, pid, str(saved.get("storage", "")), str(saved.get("version", ""))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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


def version_warning(home: Path) -> str:
    """Return a sentence if the running emulator has another version, else an empty text."""
    access = find(home)
    if access is None or access.version == __version__:
        return ""
    return f"{_describe(access)}, this command is {__version__}; to restart it, run {RESTART}"


def absence(home: Path) -> str:
    """Return the reason why no emulator answers in a home, and the command that helps."""
    if not _lock_is_held(home):
        return f"no emulator runs in {home}; drumline emulator start starts it"
    if access := find(home):
        return f"{_describe(access)} and does not answer; to restart it, run {RESTART}"
    return (
        f"an emulator runs in {home}, but its {ENDPOINT} cannot be read; "
        f"to restart it, run {RESTART}"
    )


def _describe(access: Access) -> str:
    version = f"version {access.version}" if access.version else "an older version"
    return f"the running emulator (process {access.pid}) is {version}"


def is_running(home: Path) -> bool:
    """Return True if an emulator runs, even if it cannot be called."""
    return _lock_is_held(home)


def ensure_running(home: Path) -> str:
    """Return the base URL of the emulator of a home, and start it if it does not run.

    It runs in its own session and outlives the caller. Concurrent callers start only one. One whose
    endpoint file stays unreadable is replaced, because no client can call it.
    """
    if url := endpoint(home):
        return url
    make_private(home)
    with open(home / "launch.lock", "w", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if url := _await_running(home):
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


def _await_running(home: Path) -> str | None:
    """Wait until the running emulator answers or has exited. Return its URL if it answers."""
    deadline = time.monotonic() + _ENDPOINT_SECONDS
    while _lock_is_held(home):
        if url := endpoint(home):
            return url
        if time.monotonic() > deadline:
            if find(home):
                raise EmulatorError(absence(home))
            stop(home)
        time.sleep(0.05)
    return None


def stop(home: Path) -> bool:
    """Stop the emulator of a home, of any version, and all its hosts. Return False if none runs."""
    if not _lock_is_held(home):
        return False
    access = find(home)
    pid = access.pid if access else _running_process(home)
    if pid is None:
        raise EmulatorError(
            f"an emulator runs in {home}, but its {ENDPOINT} cannot be read and its process was not"
            " found; end the process whose command line has drumline.cloud.emulator"
        )
    processes = [pid, *children_of(pid)]
    try:
        if access is None:
            os.kill(pid, signal.SIGTERM)
        else:
            _call(access, "stop")
    except ProcessLookupError:
        pass
    except EmulatorError:
        # It hangs, is exiting or is older. The process in the file holds the lock.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _lock_is_held(home):
        if time.monotonic() > deadline:
            # Its hosts exit when it dies.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for process in _started:
        if process.pid == pid:
            process.wait()
    wait_for_exit(processes)
    return True


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process, where there is /proc."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children: list[int] = []
    for file in files:
        with contextlib.suppress(OSError):
            children += map(int, file.read_text().split())
    return children


def wait_for_exit(processes: Iterable[int]) -> None:
    """Wait a moment for processes that have given up their lock, so that no user sees them."""
    deadline = time.monotonic() + _EXIT_SECONDS
    while not all(map(has_exited, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def has_exited(pid: int) -> bool:
    """Return True if a process has exited, even if its parent has not reaped it."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["Z"]


def control(home: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """Call the control `/emulator/<verb>`."""
    access = find(home)
    if access is None:
        raise EmulatorError(absence(home))
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


def _running_process(home: Path) -> int | None:
    """Return the process of the emulator of a home by its command line, where there is /proc."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command, _, rest = os.fsdecode(file.read_bytes()).partition("\0--home\0")
            folder = rest.partition("\0")[0]
            is_emulator = "drumline.cloud.emulator" in command and folder
            if is_emulator and os.path.realpath(folder) == os.path.realpath(home):
                return int(file.parent.name)
    return None


def open_private(path: str, flags: int) -> int:
    """Open a file so that only its owner can read it."""
    return os.open(path, flags, 0o600)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {log}"
