"""When the loss or the norm of the gradients is worth a second look. Pure: numbers in, limits out.

The rule, in one place. A value alarms where it is beyond *both* of

- `factor` times the median of the last accepted steps, 1.4 for the loss and 2.0 for the norm: what
  large runs have found to separate corruption from noise. Near zero, and for losses below it, the
  part beyond the median counts: `median + (factor - 1) · |median|`;
- the median and `SPREAD` times the usual deviation from it: a run whose batches differ a lot is
  noisy, not broken, and where the median is about zero a factor of it would mean nothing.

The price of an alarm is a replay, a few steps' time, and nobody is accused without one. So what
matters is that alarms stay rare: the first comes after `WARM_UP` steps, and each that turned out to
be the run's own doing buys it a rest, twice as long as the one before.
"""

from collections import deque
from math import isfinite
from statistics import median

WINDOW = 100
"""Accepted steps that make the baseline."""
WARM_UP = 50
"""Steps before the first alarm: at the start of a run, losses fall and norms rise by themselves."""
SPREAD = 8.0
"""Of normal noise nothing is ever so far out; of noise with a heavy tail little."""
SIGMA = 1.4826
"""The median deviation from the median, times this, is the standard deviation of normal noise."""
EVERY = 10
"""Steps between two baselines: a median moves slowly, and new limits are a transfer to devices."""
REST = 25
LONGEST_REST = 1600
"""Steps without limits after the first alarm that was for nothing, and after the seventh and on."""

INFINITE = float("inf")


class Alarms:
    """The limits of the next step, from what the accepted ones told."""

    def __init__(self, loss: float | None, norm: float | None) -> None:
        """The factors; None for one that is not watched."""
        self.limits = (INFINITE, INFINITE)
        """Of the loss and of the norm of the gradients."""
        self._factors = (loss, norm)
        self._accepted: tuple[deque[float], ...] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))
        self._count = 0
        self._rest_until = 0
        self._rest = REST

    def accept(self, loss: float, norm: float) -> None:
        """A step was taken, with this."""
        self._count += 1
        for values, value in zip(self._accepted, (loss, norm), strict=True):
            if isfinite(value):  # the norm of finite gradients need not be
                values.append(value)
        if self._count % EVERY == 0:
            self._look()

    def acquit(self) -> None:
        """An alarm was for nothing: leave the run in peace for a while."""
        self._rest_until = self._count + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._look()

    def _look(self) -> None:
        resting = self._count < max(WARM_UP, self._rest_until)
        loss, norm = (
            INFINITE if resting or factor is None or not values else limit(values, factor)
            for values, factor in zip(self._accepted, self._factors, strict=True)
        )
        self.limits = loss, norm


def limit(values: deque[float], factor: float) -> float:
    """What a value must exceed to alarm, after these."""
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    return middle + max((factor - 1) * abs(middle), SPREAD * SIGMA * deviation)
