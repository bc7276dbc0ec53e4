"""The time by which the server orders what it sees and does.

The wall clock steps: somebody sets it, a laptop wakes, a virtual machine is moved. A look that
seems older than the request it was made for, or a release that seems to lie in the future, costs
slices. So order and duration come from here, and the wall clock is only for showing.
"""

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds that never go back: the wall time at the start of the server, and what passed since.

    As it begins with the wall time, what a server wrote down means about the same to the next one.
    Where the wall was set back in between, times of the last server can lie in the future;
    `lifecycle.clamped` mends those.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now."""
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._monotonic() + self._offset
