"""The log of an attempt: the output of set-up and program, and the times at which it grew."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

from .files import append, open_file

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Iterator


CHUNK_BYTES = 48 * 1024
"""The size of a piece of the log in one message."""
TAIL_LINES = 20
TAIL_BYTES = 16384


def log_size(folder: str) -> int:
    """Return the size of the log in bytes."""
    try:
        status = os.stat(os.path.join(folder, "log"))
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def append_to_log(folder: str, text: str) -> None:
    """Append a line of Drumline to the log of the attempt, if the log is still a file."""
    with contextlib.suppress(OSError):
        append(text.encode() + b"\n", folder, "log")


def read_log(folder: str, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of the log from an offset."""
    try:
        with open_file(folder, "log") as log:
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
            append(f"{self.size} {now:.2f}\n".encode(), self.folder, "times")
            self.recorded_at = now
        self.size = size


def growth_times(folder: str) -> Iterator[tuple[int, float]]:
    """Yield an end offset and the time at which the log was written up to it, in order."""
    written_at = 0.0
    with contextlib.suppress(OSError), open_file(folder, "times") as times:
        # A line of a few bytes in each second.
        for line in iter(lambda: times.readline(100), b""):
            with contextlib.suppress(ValueError):
                offset, timestamp = line.split()
                yield int(offset), written_at or float(timestamp)
                written_at = float(timestamp)
    # The rest of the log was written within a second of the last recorded time.
    yield sys.maxsize, written_at or time.time()


def last_lines(folder: str, offset: int = 0) -> list[str]:
    """Return the last lines of the log, from an offset on."""
    start = max(offset, log_size(folder) - TAIL_BYTES)
    return last_lines_of(read_log(folder, start, TAIL_BYTES))


def last_lines_of(data: bytes) -> list[str]:
    """Return the last lines of some output, each with its first 500 characters."""
    text = data[-TAIL_BYTES:].decode("utf-8", "replace")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-TAIL_LINES:]
