"""What the picture and the trace share: lanes, loops, and where the device waits for what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from drumline.inspect.collectives import KINDS
from drumline.inspect.cost.network import DCN
from drumline.inspect.cost.timeline import COPIES, DEVICE, Timeline, TimelineEvent

COLLECTIVES = frozenset(KINDS.values())


@dataclass(frozen=True)
class TimelineLane:
    """Resources that are shown as one, as they are always busy together."""

    name: str
    resources: tuple[str, ...]

    def holds(self, event: TimelineEvent) -> bool:
        """Whether an event keeps this lane busy."""
        return not set(self.resources).isdisjoint(event.resource.split("+"))


@dataclass(frozen=True)
class Wait:
    """A time in which the device does nothing until an event ends."""

    start: float
    end: float
    event: TimelineEvent

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start

    @property
    def on_network(self) -> bool:
        """Whether it is exposed communication."""
        return self.event.kind in COLLECTIVES


def lanes(timeline: Timeline) -> tuple[TimelineLane, ...]:
    """Computing first, then the links, the data-centre network and the copies that are used."""
    together = {
        event.resource: frozenset(event.resource.split("+")) for event, _ in timeline.flat()
    }
    used = {resource for group in together.values() for resource in group} - {DEVICE}
    found = [TimelineLane("computing", (DEVICE,))]
    taken: set[str] = set()
    for resource in sorted(used, key=_order):
        if resource in taken:
            continue
        pair = (resource, _other_way(resource))
        if pair[1] and all((pair[0] in group) == (pair[1] in group) for group in together.values()):
            taken |= set(pair)
            found.append(TimelineLane(_named(resource.rpartition(" ")[0]), pair))
        else:
            found.append(TimelineLane(_named(resource), (resource,)))
    return tuple(found)


def _order(resource: str) -> tuple[int, str, bool]:
    """Links by their axis, up before down; what goes farther after them."""
    far = {DCN: 1, COPIES: 2}.get(resource, 0)
    axis, _, way = resource.rpartition(" ")
    return (far, axis, way == "down") if way in ("up", "down") else (far, resource, False)


def _other_way(resource: str) -> str:
    if resource.endswith(" up"):
        return resource.removesuffix("up") + "down"
    if resource.endswith(" down"):
        return resource.removesuffix("down") + "up"
    return ""


def _named(resource: str) -> str:
    """`links X, up` for `ici X up`."""
    if resource == DCN:
        return "DCN"
    words = resource.split(" ")
    if words[0] != "ici":
        return resource
    axis = " ".join(words[1:])
    for way in (" up", " down"):
        if axis.endswith(way):
            axis = f"{axis.removesuffix(way)},{way}"
    return f"links {axis}".rstrip()


def is_loop(event: TimelineEvent) -> bool:
    """Whether an event stands for more than its contents: turns, or an unknown number of them."""
    return event.inside is not None and (event.turns > 1 or turns_unknown(event))


def turns_unknown(event: TimelineEvent) -> bool:
    """Whether this loop, rather than one within it, runs an unknown number of times."""
    inside = event.inside
    if event.kind != "loop" or inside is None or not inside.unknown_turns or event.turns > 1:
        return False
    return not any(e.inside is not None and e.inside.unknown_turns for e in inside.events)


def spread(timeline: Timeline, offset: float = 0.0) -> Iterator[TimelineEvent]:
    """The events with those of calls in their callers' place; loops stay one event each."""
    for event in timeline.events:
        if event.inside is not None and not is_loop(event):
            yield from spread(event.inside, offset + event.start)
        elif offset:
            yield replace(event, start=event.start + offset, end=event.end + offset)
        else:
            yield event


def loops(timeline: Timeline, times: int = 1) -> Iterator[tuple[TimelineEvent, int]]:
    """Every loop, those within loops too, with how often it is entered."""
    for event in spread(timeline):
        if is_loop(event) and event.inside is not None:
            yield event, times
            yield from loops(event.inside, times * event.turns)


def exposed(timeline: Timeline) -> float:
    """Seconds that the device waits for the network, over all turns of all loops."""
    return sum(e.exposed * times for e, times in timeline.flat() if e.kind in COLLECTIVES)


def waits(events: Iterable[TimelineEvent], seconds: float) -> list[Wait]:
    """The device's gaps, each laid to the collectives that run in it; else to the copies.

    What a gap has of neither is no wait, and what loops wait for within is theirs.
    """
    every = list(events)
    idle = _gaps(((e.start, e.end) for e in every if e.resource == DEVICE), 0.0, seconds)
    found = _within(idle, [e for e in every if e.kind in COLLECTIVES])
    left: list[tuple[float, float]] = []
    covered = [(wait.start, wait.end) for wait in found]
    at = 0
    for start, end in idle:
        inside = []
        while at < len(covered) and covered[at][0] < end:
            inside.append(covered[at])
            at += 1
        left += _gaps(inside, start, end)
    copied = _within(left, [e for e in every if e.resource == COPIES])
    return sorted([*found, *copied], key=lambda wait: wait.start)


def _gaps(
    busy: Iterable[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    gaps, at = [], begin
    for start, stop in sorted(busy):
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    if end > at:
        gaps.append((at, end))
    return gaps


def _within(gaps: list[tuple[float, float]], events: list[TimelineEvent]) -> list[Wait]:
    """What runs in each gap, one after another, the first to end first."""
    events = sorted(events, key=lambda event: event.start)
    running: list[TimelineEvent] = []
    found, following = [], 0
    for start, end in gaps:
        while following < len(events) and events[following].start < end:
            running.append(events[following])
            following += 1
        running = [event for event in running if event.end > start]
        cursor = start
        while cursor < end and running:
            here = [event for event in running if event.start <= cursor < event.end]
            if here:
                event = min(here, key=lambda event: event.end)
                found.append(Wait(cursor, min(end, event.end), event))
                cursor = event.end
            else:
                cursor = min((e.start for e in running if e.start > cursor), default=end)
    return found
