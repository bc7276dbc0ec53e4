"""The zones that are open for requests now. Times come in as arguments or from a given clock.

A zone without capacity gets a backoff, which doubles with each shortage (multiplicative increase)
and shrinks in steps as requests are filled there (additive decrease). A preemption closes no zone,
because a zone that preempts slices also grants them, and closing it would make capacity oscillate.
A zone that refuses requests or preempts slices soon is asked after the others (`zone_history`).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drumline.chips import slice_of
from drumline.jobs.core.state import Candidate, Job, PlacementRole, ZoneStatus
from drumline.jobs.core.zone_history import (
    EARLY_LOSS,
    MAX_EVENTS,
    USUAL_LIFETIME,
    ZoneEvent,
    ZoneEventType,
    ZoneSummary,
    mean_lifetime,
    summarize,
)
from drumline.observed import FaultType

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
Events = Mapping[Candidate, Sequence[ZoneEvent]]


@dataclass
class _Backoff:
    seconds: float = 0.0
    until: float = 0.0
    reason: str = ""
    words: str = ""
    fault: FaultType = FaultType.STOCKOUT


@dataclass
class ZoneBackoff:
    """The backoff of each zone and accelerator."""

    scale: float = 1.0
    """Factor on each backoff. The emulator uses a small one."""
    _backoffs: dict[Candidate, _Backoff] = field(default_factory=dict)

    def record_shortage(
        self,
        candidate: Candidate,
        reason: str,
        now: float,
        words: str = "",
        fault: FaultType = FaultType.STOCKOUT,
    ) -> bool:
        """Increase the backoff after a request that was not filled.

        Return False if the zone was closed already: requests that fail together count once.
        """
        backoff = self._backoffs.setdefault(candidate, _Backoff())
        first = now >= backoff.until
        if first:
            backoff.seconds = min(backoff.seconds * 2 or FIRST_BACKOFF, LONGEST_BACKOFF)
        backoff.until = now + backoff.seconds * self.scale
        backoff.reason, backoff.words, backoff.fault = reason, words, fault
        return first

    def record_grant(self, candidate: Candidate) -> None:
        """Decrease the backoff after a request that was filled."""
        backoff = self._backoffs.get(candidate)
        if backoff is None:
            return
        backoff.seconds -= RECOVERY
        backoff.until = 0.0
        if backoff.seconds <= 0:
            del self._backoffs[candidate]

    def status(
        self, candidate: Candidate, pending: int, now: float, *, reliable: bool = True
    ) -> ZoneStatus:
        """Return the status of a zone in which `pending` requests of this database wait."""
        backoff = self._backoffs.get(candidate)
        if backoff is not None and now < backoff.until:
            return ZoneStatus(open=False, reason=backoff.reason, words=backoff.words)
        smaller = self._short_smaller_slice(candidate, now)
        if smaller is not None:
            reason = f"no capacity in {candidate.zone}, not even for {smaller}"
            return ZoneStatus(open=False, reason=reason)
        if pending >= PENDING_LIMIT:
            reason = f"behind {pending} requests for {candidate.accelerator} in {candidate.zone}"
            return ZoneStatus(open=False, reason=reason, crowded=True)
        return ZoneStatus(crowded=pending >= CROWDED, reliable=reliable)

    def _short_smaller_slice(self, candidate: Candidate, now: float) -> str | None:
        """Return a smaller accelerator that the zone is out of: it is out of larger ones, too."""
        own = slice_of(candidate.accelerator)
        for other, backoff in self._backoffs.items():
            out = backoff.fault is FaultType.STOCKOUT and now < backoff.until
            if other.zone != candidate.zone or not out:
                continue
            smaller = slice_of(other.accelerator)
            if smaller.generation == own.generation and smaller.chips < own.chips:
                return other.accelerator
        return None


class Availability:
    """The zones in one round of the supervisor, and what was seen of them before."""

    def __init__(
        self,
        scale: float,
        clock: Callable[[], float],
        events: Events,
        on_event: Callable[[Candidate, ZoneEvent], None],
    ) -> None:
        """Continue with the `events` of earlier servers. `on_event` saves a new one.

        `scale` is a factor on each backoff, on the time in which a loss is early, and on the usual
        lifetime of slices.
        """
        self._backoff = ZoneBackoff(scale=scale)
        self._early_loss, self._usual_lifetime = EARLY_LOSS * scale, USUAL_LIFETIME * scale
        self._clock = clock
        self._on_event = on_event
        self._events = {
            candidate: deque(newest, maxlen=MAX_EVENTS) for candidate, newest in events.items()
        }
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
            if placement.role is PlacementRole.REQUESTED
        )
        self._zones.clear()

    def zones(self, candidates: tuple[Candidate, ...]) -> Zones:
        """Return the status of a job's zones. Jobs with the same candidates share the result."""
        zones = self._zones.get(candidates)
        if zones is None:
            now = self._clock()
            zones = {
                candidate: self._backoff.status(
                    candidate,
                    self._pending[candidate],
                    now,
                    reliable=self.summary(candidate).reliable,
                )
                for candidate in candidates
            }
            # An equal result is the same object, so that comparing two of them is quick.
            if (last := self._last_zones.get(candidates)) == zones and last is not None:
                zones = last
            self._zones[candidates] = self._last_zones[candidates] = zones
        return zones

    def summary(self, candidate: Candidate) -> ZoneSummary:
        """Return what was seen of a zone and accelerator."""
        events = self._events.get(candidate, ())
        return summarize([*events], self._clock(), self._early_loss)

    def mean_lifetime(self, candidate: Candidate) -> float | None:
        """Return the mean lifetime of slices of a zone and accelerator; None without a loss."""
        return mean_lifetime(self._events.get(candidate, ()), self._usual_lifetime)

    def record_request(self, candidate: Candidate) -> None:
        """Count one more waiting request."""
        self._pending[candidate] += 1
        self._zones.clear()

    def record_shortage(
        self,
        candidate: Candidate,
        reason: str,
        words: str = "",
        fault: FaultType = FaultType.STOCKOUT,
        waited: float = 0.0,
    ) -> None:
        """Increase the backoff after a request that was not filled in `waited` seconds."""
        first = self._backoff.record_shortage(candidate, reason, self._clock(), words, fault)
        if first and fault is FaultType.STOCKOUT:
            self._record(candidate, ZoneEventType.REFUSED, waited)
        self._zones.clear()

    def record_grant(self, candidate: Candidate, waited: float) -> None:
        """Decrease the backoff after a request that was filled in `waited` seconds."""
        self._backoff.record_grant(candidate)
        self._record(candidate, ZoneEventType.GRANTED, waited)

    def record_loss(self, candidate: Candidate, lived: float) -> None:
        """Record that a slice was lost `lived` seconds after it was ready."""
        self._record(candidate, ZoneEventType.LOST, lived)

    def _record(self, candidate: Candidate, kind: ZoneEventType, seconds: float) -> None:
        event = ZoneEvent(self._clock(), kind, round(max(0.0, seconds), 1))
        self._events.setdefault(candidate, deque(maxlen=MAX_EVENTS)).append(event)
        self._on_event(candidate, event)
