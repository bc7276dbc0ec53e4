"""Regular expressions of users, matched with a time limit.

`re` backtracks: `(\\d+)+x` takes minutes for a line of 30 digits and years for one of 60. While it
matches, no other thread of the process runs. But CPython's matcher checks for signals every few
thousand steps, so a kernel timer can interrupt it. The timer counts CPU time, so a busy machine
does not make a pattern slow. `test_patterns` checks this on every supported Python.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PROBE_SECONDS = 0.05
_PROBES = tuple(sign * 60 + "\0" for sign in "7a ._-,:=/|#")


class TooSlow(Exception):
    """A pattern reached the time limit."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block once it has used this many CPU seconds.

    Signals reach only Python's main thread, where the server has its event loop. In another thread
    the block has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def interrupt(_: int, __: FrameType | None) -> None:
        # A signal that arrives just after the end of the block is ignored.
        if armed:
            raise TooSlow

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        # Repeated, in case the block swallows the first exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def find_slow_line(pattern: re.Pattern[str]) -> str | None:
    """Return a line of 60 equal characters for which a pattern takes too long; None if none does.

    This checks for the most common error when a user writes a pattern. `limited` covers the others.
    """
    for line in _PROBES:
        try:
            with limited(PROBE_SECONDS):
                pattern.search(line)
        except TooSlow:
            return line[:-1]
    return None
