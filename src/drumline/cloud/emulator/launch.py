"""Finds the emulator, starts it, stops it, and speaks to its controls.

Imported by every command that may need it, so it takes the standard library only.
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
from typing import Any
from urllib.parse import urlsplit

ENDPOINT = "endpoint.json"
# It starts in about a second; a busy machine may take many.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


# It outlives us, but if it ends first it must be buried, and that is the parent's to do.
_started: list["subprocess.Popen[bytes]"] = []


class EmulatorError(RuntimeError):
    """The emulator could not be started or asked, or refused; the text is the whole sentence."""


def endpoint(home: Path) -> str | None:
    """The base URL of the emulator of that home, if one answers there."""
    _started[:] = [process for process in _started if process.poll() is None]
    url = _announced(home).get("url")
    if not isinstance(url, str):
        return None
    try:
        status = control(url, "status")
    except EmulatorError:
        return None
    # After a crash and a while, the port may be another's.
    return url if status.get("home") == str(home.resolve()) else None


def ensure_running(home: Path) -> str:
    """The base URL of the emulator of that home; it is started if there is none.

    It is a session of its own, so it outlives the caller. Two callers at once start one.
    """
    if url := endpoint(home):
        return url
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if url := endpoint(home):
            return url
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drumline.cloud.emulator", "--home", str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if _announced(home).get("pid") == process.pid and (url := endpoint(home)):
                _started.append(process)
                return url
            if process.poll() is not None:
                raise EmulatorError(f"the emulator did not start: {_last_line(home / 'log')}")
            time.sleep(0.02)
        process.kill()
        raise EmulatorError(f"the emulator does not answer; see {home / 'log'}")


def stop(home: Path) -> bool:
    """Stop the emulator of that home and all its hosts; False if none runs."""
    url = endpoint(home)
    pid = _announced(home).get("pid")
    if url is None or not isinstance(pid, int):
        return False
    control(url, "stop")
    deadline = time.monotonic() + _STOP_SECONDS
    while _holds_its_lock(home):
        if time.monotonic() > deadline:
            # Its hosts notice and end by themselves.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for process in _started:
        if process.pid == pid:
            process.wait(_STOP_SECONDS)
    return True


def control(url: str, verb: str, **given: Any) -> dict[str, Any]:
    """Call `/emulator/<verb>`: status and resources ask, everything else changes something."""
    asks = verb in {"status", "resources"}
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.request(
            "GET" if asks else "POST",
            f"/emulator/{verb}",
            None if asks else json.dumps(given),
            {} if asks else {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as wrong:
        raise EmulatorError(f"the emulator at {url} does not answer: {wrong}") from wrong
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise EmulatorError(f"what answers at {url} is no emulator")
    if answer.status >= 400:
        raise EmulatorError(str(body.get("error", body)))
    return body


def _announced(home: Path) -> dict[str, Any]:
    try:
        found = json.loads((home / ENDPOINT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _holds_its_lock(home: Path) -> bool:
    try:
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {log}"
