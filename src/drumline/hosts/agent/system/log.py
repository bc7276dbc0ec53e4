"""An attempt's log: what set-up and program wrote, and when it grew."""

from __future__ import annotations

import contextlib
import os
import sys
import time

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from collections.abc import Iterator


CHUNK = 48 * 1024

TAIL_LINES = 20


def log_size(folder: str) -> int:
    """How much of the log there is."""
    try:
        return os.stat(os.path.join(folder, "log")).st_size
    except OSError:
        return 0


def write_log(folder: str, text: str) -> None:
    """Add a line of ours to the attempt's log."""
    with open(os.path.join(folder, "log"), "ab") as log:
        log.write(text.encode() + b"\n")


def read_log(folder: str, offset: int, most: int) -> bytes:
    """A piece of the log."""
    try:
        with open(os.path.join(folder, "log"), "rb") as log:
            log.seek(offset)
            return log.read(most)
    except OSError:
        return b""


class Growth:
    """Notes when the log grew, so that whoever reads it later can tell when a line was written."""

    def __init__(self, folder: str, offset: int) -> None:
        """Begin where the output begins whose growth is to be noted."""
        self.folder = folder
        self.size = offset
        self.noted = 0.0

    def look(self) -> None:
        """Note the moment if there is more than at the last look; once a second is enough."""
        size, now = log_size(self.folder), time.time()
        if size > self.size and abs(now - self.noted) >= 1:
            with open(os.path.join(self.folder, "times"), "a") as times:
                times.write(f"{self.size} {now:.2f}\n")
            self.noted = now
        self.size = size


def stretches(folder: str) -> Iterator[tuple[int, float]]:
    """Up to which place the log was written at which moment, in order."""
    written = 0.0
    with contextlib.suppress(OSError), open(os.path.join(folder, "times")) as times:
        for line in times:
            with contextlib.suppress(ValueError):
                place, moment = line.split()
                yield int(place), written or float(moment)
                written = float(moment)
    # What came after the last moment that was noted came within a second of it.
    yield sys.maxsize, written or time.time()


def last_lines(folder: str) -> list[str]:
    """The end of the log."""
    size = log_size(folder)
    text = read_log(folder, max(0, size - 16384), 16384).decode("utf-8", "replace")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-TAIL_LINES:]
