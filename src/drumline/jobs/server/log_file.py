"""The log of the server: bounded in size, and without endless repetitions of one line."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 8_000_000
"""The size at which the log is renamed to `server.log.1`, which replaces the one before."""
MAX_REPEATS, REPEAT_SECONDS = 10, 60.0
"""The most lines from one place in the code within these seconds."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STDERR = 2


class RepeatLimit(logging.Filter):
    """Drops lines from a place in the code that logs too often, and counts them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no lines."""
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int, str], tuple[float, int]] = {}
        """The start of the current seconds and the number of lines in them, by place."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line to drop."""
        place = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        since, count = self._windows.get(place, (now, 0))
        if now - since >= REPEAT_SECONDS:
            if count > MAX_REPEATS:
                record.msg = f"{record.msg} ({count - MAX_REPEATS} more such lines were left out)"
            since, count = now, 0
            if len(self._windows) > 1000:  # messages that differ each time
                self._windows.clear()
        self._windows[place] = (since, count + 1)
        return count < MAX_REPEATS


class BoundedLog(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error, and bounds the file to which the client has redirected it."""

    def __init__(self, path: Path) -> None:
        """`path` is the log file. If standard error leads elsewhere, nothing is bounded."""
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter(FORMAT))
        self.addFilter(RepeatLimit())

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        super().emit(record)
        with contextlib.suppress(OSError):
            self._bound()

    def _bound(self) -> None:
        current = os.fstat(_STDERR)
        if current.st_size <= MAX_BYTES or not os.path.samestat(current, self._path.stat()):
            return
        try:
            new = os.open(
                self._path.with_name(f"{self._path.name}.new"),
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC,
                0o600,
            )
        except OSError:  # no free descriptor, or the disk is full
            os.ftruncate(_STDERR, 0)
            return
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._path.with_name(f"{self._path.name}.new").replace(self._path)
        for descriptor in (1, _STDERR):
            os.dup2(new, descriptor)
        os.close(new)


def configure(path: Path) -> None:
    """Log to standard error, which the client has redirected to `path`."""
    logging.basicConfig(level=logging.INFO, handlers=[BoundedLog(path)])
    for library in ("asyncssh", "httpx", "httpcore"):
        logging.getLogger(library).setLevel(logging.WARNING)
