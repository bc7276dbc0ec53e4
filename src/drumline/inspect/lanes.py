"""Lanes, loops and waits of a timeline, for the picture and the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from drumline.inspect.collectives import COLLECTIVE_KINDS
from drumline.inspect.cost.network import DCN
from drumline.inspect.cost.timeline import COPIES, DEVICE, Timeline, TimelineEvent

COLLECTIVES = frozenset(COLLECTIVE_KINDS.values())


@dataclass(frozen=True)
class TimelineLane:
    """A resource, or both directions of a link if they are always busy together."""

    name: str
    resources: tuple[str, ...]

    def contains(self, event: TimelineEvent) -> bool:
        """Return True if an event uses a resource of the lane."""
        return not set(self.resources).isdisjoint(event.resource.split("+"))


@dataclass(frozen=True)
class Wait:
    """A time in which the device is idle until an event ends."""

    start: float
    end: float
    event: TimelineEvent

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start

    @property
    def on_network(self) -> bool:
        """True for exposed communication."""
        return self.event.kind in COLLECTIVES


def find_lanes(timeline: Timeline) -> tuple[TimelineLane, ...]:
    """Return the lanes: the device, the links in use, the data-centre network, the copies."""
    groups = {event.resource: set(event.resource.split("+")) for event, _ in timeline.leaf_events()}
    resources = {resource for group in groups.values() for resource in group} - {DEVICE}
    lanes = [TimelineLane("computing", (DEVICE,))]
    paired: set[str] = set()
    for resource in sorted(resources, key=_sort_key):
        if resource in paired:
            continue
        opposite = _opposite_direction(resource)
        if opposite and all((resource in g) == (opposite in g) for g in groups.values()):
            paired.add(opposite)
            lanes.append(
                TimelineLane(_lane_name(resource.rpartition(" ")[0]), (resource, opposite))
            )
        else:
            lanes.append(TimelineLane(_lane_name(resource), (resource,)))
    return tuple(lanes)


def _sort_key(resource: str) -> tuple[int, str, bool]:
    """Sort links by axis, up before down, and the data-centre network and copies after them."""
    rank = {DCN: 1, COPIES: 2}.get(resource, 0)
    axis, _, direction = resource.rpartition(" ")
    if direction in ("up", "down"):
        return (rank, axis, direction == "down")
    return (rank, resource, False)


def _opposite_direction(resource: str) -> str:
    if resource.endswith(" up"):
        return resource.removesuffix("up") + "down"
    if resource.endswith(" down"):
        return resource.removesuffix("down") + "up"
    return ""


def _lane_name(resource: str) -> str:
    """Return `links X, up` for `ici X up`."""
    if resource == DCN:
        return "DCN"
    network, _, axis = resource.partition(" ")
    if network != "ici":
        return resource
    for direction in (" up", " down"):
        if axis.endswith(direction):
            axis = f"{axis.removesuffix(direction)},{direction}"
    return f"links {axis}".rstrip()


def is_loop(event: TimelineEvent) -> bool:
    """Return True for a loop with several iterations or an unknown trip count."""
    return event.body is not None and (event.trip_count > 1 or has_unknown_trip_count(event))


def has_unknown_trip_count(event: TimelineEvent) -> bool:
    """Return True if the trip count of this loop is unknown, not that of a nested loop."""
    body = event.body
    if event.kind != "loop" or body is None or not body.unknown_trip_count or event.trip_count > 1:
        return False
    return not any(e.body is not None and e.body.unknown_trip_count for e in body.events)


def flatten_calls(timeline: Timeline, offset: float = 0.0) -> Iterator[TimelineEvent]:
    """Yield the events of a timeline and of its calls. A loop is a single event."""
    for event in timeline.events:
        if event.body is not None and not is_loop(event):
            yield from flatten_calls(event.body, offset + event.start)
        elif offset:
            yield replace(event, start=event.start + offset, end=event.end + offset)
        else:
            yield event


def nested_loops(timeline: Timeline, executions: int = 1) -> Iterator[tuple[TimelineEvent, int]]:
    """Yield the loops and nested loops with their executions."""
    for event in flatten_calls(timeline):
        if is_loop(event) and event.body is not None:
            yield event, executions
            yield from nested_loops(event.body, executions * event.trip_count)


def exposed_seconds(timeline: Timeline) -> float:
    """Return the exposed communication, over the iterations of all loops."""
    return sum(
        event.exposed * executions
        for event, executions in timeline.leaf_events()
        if event.kind in COLLECTIVES
    )


def find_waits(events: Iterable[TimelineEvent], seconds: float) -> list[Wait]:
    """Return the gaps of the device, each with the collective or else the copy that runs in it.

    A gap without either is not a wait. Waits inside a loop belong to the loop.
    """
    events = list(events)
    idle = _gaps(((e.start, e.end) for e in events if e.resource == DEVICE), 0.0, seconds)
    network_waits = _attribute_gaps(idle, [e for e in events if e.kind in COLLECTIVES])
    remaining_gaps: list[tuple[float, float]] = []
    index = 0
    for start, end in idle:
        network_intervals = []
        while index < len(network_waits) and network_waits[index].start < end:
            network_intervals.append((network_waits[index].start, network_waits[index].end))
            index += 1
        remaining_gaps += _gaps(network_intervals, start, end)
    copy_waits = _attribute_gaps(remaining_gaps, [e for e in events if e.resource == COPIES])
    return sorted([*network_waits, *copy_waits], key=lambda wait: wait.start)


def _gaps(
    busy: Iterable[tuple[float, float]], start: float, end: float
) -> list[tuple[float, float]]:
    gaps, cursor = [], start
    for busy_start, busy_end in sorted(busy):
        if busy_start > cursor:
            gaps.append((cursor, busy_start))
        cursor = max(cursor, busy_end)
    if end > cursor:
        gaps.append((cursor, end))
    return gaps


def _attribute_gaps(gaps: list[tuple[float, float]], events: list[TimelineEvent]) -> list[Wait]:
    """Divide the gaps among the events that run in them, by their ends."""
    events = sorted(events, key=lambda event: event.start)
    running: list[TimelineEvent] = []
    waits, started_count = [], 0
    for start, end in gaps:
        while started_count < len(events) and events[started_count].start < end:
            running.append(events[started_count])
            started_count += 1
        running = [event for event in running if event.end > start]
        cursor = start
        while cursor < end and running:
            active = [event for event in running if event.start <= cursor < event.end]
            if active:
                event = min(active, key=lambda event: event.end)
                waits.append(Wait(cursor, min(end, event.end), event))
                cursor = event.end
            else:
                cursor = min((e.start for e in running if e.start > cursor), default=end)
    return waits
