"""Looking at zones: two list calls each, whatever the number of jobs, at intervals or sooner.

A look that fails changes nothing but `trouble`, which says why what is known grows old.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from drumline.cloud.protocol import Cloud, CloudError, Node, Request
from drumline.jobs.faults import classify, explain
from drumline.jobs.state import Look, Slice

QUICKEST = 0.2
"""Of the interval: news from a host brings the next look forward, but not nearer than this."""


@dataclass(frozen=True)
class ZoneLook:
    """One successful look at a zone."""

    zone: str
    at: float
    """When it began."""
    requests: dict[str, Request]
    nodes: dict[str, Node]

    def everything(self) -> dict[str, Request | Node]:
        """By name; where a request has its node, the node."""
        return {**self.requests, **self.nodes}


@dataclass
class Looks:
    """The newest look at each zone, and when the next is due."""

    cloud: Cloud
    interval: float
    clock: Callable[[], float]
    trouble: dict[str, str] = field(default_factory=dict)
    """Zone → why the last look at it failed."""
    _newest: dict[str, ZoneLook] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)
    """Slice → when the cloud took the request for it."""

    def due(self, zones: set[str]) -> list[str]:
        """Which of these to look at now; they are then not due for another interval."""
        now = self.clock()
        found = [zone for zone in zones if now >= self._due.get(zone, 0.0)]
        self._due.update(dict.fromkeys(found, now + self.interval))
        return found

    def next_due(self) -> float:
        """Seconds until the next look, an interval at most."""
        now = self.clock()
        return min([self.interval, *(at - now for at in self._due.values() if at > now)])

    def soon(self, zone: str) -> None:
        """Something happened there: bring the next look forward."""
        last = self._newest.get(zone)
        soonest = (last.at if last else 0.0) + QUICKEST * self.interval
        self._due[zone] = min(self._due.get(zone, 0.0), soonest)

    async def look(self, zone: str) -> ZoneLook | None:
        """Look at a zone; None where that failed."""
        began = self.clock()
        try:
            requests, nodes = await asyncio.gather(
                self.cloud.requests(zone), self.cloud.nodes(zone)
            )
        except CloudError as error:
            self.trouble[zone] = explain(classify(error.code, str(error)), zone, str(error))
            return None
        self.trouble.pop(zone, None)
        look = ZoneLook(zone, began, {r.name: r for r in requests}, {n.name: n for n in nodes})
        self._newest[zone] = look
        return look

    def newest(self, zone: str) -> ZoneLook | None:
        """The newest successful look at a zone."""
        return self._newest.get(zone)

    def asked_for(self, held: Slice) -> None:
        """The cloud has taken the request for a slice: looks from now on know of it."""
        self._asked[held.name] = self.clock()
        self.soon(held.zone)

    def forget(self, name: str) -> None:
        """The slice of that name is gone."""
        self._asked.pop(name, None)

    def of(self, held: Slice) -> Look | None:
        """What the newest look says of a slice; None where it began before the slice was asked for.

        A listing that was under way at that time cannot know of it, and would call it gone.
        """
        look = self._newest.get(held.zone)
        if look is None or look.at <= self._asked.get(held.name, 0.0):
            return None
        return Look(look.at, look.requests.get(held.name), look.nodes.get(held.name))
