"""A program's pulse: `heartbeat(step=120, loss=0.41)` shows in `drumline list`, `show` and `plot`.

Standard library only, so that any program can use it. Where no agent listens it does nothing.
`import drumline` imports this module, so what only a written report needs is imported then.
"""

import atexit
import math
import os
import time
from typing import Any

_INTERVAL = 0.1
"""Seconds between two writes: nobody looks more often, and a fast step must not pay for it."""

_latest: dict[str, object] | None = None
_written = -math.inf
_resumed: dict[str, object] = {}
"""The checkpoint of the first report. Whoever looks may see the second report first, or the
hundredth, so every report carries it: with it one can tell which steps are run again."""


def heartbeat(step: int | None = None, **metrics: object) -> None:
    """Report where the program is. Numbers may be anything that `float` takes, such as arrays.

    Names with a meaning to Drumline: `total` (steps in all), `loss`, `rate` and `item` (9800.0
    and "images" a second), `mfu` and `goodput` (0 to 1), `checkpoint` (the step of the newest one,
    None while there is none) and `result` (text that stands beside the job's end). All other
    numbers can be plotted. What a report leaves out stays as an earlier one told it.

    At most ten reports a second are written; the last one before the program ends always is.
    """
    global _latest, _resumed, _written
    if not os.environ.get("DRUMLINE_HEARTBEAT"):
        return
    if _latest is None:
        atexit.register(flush)
        saved = metrics.get("checkpoint")
        _resumed = {"resumed": 0 if saved is None else saved} if "checkpoint" in metrics else {}
    known = {} if step is None else {"step": step}
    _latest = {**(_latest or {}), **known, **metrics}
    now = time.monotonic()
    if now - _written >= _INTERVAL:
        _written = now
        flush()


def flush() -> None:
    """Write the last report now."""
    import json

    path = os.environ.get("DRUMLINE_HEARTBEAT")
    if path is None or _latest is None:
        return
    values = {name: _plain(value) for name, value in {**_resumed, **_latest}.items()}
    draft = f"{path}.{os.getpid()}.draft"
    try:
        with open(draft, "w") as file:
            json.dump({**values, "time": time.time()}, file)
        os.replace(draft, path)
    except OSError:
        # A pulse that cannot be written (a full disk) is no reason to end a training.
        return


def _plain(value: Any) -> object:
    """As JSON has it. A value that is not finite is told as text: `nan`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except Exception:
        # A deleted array raises what it likes; the text is better than a dead program.
        try:
            return str(value)[:200]
        except Exception:
            return None
    if not math.isfinite(number):
        return str(number)
    return (
        int(number) if number.is_integer() and "int" in str(getattr(value, "dtype", "")) else number
    )
