"""Which zones are polled, and what becomes of the slices found: ours, to be deleted, or strays."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial

from drumline.jobs.controller.actions import Actions
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.slices.releases import Releases
from drumline.jobs.controller.slices.strays import Strays
from drumline.jobs.core.state import Placement
from drumline.jobs.store.records import Store

SWEEP_SECONDS = 300.0
"""Seconds between polls of zones where we should have nothing: a forgotten slice costs money."""


class ZoneWatch:
    """Polls zones where we have something at the usual interval, and all others now and then."""

    def __init__(
        self,
        store: Store,
        polls: ZonePolls,
        releases: Releases,
        strays: Strays,
        *,
        zones: Collection[str],
        held: Callable[[], Iterable[Placement]],
        clock: Callable[[], float],
    ) -> None:
        """`zones` are those the user named; `held` returns what jobs hold or wait for now."""
        self._store = store
        self._polls = polls
        self._releases = releases
        self._strays = strays
        self._named = zones
        self._held = held
        self._clock = clock
        self._swept_at = float("-inf")

    def start_polls(self, actions: Actions) -> None:
        """Start every poll that is due."""
        now = self._clock()
        zones = {held.zone for held in self._held()} | {row.zone for row in self._releases.rows}
        if now - self._swept_at > SWEEP_SECONDS:
            zones |= self._everywhere()
            self._swept_at = now
        for zone in self._polls.due(zones):
            actions.start(f"look {zone}", partial(self._poll, zone))

    async def poll_everywhere(self) -> None:
        """Poll every zone where a slice of ours may be, now."""
        await asyncio.gather(*(self._poll(zone) for zone in self._everywhere()))

    def known(self) -> set[str]:
        """The names of slices that a job holds or that are to be deleted."""
        held = {placement.name for placement in self._held()}
        return held | {row.name for row in self._store.releasing()}

    def _everywhere(self) -> set[str]:
        """The zones where a slice of ours may be."""
        return set(self._named) | self._store.zones_used() | self._strays.zones

    async def _poll(self, zone: str) -> None:
        expected = self._held_in(zone) | {r.name for r in self._releases.rows if r.zone == zone}
        poll = await self._polls.poll(zone, expected)
        if poll is not None:
            self._strays.see(poll)
            held = self._held_in(zone) | self._store.held_aside() | self._strays.names()
            self._releases.take_in_strays(poll, held)

    def _held_in(self, zone: str) -> set[str]:
        return {placement.name for placement in self._held() if placement.zone == zone}
