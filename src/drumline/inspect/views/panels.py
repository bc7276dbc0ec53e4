"""What a picture shows of a timeline, and where: stretches of time, their bars, waits and ticks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from drumline.inspect.cost.timeline import DEVICE, Timeline, TimelineEvent
from drumline.inspect.views.colours import Colours
from drumline.inspect.views.tracks import TimelineLane, Wait, exposed, is_loop, loops, spread, waits
from drumline.inspect.views.words import duration, share

WIDTH, MARGIN = 1600, 36
LEFT, RIGHT = 170, WIDTH - MARGIN
"""Between them the time runs."""
COMPUTING, LINK, BETWEEN = 66, 34, 6
"""Heights of lanes and of the room between them."""
HEADING, TABS, AXIS, APART = 34, 26, 32, 20
"""Heights of a panel's title, the names of its loops, its axis, and the room to the next panel."""
NARROW = 12
"""A bar has no room for words."""
LABEL = 13
"""The size of words in bars."""
ENLARGED = 3
"""Loops that get a panel of their own."""
WORTH_A_PANEL = 0.01
"""Of the call: a shorter loop is not enlarged."""


@dataclass(frozen=True)
class Panel:
    """A stretch of time to draw."""

    title: str
    note: str
    events: tuple[TimelineEvent, ...]
    seconds: float
    waits: tuple[Wait, ...]

    @staticmethod
    def of(title: str, timeline: Timeline) -> Panel:
        """A whole timeline."""
        events = tuple(spread(timeline))
        found = tuple(waits(events, timeline.seconds))
        waited = exposed(timeline)
        part = waited / timeline.seconds if timeline.seconds else 0.0
        note = f"waits for the network {duration(waited)}, {share(part)}" if waited else ""
        return Panel(title, note, events, timeline.seconds, found)

    @property
    def tabs(self) -> int:
        """The height that the names of loops take."""
        return TABS if any(is_loop(event) for event in self.events) else 0

    def height(self, shown_lanes: Sequence[TimelineLane]) -> int:
        """With its heading and its axis."""
        rows = sum(lane_height(lane) + BETWEEN for lane in shown_lanes)
        return HEADING + self.tabs + rows + AXIS

    def x(self, seconds: float) -> float:
        """Where a time stands."""
        return LEFT + (RIGHT - LEFT) * (seconds / self.seconds if self.seconds else 0.0)


@dataclass(frozen=True)
class Bar:
    """Events of one kind and one source line, one right after another."""

    start: float
    end: float
    name: str
    kind: str
    source: str


def joined(events: Sequence[TimelineEvent], colours: Colours, narrow: float) -> Iterator[Bar]:
    """Bars; parts of a written kernel are one, and so are neighbours too narrow to tell apart."""
    last: Bar | None = None
    for event in sorted(events, key=lambda event: event.start):
        bar = Bar(event.start, event.end, colours.shown_as(event), event.kind, event.place.short)
        if last is not None and _is_more_of(last, bar, narrow, event.kind in colours.written):
            last = replace(last, end=max(last.end, bar.end))
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def _is_more_of(last: Bar, bar: Bar, narrow: float, written: bool) -> bool:
    if (last.kind, last.source) != (bar.kind, bar.source):
        return False
    if bar.start - last.end > 1e-9 * bar.end:  # more than rounding
        return False
    return written or min(last.end - last.start, bar.end - bar.start) < narrow


def together(found: Sequence[Wait]) -> Iterator[Wait]:
    """One wait where the device waits for one collective after another."""
    last: Wait | None = None
    for wait in found:
        if last is not None and last.end == wait.start and last.on_network == wait.on_network:
            last = Wait(last.start, wait.end, last.event)
            continue
        if last is not None:
            yield last
        last = wait
    if last is not None:
        yield last


def longest(timeline: Timeline) -> dict[tuple[int, int], tuple[TimelineEvent, int]]:
    """The loops to enlarge and how often each is entered, in the order in which they run."""
    found: dict[tuple[int, int], tuple[TimelineEvent, int]] = {}
    for event, times in loops(timeline):
        if event.inside is not None and event.inside.events:
            first, before = found.get(identity(event), (event, 0))
            found[identity(event)] = first, before + times
    seconds = {key: event.seconds * times for key, (event, times) in found.items()}
    first_few = sorted(found, key=lambda key: -seconds[key])[:ENLARGED]
    worth = WORTH_A_PANEL * timeline.seconds
    return {k: found[k] for k in found if k in first_few and seconds[k] >= worth}


def identity(event: TimelineEvent) -> tuple[int, int]:
    """Equal for loops at several places that make as many turns of the same computation."""
    return (id(event.inside.events) if event.inside is not None else 0, event.turns)


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Some seven to fourteen round times from 0, each with its words."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    step = seconds / 14
    power = 10.0 ** floor(log10(step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
    count = floor(seconds / step * (1 + 1e-9))
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= factor or unit == "ns":
            places = max(0, ceil(-log10(step / factor) - 1e-9))
            return [
                (at * step, f"{at * step / factor:,.{places}f} {unit}") for at in range(count + 1)
            ]
    raise AssertionError


def lane_height(lane: TimelineLane) -> int:
    """Where most is written, most room."""
    return COMPUTING if lane.resources == (DEVICE,) else LINK
