"""Which zones are worth asking now. Pure: times come in as arguments.

A zone without capacity is left alone for a while, longer each time (multiplicative increase), and
comes back in steps (additive decrease) as requests are filled there. A preemption closes nothing:
a zone that preempts slices also grants them, and closing it would make capacity oscillate.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from drumline.jobs.core.state import Choice, Job, PlacementPhase, Zone

FIRST_BACKOFF = 30.0
"""Seconds that a zone is left alone after its first shortage."""
LONGEST_BACKOFF = 900.0
"""The most seconds: a zone that was empty all day is still asked four times an hour."""
RECOVERY = 60.0
"""Seconds taken off the backoff for each request that was filled."""
PENDING_LIMIT = 8
"""The most requests that wait in one zone for one kind of slice. The cloud fills them one by one; a
longer queue there gains nothing and costs quota and calls, so the other jobs wait here."""


@dataclass
class _Backoff:
    seconds: float = 0.0
    until: float = 0.0
    why: str = ""


@dataclass
class ZoneBackoff:
    """The backoff of each zone and kind of slice."""

    scale: float = 1.0
    """Factor on each backoff: the emulator's time runs faster."""
    _backoffs: dict[Choice, _Backoff] = field(default_factory=dict)

    def short(self, choice: Choice, why: str, now: float) -> None:
        """A request there was not filled."""
        backoff = self._backoffs.setdefault(choice, _Backoff())
        if now >= backoff.until:
            longer = backoff.seconds * 2 or FIRST_BACKOFF
            backoff.seconds = min(longer, LONGEST_BACKOFF)
        backoff.until = now + backoff.seconds * self.scale
        backoff.why = why

    def filled(self, choice: Choice) -> None:
        """A request there was filled."""
        backoff = self._backoffs.get(choice)
        if backoff is None:
            return
        backoff.seconds -= RECOVERY
        backoff.until = 0.0
        if backoff.seconds <= 0:
            del self._backoffs[choice]

    def zone(self, choice: Choice, pending: int, now: float) -> Zone:
        """Whether to ask there now, while `pending` requests of ours wait there already."""
        backoff = self._backoffs.get(choice)
        if backoff is not None and now < backoff.until:
            return Zone(open=False, why=backoff.why)
        if pending >= PENDING_LIMIT:
            return Zone(
                open=False,
                why=f"behind {pending} requests for {choice.accelerator} in {choice.zone}",
            )
        return Zone()


Zones = Mapping[Choice, Zone]


class Availability:
    """The zones as they are in one round of the loop."""

    def __init__(self, scale: float, clock: Callable[[], float]) -> None:
        """`scale` is a factor on each backoff."""
        self._book = ZoneBackoff(scale=scale)
        self._clock = clock
        self._pending: Counter[Choice] = Counter()
        """The number of our requests that wait in the cloud."""
        self._known: dict[tuple[Choice, ...], Zones] = {}
        self._before: dict[tuple[Choice, ...], Zones] = {}

    def begin_round(self, jobs: Iterable[Job]) -> None:
        """Count the waiting requests again."""
        self._pending = Counter(
            Choice(job.placement.accelerator, job.placement.zone)
            for job in jobs
            if job.placement
            and job.placement.phase in {PlacementPhase.ASKING, PlacementPhase.QUEUED}
        )
        self._known.clear()

    def zones(self, choices: tuple[Choice, ...]) -> Zones:
        """Where a job may ask now; jobs with the same choices share the answer until one asks."""
        found = self._known.get(choices)
        if found is None:
            now = self._clock()
            found = {
                choice: self._book.zone(choice, self._pending[choice], now) for choice in choices
            }
            before = self._before.get(choices)
            # The same object for the same answer, so that comparing two answers is quick.
            found = before if before is not None and before == found else found
            self._known[choices] = self._before[choices] = found
        return found

    def requested(self, choice: Choice) -> None:
        """One more request waits there."""
        self._pending[choice] += 1
        self._known.clear()

    def short(self, choice: Choice, why: str) -> None:
        """A request there was not filled."""
        self._book.short(choice, why, self._clock())
        self._known.clear()

    def filled(self, choice: Choice) -> None:
        """A request there was filled."""
        self._book.filled(choice)
