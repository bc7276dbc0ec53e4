"""The steps after which a run saves: every N steps, or at intervals that are chosen during the run.

Frequent saves hold up training, and rare saves lose more steps with each slice. With
`save_every="auto"` the interval between two saves is Young's `sqrt(2 · cost · lifetime)`, with
Daly's correction. The cost is the time for which a save holds up training, measured at each save.
The lifetime is the mean of slices, from the environment variable DRUMLINE_SLICE_LIFETIME.

All hosts must save after the same steps. So they exchange their measurements and use the largest of
each. They do so only after a save, and before the first save of an attempt after 1, 2, 4, 8, …
steps.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from drumline.train.multihost import max_over_hosts
from drumline.train.recipe import Settings

VARIABLE = "DRUMLINE_SLICE_LIFETIME"
"""The environment variable with the mean lifetime of slices in seconds. The job manager sets it."""
USUAL_LIFETIME = 2 * 3600.0
"""The assumed lifetime of a slice in seconds if nothing is known. Reports about spot TPUs range
from ten minutes in zones without capacity to a day. Slices that live past their first quarter of an
hour usually live for hours. An error by a factor of four changes the interval by a factor of two,
which costs a quarter more than the best interval."""
FIRST_SAVE_SECONDS = 120.0
"""Seconds of training before the first save of an attempt. Many slices are lost within a quarter of
an hour. They lose an eighth of it at most."""
FIRST_SAVE_SHARE = 1 / 8
"""The first save comes sooner where slices live less long: after this share of their lifetime."""
LONGEST_SECONDS = 3600.0
"""The longest interval. Saves once an hour cost little, and the lifetime may be overestimated."""
MAX_COSTS = 5
"""The number of newest saves whose median cost counts. A single slow save changes nothing."""
REPORTED_CHANGE = 1 / 4
"""The interval is reported again if it differs by more than this share."""


def best_interval(cost: float, lifetime: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    `cost` is the time for which a save holds up training, and `lifetime` the mean time between
    losses, both in seconds. The formula is from Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps" (2006). If the cost is small it is Young's
    `sqrt(2 · cost · lifetime)`.
    """
    ratio = cost / (2 * lifetime)
    if ratio >= 1:
        return lifetime
    return math.sqrt(2 * cost * lifetime) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def read_slice_lifetime() -> float | None:
    """Return the mean lifetime of slices from the environment, or None if it is unknown."""
    try:
        lifetime = float(os.environ.get(VARIABLE, ""))
    except ValueError:
        return None
    return lifetime if 0 < lifetime < math.inf else None


class SaveSchedule:
    """Saves every N steps."""

    interval: int | None = None
    """The current interval in steps, if it is chosen during the run and known."""

    def __init__(self, every: int | None) -> None:
        """None never saves."""
        self._every = every

    def restart(self, step: int) -> None:
        """Continue from the state after this step."""

    def meets_after(self, step: int) -> bool:
        """Return True if the run must pause after this step and call `meet`."""
        del step
        return False

    def meet(self, step: int) -> None:
        """Choose the next save together with the other hosts."""

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after this step."""
        return self._every is not None and step % self._every == 0

    def begin_save(self) -> None:
        """Measure the cost of a save from now on."""

    def end_save(self, step: int, waited: float, write_seconds: float) -> None:
        """Choose the next save together with the other hosts, after a save.

        The save first waited for the previous checkpoint, which took `write_seconds` to write.
        """


class AutoSchedule(SaveSchedule):
    """Saves at intervals that follow from the cost of a save and the lifetime of slices."""

    def __init__(
        self,
        lifetime: float | None,
        keep_every: int | None,
        log: Callable[[str], None],
        *,
        agree: Callable[[Sequence[float]], list[float]] = max_over_hosts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lifetime` is the mean lifetime of slices as far as this host knows.

        The run also saves at multiples of `keep_every`. `agree` returns the largest of each value
        over all hosts.
        """
        super().__init__(keep_every)
        self._lifetime = lifetime or USUAL_LIFETIME
        self._lifetime_is_known = lifetime is not None
        self._log, self._agree, self._clock = log, agree, clock
        self._next_save: int | None = None
        """The step of the next save; None until a step has been measured."""
        self._started_step = self._measured_step = 0
        """The step at the start or the last rollback, and the step from which time is measured."""
        self._measured_at: float | None = None
        """The time of that step; None until the first step, which includes compilation, is over."""
        self._save_began_at = 0.0
        self._saves = 0
        self._costs: deque[float] = deque(maxlen=MAX_COSTS)
        self._reported: int | None = None

    def restart(self, step: int) -> None:
        """Continue from the state after this step."""
        self._started_step = self._measured_step = step
        self._measured_at = self._clock() if self._saves else None
        self._next_save = step + self.interval if self.interval else None

    def meets_after(self, step: int) -> bool:
        """Return True after 1, 2, 4, 8, … steps, until the first save."""
        steps = step - self._started_step
        return not self._saves and steps > 0 and steps & (steps - 1) == 0

    def meet(self, step: int) -> None:
        """Choose the step of the first save from the time of the steps so far."""
        now = self._clock()
        if self._measured_at is None:
            self._measured_step, self._measured_at = step, now
            return
        steps = step - self._measured_step
        step_seconds, lifetime = self._exchange((now - self._measured_at) / steps)
        remaining = _first_save_seconds(lifetime) - step_seconds * steps
        self._next_save = step + max(0, int(remaining / step_seconds))

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after this step."""
        due = self._next_save is not None and step >= self._next_save
        return due or super().saves_after(step)

    def begin_save(self) -> None:
        """Measure the cost of a save from now on."""
        self._save_began_at = self._clock()

    def end_save(self, step: int, waited: float, write_seconds: float) -> None:
        """Choose the step of the next save."""
        now, steps = self._clock(), step - self._measured_step
        if self._measured_at is not None and steps > 0:
            step_seconds, lifetime, cost, write_seconds = self._exchange(
                (self._save_began_at - self._measured_at) / steps,
                # To wait for the previous checkpoint is the price of too short an interval.
                now - self._save_began_at - waited,
                write_seconds,
            )
            self._saves += 1
            self._set_interval(step_seconds, lifetime, cost, write_seconds)
            self._next_save = step + (self.interval or 1)
        self._measured_step, self._measured_at = step, self._clock()

    def _exchange(self, step_seconds: float, *others: float) -> list[float]:
        """Return values on which all hosts agree: of the step, the lifetime, and the others."""
        step_seconds, negative_lifetime, *rest = self._agree(
            [step_seconds, -self._lifetime, *others]
        )
        return [max(step_seconds, 1e-9), -negative_lifetime, *rest]

    def _set_interval(
        self, step_seconds: float, lifetime: float, cost: float, write_seconds: float
    ) -> None:
        if self._saves == 1:
            # The first save of an attempt includes compilation, so its cost is too high.
            seconds = min(best_interval(cost, lifetime), _first_save_seconds(lifetime))
            self.interval = max(1, int(seconds / step_seconds))
            return
        self._costs.append(cost)
        cost = median(self._costs)
        best = best_interval(cost, lifetime)
        seconds = min(max(best, write_seconds), LONGEST_SECONDS)
        interval = self.interval = max(1, int(seconds / step_seconds))
        if self._reported and abs(interval - self._reported) <= REPORTED_CHANGE * self._reported:
            return
        self._reported = interval
        steps = "step" if interval == 1 else f"{interval:,} steps"
        live = "live" if self._lifetime_is_known else "are assumed to live"
        reason = (
            f"a save holds up training for {_format_seconds(cost)}, slices {live} "
            f"{_format_seconds(lifetime)}"
        )
        if write_seconds > best:
            reason = f"writing a checkpoint takes {_format_seconds(write_seconds)}"
        self._log(f"saving every {steps} ({_format_seconds(interval * step_seconds)}): {reason}")


def make_schedule(settings: Settings, log: Callable[[str], None]) -> SaveSchedule:
    """Return the schedule of a run that saves with these settings."""
    if settings.save_every == "auto":
        return AutoSchedule(read_slice_lifetime(), settings.keep_every, log)
    return SaveSchedule(settings.save_every)


def _first_save_seconds(lifetime: float) -> float:
    return min(FIRST_SAVE_SECONDS, FIRST_SAVE_SHARE * lifetime)


def _format_seconds(seconds: float) -> str:
    """Format a duration: `0.021 s`, `2.1 s`, `45 s`, `12 min`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours = f"{minutes // 60} h"
    if minutes < 90:
        return f"{minutes} min"
    return f"{hours} {minutes % 60} min" if minutes % 60 else hours
