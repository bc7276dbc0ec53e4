"""The limits of loss and gradient norm beyond which a step is replayed. Pure: numbers to limits.

A value raises an alarm if it exceeds *both* of these:

- `factor` times the median of the last accepted steps. The factor is 1.4 for the loss and 2.0 for
  the norm, which in large runs separates corruption from noise. For values near zero or below, the
  factor applies to the distance from the median: `median + (factor - 1) · |median|`.
- The median plus `DEVIATIONS` times the usual deviation from it. A run whose batches differ a lot
  is noisy, not faulty, and a factor of a median near zero would mean nothing.

An alarm costs a replay, which takes a few steps' time, and only a replay can prove a fault. So all
that matters is that alarms are rare. The first can come after `WARM_UP` steps, and after each false
alarm there is a pause, twice as long as the last pause.
"""

from collections import deque
from math import isfinite
from statistics import median

WINDOW = 100
"""The number of accepted steps in the baseline."""
WARM_UP = 50
"""The number of steps before the first alarm. At the start of a run losses fall and norms rise."""
DEVIATIONS = 8.0
"""Normal noise never deviates so far, and noise with a heavy tail rarely."""
SIGMA = 1.4826
"""The ratio of the standard deviation to the median absolute deviation, for normal noise."""
UPDATE_INTERVAL = 10
"""Steps between updates of the limits. The median changes slowly, and an update is a transfer to
the devices."""
FIRST_PAUSE = 25
LONGEST_PAUSE = 1600
"""Steps without limits after the first false alarm, and after the seventh and later ones."""

INFINITE = float("inf")


class Alarms:
    """The limits of the next step, from the loss and norm of the accepted steps."""

    def __init__(self, loss: float | None, norm: float | None) -> None:
        """Set the factors for loss and norm. None sets no limit."""
        self.limits = (INFINITE, INFINITE)
        """The limits of the loss and of the gradient norm."""
        self._factors = (loss, norm)
        self._accepted: tuple[deque[float], ...] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))
        self._count = 0
        self._pause_until = 0
        self._pause = FIRST_PAUSE

    def accept(self, loss: float, norm: float) -> None:
        """Add the loss and norm of an accepted step to the baseline."""
        self._count += 1
        for values, value in zip(self._accepted, (loss, norm), strict=True):
            if isfinite(value):  # The norm of finite gradients can overflow.
                values.append(value)
        if self._count % UPDATE_INTERVAL == 0:
            self._update()

    def clear(self) -> None:
        """Record a false alarm: raise no alarm for a while."""
        self._pause_until = self._count + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._update()

    def _update(self) -> None:
        paused = self._count < max(WARM_UP, self._pause_until)
        loss, norm = (
            INFINITE if paused or factor is None or not values else _limit(values, factor)
            for values, factor in zip(self._accepted, self._factors, strict=True)
        )
        self.limits = loss, norm


def _limit(values: deque[float], factor: float) -> float:
    """Return the limit above which a value raises an alarm after these values."""
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    return middle + max((factor - 1) * abs(middle), DEVIATIONS * SIGMA * deviation)
