"""Finds the emulator, starts it, stops it, and calls its controls.

Imported by every command that may need it, so standard library only.

The emulator listens on a TCP port, as Google's client requires, and every user of the machine can
connect to it. So it answers only callers with the token that it wrote, with its address, into a
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

ENDPOINT = "endpoint.json"
# It starts in about a second, or many on a busy machine.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_ANSWER_SECONDS = 30.0


# It outlives us, but if it ends first its parent must reap it.
_started: list["subprocess.Popen[bytes]"] = []


class EmulatorError(RuntimeError):
    """The emulator could not be started or called, or refused; the text is the whole sentence."""


class Access(NamedTuple):
    """The address of an emulator, and the token for it."""

    url: str
    token: str
    pid: int
    storage: str = ""
    """The URL of its Cloud Storage API, which takes the place of a token."""


def find(home: Path) -> Access | None:
    """The emulator of that home, if one runs; whether it answers is not checked.

    After a crash the port may belong to another user, who must not get the token. So the file
    counts only while its writer holds the lock.
    """
    try:
        written = json.loads((home / ENDPOINT).read_text())
        url, token, pid = str(written["url"]), str(written["token"]), int(written["pid"])
        found = Access(url, token, pid, str(written.get("storage", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if _holds_its_lock(home) else None


def endpoint(home: Path) -> str | None:
    """The base URL of the emulator of that home, if one answers there."""
    _started[:] = [process for process in _started if process.poll() is None]
    found = find(home)
    if found is None:
        return None
    try:
        _ask(found, "status")
    except EmulatorError:
        return None
    return found.url


def ensure_running(home: Path) -> str:
    """The base URL of the emulator of that home, which is started if it does not run.

    It has a session of its own, so it outlives the caller. Two concurrent callers start only one.
    """
    if url := endpoint(home):
        return url
    make_private(home)
    with open(home / "launch.lock", "w", opener=for_owner) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if url := endpoint(home):
            return url
        with open(home / "log", "ab", opener=for_owner) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drumline.cloud.emulator", "--home", str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            found = find(home)
            if found and found.pid == process.pid and (url := endpoint(home)):
                _started.append(process)
                return url
            if process.poll() is not None:
                raise EmulatorError(f"the emulator did not start: {_last_line(home / 'log')}")
            time.sleep(0.02)
        process.kill()
        process.wait()
        raise EmulatorError(f"the emulator does not answer; see {home / 'log'}")


def stop(home: Path) -> bool:
    """Stop the emulator of that home and all its hosts; False if none runs."""
    found = find(home)
    if found is None:
        return False
    try:
        _ask(found, "stop")
    except EmulatorError:
        # It hangs or is exiting; the holder of the lock has the process id in the file.
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _holds_its_lock(home):
        if time.monotonic() > deadline:
            # Its hosts notice and exit by themselves.
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        time.sleep(0.02)
    for process in _started:
        if process.pid == found.pid:
            process.wait()
    return True


def control(home: Path, verb: str, **given: Any) -> dict[str, Any]:
    """Call `/emulator/<verb>`: status and resources only read, all others change something."""
    found = find(home)
    if found is None:
        raise EmulatorError(f"no emulator runs in {home}")
    return _ask(found, verb, **given)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter, and its missing parents."""
    try:
        missing = [folder, *folder.parents]
        for parent in reversed([path for path in missing if not path.exists()]):
            parent.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
        if os.getuid() not in (owner, 0):
            raise EmulatorError(
                f"{folder} belongs to another user; set DRUMLINE_HOME to a folder of your own"
            )
        folder.chmod(0o700)
    except OSError as wrong:
        raise EmulatorError(f"{folder} cannot be used: {wrong.strerror}") from wrong


def _ask(access: Access, verb: str, **given: Any) -> dict[str, Any]:
    asks = verb in {"status", "resources"}
    place = urlsplit(access.url)
    connection = http.client.HTTPConnection(
        place.hostname or "", place.port, timeout=_ANSWER_SECONDS
    )
    try:
        connection.request(
            "GET" if asks else "POST",
            f"/emulator/{verb}",
            None if asks else json.dumps(given),
            {"Authorization": f"Bearer {access.token}"}
            | ({} if asks else {"Content-Type": "application/json"}),
        )
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as wrong:
        raise EmulatorError(f"the emulator at {access.url} does not answer: {wrong}") from wrong
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise EmulatorError(f"what answers at {access.url} is no emulator")
    if answer.status >= 400:
        raise EmulatorError(str(body.get("error", body)))
    return body


def _holds_its_lock(home: Path) -> bool:
    """Whether an emulator runs there. This takes the lock briefly, which a start allows for."""
    try:
        with (home / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def for_owner(path: str, flags: int) -> int:
    """An opener for files that only their owner can read."""
    return os.open(path, flags, 0o600)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {log}"
