"""Polls of zones: two list calls for each, whatever the number of jobs, at intervals or sooner.

A poll that fails only sets `errors`, which explains why the last observations grow old, and the
next poll backs off. A slice that a listing leaves out is looked up by name before it counts as
gone, because listings lag, and their pages shift while others delete resources. A slice whose
creation was accepted may never appear: then the operation that creates it has the reason.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.core.state import Placement, PlacementObservation
from drumline.observed import ListedPlacement, Refusal

SHORTEST_PAUSE = 0.2
"""The shortest pause between two polls when a host reports news, as a part of the interval."""
LONGEST_BACKOFF = 6.0
"""The longest pause between two polls of a zone that fail, in intervals."""
LOOKUP_LIMIT = 20
"""The maximum number of lookups by name in one poll. The next poll continues a longer list."""
OPERATION_LIMIT = 2
"""The most create operations read in one poll, which lists the zone with two calls itself."""


@dataclass(frozen=True)
class ZonePoll:
    """A successful poll of a zone."""

    zone: str
    at: float
    """The start of the poll."""
    placements: dict[str, ListedPlacement]
    """The placements that exist in the zone, by name."""
    unknown: frozenset[str] = frozenset()
    """Names that the listing left out and that could not be looked up."""
    creating: frozenset[str] = frozenset()
    """Names that the cloud does not have, because their create operation is in progress."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """The errors of create operations, by the name of the placement that does not exist."""

    def is_gone(self, name: str) -> bool:
        """Return True if neither the listing nor a lookup has this name, nor will have it soon."""
        return not (name in self.placements or name in self.unknown or name in self.creating)


@dataclass(frozen=True)
class _OperationRead:
    """The timestamps of the first and the next read of a create operation."""

    first_at: float
    due_at: float


@dataclass
class ZonePolls:
    """The newest poll of each zone, and the times of the next polls."""

    cloud: Cloud
    interval: float
    clock: Callable[[], float]
    visible: float = 0.0
    """Seconds after the cloud accepted a request in which it may not show it yet."""
    errors: dict[str, str] = field(default_factory=dict)
    """The reason why the last poll failed, by zone."""
    _newest: dict[str, ZonePoll] = field(default_factory=dict)
    _started_at: dict[str, float] = field(default_factory=dict)
    """The start of the last poll, successful or not, by zone."""
    _failures: dict[str, int] = field(default_factory=dict)
    """The number of consecutive polls that failed, by zone."""
    _due_at: dict[str, float] = field(default_factory=dict)
    _accepted_at: dict[str, float] = field(default_factory=dict)
    """The timestamp of the cloud's acceptance of the request, by placement."""
    _operation_reads: dict[str, _OperationRead] = field(default_factory=dict)
    """The reads of create operations, by placement."""
    _maintenance: dict[str, tuple[float, str]] = field(default_factory=dict)
    """The newest poll that listed a maintenance, as timestamp and cloud message, by placement."""
    _requested: set[str] = field(default_factory=set)
    """The zones to poll soon, since polls were last started."""

    def take_due(self, zones: set[str]) -> list[str]:
        """Return the zones to poll now. They are next due after an interval."""
        now = self.clock()
        due = [zone for zone in zones if now >= self._due_at.get(zone, 0.0)]
        self._due_at.update({zone: now + self._pause(zone) for zone in due})
        self._started_at.update(dict.fromkeys(due, now))
        self._requested.clear()
        return due

    def _pause(self, zone: str) -> float:
        return self.interval * min(LONGEST_BACKOFF, 2.0 ** self._failures.get(zone, 0))

    def next_due(self) -> float:
        """Return the seconds until the next poll, at most one interval."""
        now = self.clock()
        # A zone without slices stays due, and is not polled. One that was requested is.
        waits = [
            at - now for zone, at in self._due_at.items() if at > now or zone in self._requested
        ]
        return max(0.0, min([self.interval, *waits]))

    def poll_soon(self, zone: str) -> None:
        """Bring the next poll of a zone forward, because something changed there."""
        failing = zone in self._failures
        pause = self._pause(zone) if failing else SHORTEST_PAUSE * self.interval
        earliest = self._started_at.get(zone, 0.0) + pause
        self._due_at[zone] = min(self._due_at.get(zone, 0.0), earliest)
        self._requested.add(zone)

    async def poll(
        self,
        zone: str,
        expected: Collection[str] = (),
        operations: Mapping[str, str] | None = None,
    ) -> ZonePoll | None:
        """Poll a zone, in which the `expected` placements should be; None if that failed.

        `operations` are the create operations of placements that were not ready yet.
        """
        started_at, operations = self.clock(), operations or {}
        expected = [name for name in expected if self._accepted_at.get(name, 0.0) < started_at]
        try:
            placements = {listed.name: listed for listed in await self.cloud.placements(zone)}
        except CloudError as error:
            self.errors[zone] = self.cloud.explain(error, zone).text
            self._failures[zone] = self._failures.get(zone, 0) + 1
            self._due_at[zone] = max(self._due_at.get(zone, 0.0), started_at + self._pause(zone))
            return None
        missing = [name for name in expected if name not in placements]
        created = {name: operations[name] for name in missing if name in operations}
        unread, creating, refused = await self._read_operations(zone, created)
        unresolved = unread | creating | refused.keys()
        missing = [name for name in missing if name not in unresolved]
        unknown = unread.union(missing[LOOKUP_LIMIT:])
        for name in missing[:LOOKUP_LIMIT]:
            try:
                listed = await self.cloud.find(zone, name)
            except CloudError:
                unknown.add(name)
                continue
            if listed is not None:
                placements[name] = listed
        for name in expected:
            if name in placements and placements[name].maintenance:
                self._maintenance[name] = (started_at, placements[name].maintenance)
        self.errors.pop(zone, None)
        self._failures.pop(zone, None)
        newest = self._newest.get(zone)
        poll = ZonePoll(
            zone, started_at, placements, frozenset(unknown), frozenset(creating), refused
        )
        # Of two concurrent polls, the poll that started last is newer, whichever finishes last.
        if newest is None or newest.at <= started_at:
            self._newest[zone] = poll
        return poll

    async def _read_operations(
        self, zone: str, operations: Mapping[str, str]
    ) -> tuple[set[str], set[str], dict[str, Refusal]]:
        """Read the create operations of placements that a listing left out.

        Return the placements whose operation was not read, those whose operation is in progress,
        and the refusals. An operation that succeeded, or that is unknown, adds no information. Each
        operation is read when its age has doubled since the last read, so that many operations
        cause few calls. A read that fails is repeated in the next poll.
        """
        now, newest = self.clock(), self._newest.get(zone)
        reads = {name: self._operation_reads.get(name) for name in operations}
        due = [name for name, read in reads.items() if read is None or now >= read.due_at]
        due.sort(key=lambda name: read.due_at if (read := reads[name]) else 0.0)
        refused: dict[str, Refusal] = {}
        unread, creating = set(operations), set()
        for name in due[:OPERATION_LIMIT]:
            first_at = read.first_at if (read := reads[name]) else now
            self._operation_reads[name] = _OperationRead(first_at, now)
            try:
                state = await self.cloud.operation(operations[name])
            except CloudError:
                continue
            pause = max(self.interval, now - first_at)
            self._operation_reads[name] = _OperationRead(first_at, now + pause)
            unread.discard(name)
            if state is not None and state.error is not None:
                refused[name] = self.cloud.explain(state.error, zone)
            elif state is not None and not state.done:
                creating.add(name)
        if newest is not None:
            creating |= newest.creating & unread
        return unread - creating, creating, refused

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
        if placement.first_asked_at is None:  # one of many that replace each other can wait
            self.poll_soon(placement.zone)

    def may_appear(self, name: str) -> bool:
        """Return True if the cloud accepted the request so recently that it may not show it yet."""
        accepted_at = self._accepted_at.get(name)
        return accepted_at is not None and self.clock() - accepted_at <= self.visible

    def forget(self, name: str) -> None:
        """Forget a placement that no longer exists."""
        self._accepted_at.pop(name, None)
        self._operation_reads.pop(name, None)
        self._maintenance.pop(name, None)

    def observation(self, placement: Placement) -> PlacementObservation | None:
        """Return a placement as the newest poll shows it; None if the poll is not conclusive.

        A poll that started before the request would report the placement as missing. In other polls
        the lookup of the placement failed.
        """
        poll, name = self._newest.get(placement.zone), placement.name
        if poll is None or poll.at <= self._accepted_at.get(name, 0.0) or name in poll.unknown:
            return None
        return PlacementObservation(
            poll.at,
            poll.placements.get(name),
            poll.refused.get(name),
            name in poll.creating,
            self._maintenance.get(name),
        )
