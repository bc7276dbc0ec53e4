"""Where a job may ask now: which zones back off after a shortage, and what waits there already."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from drumline.jobs.core.state import Choice, Job, PlacementPhase, Zone
from drumline.jobs.core.zone_backoff import ZoneBackoff

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
