"""A user's regular expression, matched with a time limit.

`re` backtracks: `(\\d+)+x` takes minutes for a line of 30 digits and years for one of 60, and while
it matches nothing else of the process runs, no thread either. But CPython's matcher checks for
signals every few thousand steps, so a timer of the kernel can end it. The timer counts CPU time,
hence a busy machine makes no pattern slow. `test_patterns` checks this on every Python we support.
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
    """The time limit for matching was reached."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block once it has used so many CPU seconds.

    Signals reach only Python's main thread, where the server has its loop; in another thread the
    block is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def ring(_: int, __: FrameType | None) -> None:
        # A signal may be delivered just after the block was left; then it is ignored.
        if armed:
            raise TooSlow

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        # Repeated, in case something in the block swallows the first exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def backtracks(pattern: re.Pattern[str]) -> str | None:
    """A line of 60 equal characters for which a pattern takes too long, None where none is known.

    A quick check of the commonest mistake, for the user who writes the pattern; `limited` covers
    all others.
    """
    for line in _PROBES:
        try:
            with limited(PROBE_SECONDS):
                pattern.search(line)
        except TooSlow:
            return line[:-1]
    return None
