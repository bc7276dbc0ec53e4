"""Polling zones: two list calls each, whatever the number of jobs, at intervals or sooner.

A poll that fails only sets `trouble`, which says why what is known grows old, and the next poll
backs off. A slice that a listing leaves out is looked up by its name before it counts as gone:
listings lag, and their pages shift while others delete.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.core.state import Placement, Sighting
from drumline.observed import ListedPlacement

QUICKEST = 0.2
"""The smallest part of the interval to which news from a host brings the next poll forward."""
SLOWEST = 6.0
"""The most intervals between two polls of a zone that fail."""
CONFIRMATIONS = 20
"""Slices looked up by name in one poll: where a listing lost hundreds, the next poll goes on."""


@dataclass(frozen=True)
class ZonePoll:
    """A successful poll of a zone."""

    zone: str
    at: float
    """When the poll began."""
    placements: dict[str, ListedPlacement]
    """What exists in the zone, by name."""
    unsure: frozenset[str] = frozenset()
    """Names that the listing left out and that could not be looked up."""

    def is_gone(self, name: str) -> bool:
        """Whether the cloud has nothing under this name, by the listing and by a lookup."""
        return name not in self.placements and name not in self.unsure


@dataclass
class ZonePolls:
    """The newest poll of each zone, and when the next is due."""

    cloud: Cloud
    interval: float
    clock: Callable[[], float]
    trouble: dict[str, str] = field(default_factory=dict)
    """Why the last poll failed, by zone."""
    _newest: dict[str, ZonePoll] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    """When the last poll began, successful or not, by zone."""
    _failures: dict[str, int] = field(default_factory=dict)
    """How many polls in a row failed, by zone."""
    _due: dict[str, float] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)
    """When the cloud accepted the request, by slice."""

    def due(self, zones: set[str]) -> list[str]:
        """Which of these to poll now; they are then not due for another interval."""
        now = self.clock()
        found = [zone for zone in zones if now >= self._due.get(zone, 0.0)]
        self._due.update({zone: now + self._pause(zone) for zone in found})
        self._began.update(dict.fromkeys(found, now))
        return found

    def _pause(self, zone: str) -> float:
        return self.interval * min(SLOWEST, 2.0 ** self._failures.get(zone, 0))

    def next_due(self) -> float:
        """Seconds until the next poll, an interval at most."""
        now = self.clock()
        return min([self.interval, *(at - now for at in self._due.values() if at > now)])

    def soon(self, zone: str) -> None:
        """Bring the next poll forward, because something happened in that zone."""
        pause = QUICKEST * self.interval if zone not in self._failures else self._pause(zone)
        soonest = self._began.get(zone, 0.0) + pause
        self._due[zone] = min(self._due.get(zone, 0.0), soonest)

    async def poll(self, zone: str, expected: Collection[str] = ()) -> ZonePoll | None:
        """Poll a zone; None where that failed. `expected` are slices that should be there."""
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
        poll, known = ZonePoll(zone, began, listed, unsure), self._newest.get(zone)
        # Of two polls under way at once, the one that began last is newer, whichever ends last.
        if known is None or known.at <= began:
            self._newest[zone] = poll
        return poll

    def newest(self, zone: str) -> ZonePoll | None:
        """The newest successful poll of a zone."""
        return self._newest.get(zone)

    def listed(self, held: Placement) -> ListedPlacement | None:
        """A placement as last listed, None where it was not."""
        poll = self._newest.get(held.zone)
        return poll.placements.get(held.name) if poll else None

    def asked_for(self, held: Placement) -> None:
        """Note that the cloud accepted the request for a slice: polls from now on show it."""
        self._asked[held.name] = self.clock()
        self.soon(held.zone)

    def forget(self, name: str) -> None:
        """Forget the slice of that name, which is gone."""
        self._asked.pop(name, None)

    def of(self, held: Placement) -> Sighting | None:
        """What the newest poll says about a slice; None where it says nothing.

        A poll that began before the slice was requested would call it gone. A poll that is unsure
        about the slice says nothing either.
        """
        poll = self._newest.get(held.zone)
        if poll is None or poll.at <= self._asked.get(held.name, 0.0) or held.name in poll.unsure:
            return None
        return Sighting(poll.at, poll.placements.get(held.name))
