"""Join the hosts of a slice into one JAX program, from the environment that the agent sets.

    import drumline.distributed
    drumline.distributed.initialize()

On a workstation, or on a slice of one host, this does nothing. The same program runs everywhere.
"""

import inspect
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from drumline.heartbeat import flush as flush_heartbeat

INITIALIZATION_TIMEOUT = 1800
"""The timeout in seconds. JAX's default of 300 is too short after a cold restart of many hosts."""
HEARTBEAT_TIMEOUT = 10
"""Seconds until a lost host is detected. JAX's default of 100 wastes as many seconds of chips."""
SHUTDOWN_TIMEOUT = 5
"""Seconds that a host waits for the others at its end. JAX's default of 300 delays a restart."""


def initialize(
    *,
    initialization_timeout: int = INITIALIZATION_TIMEOUT,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    shutdown_timeout: int = SHUTDOWN_TIMEOUT,
) -> None:
    """Join the other hosts, and make an uncaught exception end this process immediately."""
    hosts = int(os.environ.get("DRUMLINE_HOSTS") or 1)
    _report_exceptions(exit_immediately=hosts > 1)
    if hosts == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    timeouts: dict[str, Any] = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout,
        "shutdown_timeout_seconds": shutdown_timeout,
    }
    supported = inspect.signature(jax.distributed.initialize).parameters
    jax.distributed.initialize(
        coordinator_address=os.environ["DRUMLINE_COORDINATOR"],
        num_processes=hosts,
        process_id=int(os.environ["DRUMLINE_HOST"]),
        **{name: value for name, value in timeouts.items() if name in supported},
    )


def _report_exceptions(exit_immediately: bool) -> None:
    """Write the first uncaught exception to a file beside the heartbeat.

    With several hosts the process then exits immediately. A normal exit would wait for the other
    hosts, which wait for this one in a collective, and all would be idle for minutes.
    """
    path = os.environ.get("DRUMLINE_HEARTBEAT")
    if not path:
        return
    file = os.path.join(os.path.dirname(path), "error.json")
    previous, previous_in_thread = sys.excepthook, threading.excepthook

    def on_exception(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _write(file, error)
        previous(error_type, error, trace)
        if exit_immediately:
            _exit()

    def on_exception_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            # The main thread would continue, and usually wait for this thread forever.
            if exit_immediately:
                _write(file, args.exc_value)
            previous_in_thread(args)
            if exit_immediately:
                _exit()

    sys.excepthook, threading.excepthook = on_exception, on_exception_in_thread


def _write(file: str, error: BaseException) -> None:
    draft = f"{file}.{os.getpid()}.draft"
    # An error of the disk must not hide the traceback.
    with suppress(Exception):
        with open(draft, "x") as out:
            json.dump({"at": time.time(), "error": describe_error(error)}, out)
        with suppress(FileExistsError):
            os.link(draft, file)
        os.unlink(draft)


def describe_error(error: BaseException) -> str:
    """Return the last frame of the user's code and the error: `train.py:214  ValueError: …`."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    libraries = ("site-packages", "dist-packages", "/lib/python3", "<")
    user_frames = [f for f in frames if not any(part in f.filename for part in libraries)]
    message = lines[0] if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        message = lines[-1]
    if not frames:
        return message[:500]
    frame = (user_frames or list(frames))[-1]
    path = os.path.relpath(frame.filename)
    name = os.path.basename(frame.filename) if path.startswith("..") else path
    return f"{name}:{frame.lineno}  {message}"[:500]


def _exit() -> NoReturn:
    with suppress(Exception):
        flush_heartbeat()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)
