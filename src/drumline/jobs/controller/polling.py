"""Polls of zones: two list calls for each, whatever the number of jobs, at intervals or sooner.

A poll that fails only sets `errors`, which explains why the last observations grow old, and the
next poll backs off. A slice that a listing leaves out is looked up by name before it counts as
gone, because listings lag, and their pages shift while others delete resources.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.core.state import Placement, PlacementObservation
from drumline.observed import ListedPlacement

SHORTEST_PAUSE = 0.2
"""The shortest pause between two polls when a host reports news, as a part of the interval."""
LONGEST_BACKOFF = 6.0
"""The longest pause between two polls of a zone that fail, in intervals."""
LOOKUP_LIMIT = 20
"""The most lookups by name in one poll. If a listing lost hundreds, the next poll continues."""


@dataclass(frozen=True)
class ZonePoll:
    """A successful poll of a zone."""

    zone: str
    at: float
    """The time when the poll began."""
    placements: dict[str, ListedPlacement]
    """The placements that exist in the zone, by name."""
    unknown: frozenset[str] = frozenset()
    """Names that the listing left out and that could not be looked up."""

    def is_gone(self, name: str) -> bool:
        """Return True if neither the listing nor a lookup has this name."""
        return name not in self.placements and name not in self.unknown


@dataclass
class ZonePolls:
    """The newest poll of each zone, and the times of the next polls."""

    cloud: Cloud
    interval: float
    clock: Callable[[], float]
    errors: dict[str, str] = field(default_factory=dict)
    """The reason why the last poll failed, by zone."""
    _newest: dict[str, ZonePoll] = field(default_factory=dict)
    _began_at: dict[str, float] = field(default_factory=dict)
    """The time when the last poll began, successful or not, by zone."""
    _failures: dict[str, int] = field(default_factory=dict)
    """The number of consecutive polls that failed, by zone."""
    _due_at: dict[str, float] = field(default_factory=dict)
    _accepted_at: dict[str, float] = field(default_factory=dict)
    """The time when the cloud accepted the request, by placement."""

    def take_due(self, zones: set[str]) -> list[str]:
        """Return the zones to poll now. They are not due again for another interval."""
        now = self.clock()
        due = [zone for zone in zones if now >= self._due_at.get(zone, 0.0)]
        self._due_at.update({zone: now + self._pause(zone) for zone in due})
        self._began_at.update(dict.fromkeys(due, now))
        return due

    def _pause(self, zone: str) -> float:
        return self.interval * min(LONGEST_BACKOFF, 2.0 ** self._failures.get(zone, 0))

    def next_due(self) -> float:
        """Return the seconds until the next poll, at most one interval."""
        now = self.clock()
        return min([self.interval, *(at - now for at in self._due_at.values() if at > now)])

    def poll_soon(self, zone: str) -> None:
        """Bring the next poll of a zone forward, because something changed there."""
        failing = zone in self._failures
        pause = self._pause(zone) if failing else SHORTEST_PAUSE * self.interval
        earliest = self._began_at.get(zone, 0.0) + pause
        self._due_at[zone] = min(self._due_at.get(zone, 0.0), earliest)

    async def poll(self, zone: str, expected: Collection[str] = ()) -> ZonePoll | None:
        """Poll a zone, in which the `expected` placements should be; None if that failed."""
        began_at = self.clock()
        expected = [name for name in expected if self._accepted_at.get(name, 0.0) < began_at]
        try:
            placements = {listed.name: listed for listed in await self.cloud.placements(zone)}
        except CloudError as error:
            self.errors[zone] = self.cloud.explain(error, zone).text
            self._failures[zone] = self._failures.get(zone, 0) + 1
            self._due_at[zone] = max(self._due_at.get(zone, 0.0), began_at + self._pause(zone))
            return None
        missing = [name for name in expected if name not in placements]
        unknown = frozenset(missing[LOOKUP_LIMIT:])
        for name in missing[:LOOKUP_LIMIT]:
            try:
                listed = await self.cloud.find(zone, name)
            except CloudError:
                unknown |= {name}
                continue
            if listed is not None:
                placements[name] = listed
        self.errors.pop(zone, None)
        self._failures.pop(zone, None)
        poll, newest = ZonePoll(zone, began_at, placements, unknown), self._newest.get(zone)
        # Of two concurrent polls, the one that began last is newer, whichever ends last.
        if newest is None or newest.at <= began_at:
            self._newest[zone] = poll
        return poll

    def newest(self, zone: str) -> ZonePoll | None:
        """Return the newest successful poll of a zone."""
        return self._newest.get(zone)

    def listed(self, placement: Placement) -> ListedPlacement | None:
        """Return a placement as last listed; None if it was not."""
        poll = self._newest.get(placement.zone)
        return poll.placements.get(placement.name) if poll else None

    def request_accepted(self, placement: Placement) -> None:
        """Record that the cloud accepted a request. Polls that begin from now on show it."""
        self._accepted_at[placement.name] = self.clock()
        self.poll_soon(placement.zone)

    def forget(self, name: str) -> None:
        """Forget a placement that is gone."""
        self._accepted_at.pop(name, None)

    def observation(self, placement: Placement) -> PlacementObservation | None:
        """Return a placement as the newest poll shows it; None if the poll is not conclusive.

        A poll that began before the request would report the placement as gone. In other polls the
        lookup of the placement failed.
        """
        poll, name = self._newest.get(placement.zone), placement.name
        if poll is None or poll.at <= self._accepted_at.get(name, 0.0) or name in poll.unknown:
            return None
        return PlacementObservation(poll.at, poll.placements.get(name))
