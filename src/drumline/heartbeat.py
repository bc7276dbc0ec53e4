"""A program's pulse: `heartbeat(step=120, loss=0.41)` shows in `drumline list` and `show`.

Standard library only, so that any program can use it. Where no agent listens it does nothing.
"""

import atexit
import json
import math
import os
import time
from contextlib import suppress
from typing import Any

_INTERVAL = 0.1
"""Seconds between two writes: nobody looks more often, and a fast step must not pay for it."""

_latest: dict[str, object] | None = None
_written = -math.inf


def heartbeat(step: int | None = None, **metrics: object) -> None:
    """Report where the program is. Numbers may be anything that `float` takes, such as arrays.

    At most ten reports a second are written; the last one before the program ends always is.
    """
    global _latest, _written
    if not os.environ.get("DRUMLINE_HEARTBEAT"):
        return
    if _latest is None:
        atexit.register(flush)
    known = {} if step is None else {"step": step}
    _latest = {**known, **metrics}
    now = time.monotonic()
    if now - _written >= _INTERVAL:
        _written = now
        flush()


def flush() -> None:
    """Write the last report now."""
    path = os.environ.get("DRUMLINE_HEARTBEAT")
    if path is None or _latest is None:
        return
    values = {name: _plain(value) for name, value in _latest.items()}
    draft = f"{path}.{os.getpid()}.draft"
    # A pulse that cannot be written (a full disk) is no reason to end a training.
    with suppress(OSError):
        with open(draft, "w") as file:
            json.dump({**values, "time": time.time()}, file)
        os.replace(draft, path)


def _plain(value: Any) -> object:
    """As JSON has it. A value that is not finite is told as text: `nan`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except Exception:
        # A deleted array raises what it likes; the text is better than a dead program.
        with suppress(Exception):
            return str(value)[:200]
        return None
    if not math.isfinite(number):
        return str(number)
    return (
        int(number) if number.is_integer() and "int" in str(getattr(value, "dtype", "")) else number
    )
