"""One JSON object a line, to and from whoever called."""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


def say(value: Json) -> None:
    """One line to whoever called."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def heard() -> Json:
    """What the caller sent on standard input."""
    return _object(sys.stdin.read())


def heard_line() -> Json:
    """The first line the caller sent, and not a byte more: the rest is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return _object(line)


def _object(text: str | bytes) -> Json:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value
