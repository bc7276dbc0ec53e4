"""The log of an attempt: the output of set-up and program, and the times at which it grew."""

from __future__ import annotations

import contextlib
import os
import sys
import time

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Iterator


CHUNK_BYTES = 48 * 1024
"""The size of a piece of the log in one message."""
TAIL_LINES = 20


def log_size(folder: str) -> int:
    """Return the size of the log in bytes."""
    try:
        return os.stat(os.path.join(folder, "log")).st_size
    except OSError:
        return 0


def append_to_log(folder: str, text: str) -> None:
    """Append a line of Drumline to the log of the attempt."""
    with open(os.path.join(folder, "log"), "ab") as log:
        log.write(text.encode() + b"\n")


def read_log(folder: str, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of the log from an offset."""
    try:
        with open(os.path.join(folder, "log"), "rb") as log:
            log.seek(offset)
            return log.read(size)
    except OSError:
        return b""


class GrowthRecorder:
    """Records when the log grew, so that a later reader can tell when each line was written."""

    def __init__(self, folder: str, offset: int) -> None:
        """Record growth from `offset` on."""
        self.folder = folder
        self.size = offset
        self.recorded_at = 0.0

    def update(self) -> None:
        """Record the time if the log has grown, at most once a second."""
        size, now = log_size(self.folder), time.time()
        if size > self.size and abs(now - self.recorded_at) >= 1:
            with open(os.path.join(self.folder, "times"), "a") as times:
                times.write(f"{self.size} {now:.2f}\n")
            self.recorded_at = now
        self.size = size


def growth_times(folder: str) -> Iterator[tuple[int, float]]:
    """Yield an end offset and the time at which the log was written up to it, in order."""
    written_at = 0.0
    with contextlib.suppress(OSError), open(os.path.join(folder, "times")) as times:
        for line in times:
            with contextlib.suppress(ValueError):
                offset, timestamp = line.split()
                yield int(offset), written_at or float(timestamp)
                written_at = float(timestamp)
    # The rest of the log was written within a second of the last recorded time.
    yield sys.maxsize, written_at or time.time()


def last_lines(folder: str, offset: int = 0) -> list[str]:
    """Return the last lines of the log, from an offset on."""
    start = max(offset, log_size(folder) - 16384)
    text = read_log(folder, start, 16384).decode("utf-8", "replace")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-TAIL_LINES:]
