"""Looking at zones: two list calls each, whatever the number of jobs, at intervals or sooner.

A look that fails changes nothing but `trouble`, which says why what is known grows old, and the
next one is made later each time. A slice that a listing leaves out is asked for by its name before
anyone believes that it is gone: listings lag, and their pages shift while others delete.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.core.state import Placement, Sighting
from drumline.observed.placements import ListedPlacement

QUICKEST = 0.2
"""Of the interval: news from a host brings the next look forward, but not nearer than this."""
SLOWEST = 6.0
"""Intervals between two polls of a zone that fail, at the most."""
CONFIRMATIONS = 20
"""Slices asked for by name in one look: where a listing lost hundreds, the next look goes on."""


@dataclass(frozen=True)
class ZonePoll:
    """One successful look at a zone."""

    zone: str
    at: float
    """When it began."""
    placements: dict[str, ListedPlacement]
    """By name."""
    unsure: frozenset[str] = frozenset()
    """Those that the listing left out and that could not be asked for by name."""

    def is_gone(self, name: str) -> bool:
        """Whether the cloud has nothing under this name, and said so twice."""
        return name not in self.placements and name not in self.unsure


@dataclass
class ZonePolls:
    """The newest look at each zone, and when the next is due."""

    cloud: Cloud
    interval: float
    clock: Callable[[], float]
    trouble: dict[str, str] = field(default_factory=dict)
    """Zone → why the last look at it failed."""
    _newest: dict[str, ZonePoll] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    """Zone → when the last look at it began, whether it succeeded or not."""
    _failures: dict[str, int] = field(default_factory=dict)
    """Zone → polls in a row that failed."""
    _due: dict[str, float] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)
    """Slice → when the cloud took the request for it."""

    def due(self, zones: set[str]) -> list[str]:
        """Which of these to look at now; they are then not due for another interval."""
        now = self.clock()
        found = [zone for zone in zones if now >= self._due.get(zone, 0.0)]
        self._due.update({zone: now + self._pause(zone) for zone in found})
        self._began.update(dict.fromkeys(found, now))
        return found

    def _pause(self, zone: str) -> float:
        return self.interval * min(SLOWEST, 2.0 ** self._failures.get(zone, 0))

    def next_due(self) -> float:
        """Seconds until the next look, an interval at most."""
        now = self.clock()
        return min([self.interval, *(at - now for at in self._due.values() if at > now)])

    def soon(self, zone: str) -> None:
        """Something happened there: bring the next look forward."""
        pause = QUICKEST * self.interval if zone not in self._failures else self._pause(zone)
        soonest = self._began.get(zone, 0.0) + pause
        self._due[zone] = min(self._due.get(zone, 0.0), soonest)

    async def look(self, zone: str, expected: Collection[str] = ()) -> ZonePoll | None:
        """Look at a zone; None where that failed. `expected` are slices that should be there."""
        began = self.clock()
        expected = [name for name in expected if self._asked.get(name, 0.0) < began]
        try:
            listed = {found.name: found for found in await self.cloud.placements(zone)}
        except CloudError as error:
            self.trouble[zone] = self.cloud.explain(error, zone).said
            self._failures[zone] = self._failures.get(zone, 0) + 1
            self._due[zone] = max(self._due.get(zone, 0.0), began + self._pause(zone))
            return None
        missing = [name for name in expected if name not in listed]
        unsure = frozenset(missing[CONFIRMATIONS:])
        for name in missing[:CONFIRMATIONS]:
            try:
                found = await self.cloud.find(zone, name)
            except CloudError:
                unsure |= {name}
                continue
            if found is not None:
                listed[name] = found
        self.trouble.pop(zone, None)
        self._failures.pop(zone, None)
        look, known = ZonePoll(zone, began, listed, unsure), self._newest.get(zone)
        # Where two were under way, the one that began last knows most, whichever ends last.
        if known is None or known.at <= began:
            self._newest[zone] = look
        return look

    def newest(self, zone: str) -> ZonePoll | None:
        """The newest successful look at a zone."""
        return self._newest.get(zone)

    def listed(self, held: Placement) -> ListedPlacement | None:
        """A placement as last seen, None where it was not."""
        poll = self._newest.get(held.zone)
        return poll.placements.get(held.name) if poll else None

    def asked_for(self, held: Placement) -> None:
        """The cloud has taken the request for a slice: polls from now on know of it."""
        self._asked[held.name] = self.clock()
        self.soon(held.zone)

    def forget(self, name: str) -> None:
        """The slice of that name is gone."""
        self._asked.pop(name, None)

    def of(self, held: Placement) -> Sighting | None:
        """What the newest look says of a slice; None where it cannot say anything.

        A listing that began before the slice was asked for cannot know of it, and would call it
        gone; nor does one that left it out for reasons unknown.
        """
        look = self._newest.get(held.zone)
        if look is None or look.at <= self._asked.get(held.name, 0.0) or held.name in look.unsure:
            return None
        return Sighting(look.at, look.placements.get(held.name))
