"""Joins the hosts of a slice into one JAX program, from the variables the agent sets.

    import drumline.distributed
    drumline.distributed.initialize()

At one's desk, or on a slice of one host, this joins nothing; the same program runs everywhere.
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
"""Seconds. After a cold restart of many hosts, JAX's own 300 were too few."""
HEARTBEAT_TIMEOUT = 10
"""Seconds until a lost host is noticed; JAX's own 100 are 100 seconds of idle chips."""
SHUTDOWN_TIMEOUT = 5
"""Seconds a host that ends waits for the others. JAX's own 300 hold a failed slice for minutes."""


def initialize(
    *,
    initialization_timeout: int = INITIALIZATION_TIMEOUT,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    shutdown_timeout: int = SHUTDOWN_TIMEOUT,
) -> None:
    """Join the other hosts, and see to it that an exception on one of them ends it at once."""
    hosts = int(os.environ.get("DRUMLINE_HOSTS") or 1)
    _report_exceptions(end_at_once=hosts > 1)
    if hosts == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    wanted: dict[str, Any] = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout,
        "shutdown_timeout_seconds": shutdown_timeout,
    }
    taken = inspect.signature(jax.distributed.initialize).parameters
    jax.distributed.initialize(
        coordinator_address=os.environ["DRUMLINE_COORDINATOR"],
        num_processes=hosts,
        process_id=int(os.environ["DRUMLINE_HOST"]),
        **{name: value for name, value in wanted.items() if name in taken},
    )


def _report_exceptions(end_at_once: bool) -> None:
    """Write the first uncaught exception beside the heartbeat, as soon as it is raised.

    With several hosts the process then ends without ceremony: at a normal end it would wait for its
    siblings, which wait for it in a collective, and all of them would stand for minutes.
    """
    path = os.environ.get("DRUMLINE_HEARTBEAT")
    if not path:
        return
    file = os.path.join(os.path.dirname(path), "error.json")
    show, show_in_thread = sys.excepthook, threading.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _write(file, error)
        show(kind, error, trace)
        if end_at_once:
            _end()

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            # The main thread would go on without it, as a rule into a wait without end.
            if end_at_once:
                _write(file, args.exc_value)
            show_in_thread(args)
            if end_at_once:
                _end()

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def _write(file: str, error: BaseException) -> None:
    draft = f"{file}.{os.getpid()}.draft"
    # Whatever is wrong with the disk, the traceback must still be shown.
    with suppress(Exception):
        with open(draft, "x") as out:
            json.dump({"at": time.time(), "error": described(error)}, out)
        with suppress(FileExistsError):
            os.link(draft, file)
        os.unlink(draft)


def described(error: BaseException) -> str:
    """`train.py:214  ValueError: …`: the innermost frame of the user's own code, and the error."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("site-packages", "dist-packages", "/lib/python3", "<")
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    last = text[0] if text else type(error).__name__
    if isinstance(error, SyntaxError):
        last = text[-1]
    if not frames:
        return last[:500]
    frame = (own or list(frames))[-1]
    path = os.path.relpath(frame.filename)
    name = os.path.basename(frame.filename) if path.startswith("..") else path
    return f"{name}:{frame.lineno}  {last}"[:500]


def _end() -> NoReturn:
    with suppress(Exception):
        flush_heartbeat()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)
