"""The clock that orders the observations and actions of a server.

The wall clock can jump: somebody sets it, a laptop wakes up, a virtual machine migrates. A poll
that seems older than the request it follows, or a release that seems to lie in the future, would
cost slices. So order and durations come from this clock, and the wall clock is only displayed.
"""

import time
from collections.abc import Callable


class SteadyClock:
    """A clock in seconds that never goes back: the wall time at its start plus the time since.

    It starts with the wall time, so that times saved by one server are meaningful to the next. If
    the wall clock was set back in between, saved times can lie in the future; `adapt_times` in
    `jobs.core.lifecycle` corrects those.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock now."""
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        """Return the time."""
        return self._monotonic() + self._offset
