"""Messages to and from whoever called, on standard input and output."""

from __future__ import annotations

import os
import sys

from .wire import Message, decode, encode

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import TypeVar

    Sent = TypeVar("Sent", bound=Message)


def say(message: Message) -> None:
    """One line to whoever called."""
    sys.stdout.write(encode(message) + "\n")
    sys.stdout.flush()


def heard(kind: type[Sent]) -> Sent:
    """What the caller sent on standard input."""
    return kind(**decode(sys.stdin.read()))


def heard_line(kind: type[Sent]) -> Sent:
    """The first line the caller sent, and not a byte more: the rest is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return kind(**decode(line))
