"""The heartbeat of a program: `heartbeat(step=120, loss=0.41)` reports to `drumline list`.

Any program can use it, because it needs only the standard library. Without an agent it does
nothing. `import drumline` imports this module, so modules that only `flush` needs are imported
there.
"""

import atexit
import math
import os
import time
from typing import Any

_INTERVAL = 0.1
"""Seconds between writes, so that fast steps are not slowed down."""

_latest: dict[str, object] | None = None
_written_at = -math.inf
_resumed: dict[str, object] = {}
"""The checkpoint of the first report. It determines which steps run again. Every report contains
it, because the agent may miss the first one."""


def heartbeat(step: int | None = None, **metrics: object) -> None:
    """Report the progress of the program. Numbers may be of any type that `float` takes.

    Drumline uses these names: `total` (the number of steps), `loss`, `rate` and `item` (9800.0 and
    "images" per second), `mfu` and `goodput` (0 to 1), `checkpoint` (the step of the newest one,
    None if there is none) and `result` (a text to show at the end of the job). All other numbers
    can be plotted. A value that a report leaves out keeps its last value.

    At most ten reports a second are written. The last one before the program ends always is.
    """
    global _latest, _resumed, _written_at
    if not os.environ.get("DRUMLINE_HEARTBEAT"):
        return
    if _latest is None:
        atexit.register(flush)
        checkpoint = metrics.get("checkpoint")
        _resumed = (
            {"resumed": 0 if checkpoint is None else checkpoint} if "checkpoint" in metrics else {}
        )
    fields = {} if step is None else {"step": step}
    _latest = {**(_latest or {}), **fields, **metrics}
    now = time.monotonic()
    if now - _written_at >= _INTERVAL:
        _written_at = now
        flush()


def flush() -> None:
    """Write the last report now."""
    import json

    path = os.environ.get("DRUMLINE_HEARTBEAT")
    if path is None or _latest is None:
        return
    values = {name: _to_json(value) for name, value in {**_resumed, **_latest}.items()}
    draft = f"{path}.{os.getpid()}.draft"
    try:
        with open(draft, "w") as file:
            json.dump({**values, "time": time.time()}, file)
        os.replace(draft, path)
    except OSError:
        # A full disk must not end the training.
        return


def _to_json(value: Any) -> object:
    """Return a value for JSON. A non-finite number becomes text, such as `nan`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except Exception:
        # A deleted array may raise any exception, and none may end the program.
        try:
            return str(value)[:200]
        except Exception:
            return None
    if not math.isfinite(number):
        return str(number)
    return (
        int(number) if number.is_integer() and "int" in str(getattr(value, "dtype", "")) else number
    )
