"""The zones that are open for requests now. Times come in as arguments or from a given clock.

A zone without capacity gets a backoff, which doubles with each shortage (multiplicative increase)
and shrinks in steps as requests are filled there (additive decrease). A preemption closes no zone,
because a zone that preempts slices also grants them, and closing it would make capacity oscillate.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from drumline.jobs.core.state import Candidate, Job, Role, ZoneStatus

FIRST_BACKOFF = 30.0
"""Seconds without requests after the first shortage of a zone."""
LONGEST_BACKOFF = 900.0
"""The longest backoff in seconds. A zone that is empty all day still gets four requests an hour."""
RECOVERY = 60.0
"""Seconds subtracted from the backoff for each request that was filled."""
PENDING_LIMIT = 8
"""The most requests that wait in one zone for one accelerator. The cloud fills them one by one. A
longer queue gains nothing and costs quota and calls, so the other jobs wait here."""
CROWDED = PENDING_LIMIT // 2
"""The number of waiting requests from which only jobs without any other request ask in a zone, so
that nobody waits behind the second and third requests of others."""

Zones = Mapping[Candidate, ZoneStatus]


@dataclass
class _Backoff:
    seconds: float = 0.0
    until: float = 0.0
    reason: str = ""
    words: str = ""


@dataclass
class ZoneBackoff:
    """The backoff of each zone and accelerator."""

    scale: float = 1.0
    """Factor on each backoff. The emulator uses a small one."""
    _backoffs: dict[Candidate, _Backoff] = field(default_factory=dict)

    def record_shortage(
        self, candidate: Candidate, reason: str, now: float, words: str = ""
    ) -> None:
        """Increase the backoff after a request that was not filled."""
        backoff = self._backoffs.setdefault(candidate, _Backoff())
        if now >= backoff.until:
            backoff.seconds = min(backoff.seconds * 2 or FIRST_BACKOFF, LONGEST_BACKOFF)
        backoff.until = now + backoff.seconds * self.scale
        backoff.reason, backoff.words = reason, words

    def record_grant(self, candidate: Candidate) -> None:
        """Decrease the backoff after a request that was filled."""
        backoff = self._backoffs.get(candidate)
        if backoff is None:
            return
        backoff.seconds -= RECOVERY
        backoff.until = 0.0
        if backoff.seconds <= 0:
            del self._backoffs[candidate]

    def status(self, candidate: Candidate, pending: int, now: float) -> ZoneStatus:
        """Return the status of a zone in which `pending` requests of this database wait."""
        backoff = self._backoffs.get(candidate)
        if backoff is not None and now < backoff.until:
            return ZoneStatus(open=False, reason=backoff.reason, words=backoff.words)
        if pending >= PENDING_LIMIT:
            return ZoneStatus(
                open=False,
                reason=f"behind {pending} requests for {candidate.accelerator} in {candidate.zone}",
            )
        return ZoneStatus(crowded=pending >= CROWDED)


class Availability:
    """The zones in one round of the supervisor."""

    def __init__(self, scale: float, clock: Callable[[], float]) -> None:
        """`scale` is a factor on each backoff."""
        self._backoff = ZoneBackoff(scale=scale)
        self._clock = clock
        self._pending: Counter[Candidate] = Counter()
        """The number of requests that wait in the cloud."""
        self._zones: dict[tuple[Candidate, ...], Zones] = {}
        self._last_zones: dict[tuple[Candidate, ...], Zones] = {}

    def begin_round(self, jobs: Iterable[Job]) -> None:
        """Count the waiting requests again."""
        self._pending = Counter(
            placement.candidate
            for job in jobs
            for placement in job.placements
            if placement.role is Role.REQUESTED
        )
        self._zones.clear()

    def zones(self, candidates: tuple[Candidate, ...]) -> Zones:
        """Return the status of a job's zones. Jobs with the same candidates share the result."""
        zones = self._zones.get(candidates)
        if zones is None:
            now = self._clock()
            zones = {
                candidate: self._backoff.status(candidate, self._pending[candidate], now)
                for candidate in candidates
            }
            # An equal result is the same object, so that comparing two of them is quick.
            if (last := self._last_zones.get(candidates)) == zones and last is not None:
                zones = last
            self._zones[candidates] = self._last_zones[candidates] = zones
        return zones

    def record_request(self, candidate: Candidate) -> None:
        """Count one more waiting request."""
        self._pending[candidate] += 1
        self._zones.clear()

    def record_shortage(self, candidate: Candidate, reason: str, words: str = "") -> None:
        """Increase the backoff after a request that was not filled."""
        self._backoff.record_shortage(candidate, reason, self._clock(), words)
        self._zones.clear()

    def record_grant(self, candidate: Candidate) -> None:
        """Decrease the backoff after a request that was filled."""
        self._backoff.record_grant(candidate)
