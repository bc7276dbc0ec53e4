"""Which colour each kind of operation has in a picture: the same kinds the same in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.errors import UserError
from drumline.inspect.canvas import INK, Canvas, width
from drumline.inspect.compiling.axes import shown
from drumline.inspect.cost.timeline import COPIES, DEVICE, Timeline, TimelineEvent
from drumline.inspect.formatting import duration, share
from drumline.inspect.lanes import (
    COLLECTIVES,
    TimelineLane,
    Wait,
    exposed,
    is_loop,
    lanes,
    loops,
    spread,
    turns_unknown,
    waits,
)

if TYPE_CHECKING:
    from drumline.inspect.estimate import Estimate

WAITING = "#d62839"
"""No kind has it: red is where the device waits."""
WAITING_PALE = "#fdeaec"
COPYING = "#6b7785"
"""Where it waits for a copy between its memories."""
OTHER = "other operations"

_FIXED = {
    "matmul": "#2f6db5",
    "elementwise": "#93c0e8",
    OTHER: "#bcc5cf",
    COPIES: "#8c97a3",
    "all-gather": "#e8a33d",
    "reduce-scatter": "#3a9f6b",
    "all-reduce": "#c26a1b",
    "all-to-all": "#c9649a",
    "collective-permute": "#1f9aa3",
    "collective-broadcast": "#8f8436",
}
_WRITTEN = ("#6b4fa1", "#9b82cf", "#453a73", "#b9a5e3", "#7d5fc4", "#5a3d86")
"""For kernels that somebody wrote, by how long they run; the last for all others."""


@dataclass(frozen=True)
class Colours:
    """What is shown under a name of its own, and how."""

    written: tuple[str, ...]

    @staticmethod
    def of(events: Iterable[tuple[TimelineEvent, int]]) -> Colours:
        """For the events of a program, with how often each happens."""
        seconds: dict[str, float] = {}
        marked = set()
        for event, times in events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.seconds * times
            # A part of a kernel may have lost the scope that names it: one that has it suffices.
            if f"kernel[{event.kind}" in event.place.op_name or event.kind == "custom-call":
                marked.add(event.kind)
        return Colours(tuple(sorted(marked, key=lambda kind: -seconds[kind])))

    def shown_as(self, event: TimelineEvent) -> str:
        """The name under which an event stands in the legend."""
        if event.resource == COPIES:
            return COPIES
        known = event.kind in COLLECTIVES or event.kind in _FIXED or event.kind in self.written
        return event.kind if known else OTHER

    def __getitem__(self, name: str) -> str:
        """The colour of a name in the legend."""
        if name in self.written and name not in _FIXED:
            return _WRITTEN[min(self.written.index(name), len(_WRITTEN) - 1)]
        return _FIXED.get(name, _FIXED[OTHER])


def is_dark(colour: str) -> bool:
    """Whether words on it had better be white."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def by_length(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The longest first; those that all pictures have in common stay comparable so."""
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))


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


PALE, GRID, FAINT = "#f3f5f8", "#dfe4ea", "#5b6875"


def draw(told: Estimate, path: Path) -> None:
    """Draw an estimate into a PNG file.

    Raises:
        UserError: it is not named .png or cannot be written, or Pillow is missing.
    """
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: the timeline is drawn as PNG; name it {path.stem}.png")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    Picture(told).drawn().save(path)


class Picture:
    """One estimate's picture, laid out before it is drawn."""

    def __init__(self, told: Estimate) -> None:
        """Decide on lanes, colours and the loops to enlarge."""
        self.told = told
        self.lanes = lanes(told.timeline)
        self.colours = Colours.of(told.timeline.flat())
        self.enlarged = longest(told.timeline)
        self.letters = dict(zip(self.enlarged, "ABC", strict=False))
        self.legend = list(_rows(self._entries()))

    def drawn(self) -> Canvas:
        """Everything, on a sheet that is as high as it must be."""
        panels = list(self._panels())
        above = 92 + 28 * len(self.legend) + 10
        height = above + sum(panel.height(self.lanes) + APART for panel in panels) + 30
        canvas = Canvas(WIDTH, height)
        self._head(canvas)
        y = above
        for panel in panels:
            _Drawn(canvas, panel, self, y).draw()
            y += panel.height(self.lanes) + APART
        canvas.words((MARGIN, height - 24), self._foot(), 14, FAINT)
        return canvas

    def _panels(self) -> Iterator[Panel]:
        yield Panel.of("The whole call", self.told.timeline)
        for event, times in self.enlarged.values():
            if event.inside is not None:
                yield Panel.of(self._titled(event, times), event.inside)

    def _titled(self, event: TimelineEvent, times: int) -> str:
        inside = event.inside
        assert inside is not None
        place = f" at {event.place.short}" if event.place.short else ""
        again = f", entered {times:,} times" if times > 1 else ""
        of = f"the {_pass(event)}loop{place}{again}"
        part = share(event.seconds * times / self.told.seconds)
        letter, each = self.letters[identity(event)], duration(inside.seconds)
        if turns_unknown(event):
            return f"{letter}:  one turn of {of}, {each}; how many it makes is unknown"
        return (
            f"{letter}:  one turn of {event.turns:,} of {of}, {each}; all turns: {part} of the call"
        )

    def _head(self, canvas: Canvas) -> None:
        told = self.told
        mesh = f", mesh {shown(told.mesh)}" if told.mesh else ""
        canvas.words((MARGIN, 40), _cut(f"{told.name} on {told.on}{mesh}", 28), 28)
        least = "at least " if told.at_least else ""
        facts = [f"{least}{duration(told.seconds)} a call", f"MFU {100 * told.mfu:.1f} %"]
        facts.append(f"bound by {told.bound}")
        canvas.words((MARGIN, 74), _cut("  ·  ".join(facts), 18), 18, FAINT)
        for row, entries in enumerate(self.legend):
            self._legend_row(canvas, entries, 92 + 28 * row + 14)

    def _entries(self) -> list[tuple[str, str]]:
        """Names in the legend and how long each takes, in words."""
        seconds: dict[str, float] = {}
        for event, times in self.told.timeline.flat():
            name = self.colours.shown_as(event)
            seconds[name] = seconds.get(name, 0.0) + event.seconds * times
        entries = [(name, f"{name} {duration(took)}") for name, took in by_length(seconds)]
        if waited := exposed(self.told.timeline):
            entries.append((WAITING, f"waiting for the network {duration(waited)}"))
        copied = sum(e.exposed * n for e, n in self.told.timeline.flat() if e.resource == COPIES)
        if copied:
            entries.append((COPYING, f"waiting for copies {duration(copied)}"))
        return entries

    def _legend_row(self, canvas: Canvas, entries: Sequence[tuple[str, str]], y: float) -> None:
        x: float = MARGIN
        for name, words in entries:
            swatch = (x, y - 8, x + 22, y + 8)
            if name in (WAITING, COPYING):
                canvas.hatch(swatch, WAITING_PALE if name == WAITING else PALE, name)
            else:
                canvas.box(swatch, self.colours[name], round_by=3)
            canvas.words((x + 30, y), words, 15)
            x += _entry(words)

    def _foot(self) -> str:
        bands = "In a loop, a band's height is its share of a turn.  " if self.letters else ""
        return _cut(
            f"{bands}Compiled by {self.told.compiled_by}; times are the model's, not measured.", 14
        )


class _Drawn:
    """One panel on a sheet."""

    def __init__(self, canvas: Canvas, panel: Panel, picture: Picture, top: int) -> None:
        self.canvas = canvas
        self.panel = panel
        self.picture = picture
        self.colours = picture.colours
        self.top = top
        self.begin = top + HEADING + panel.tabs
        self.waits = list(together(panel.waits))
        self.rows: list[tuple[TimelineLane, int, int]] = []
        y = self.begin
        for lane in picture.lanes:
            self.rows.append((lane, y, y + lane_height(lane)))
            y += lane_height(lane) + BETWEEN
        self.end = y - BETWEEN

    def draw(self) -> None:
        self._heading()
        self._background()
        for wait in self.waits:
            if wait.on_network:
                self._shade(wait)
        for lane, top, bottom in self.rows:
            self._lane(lane, top, bottom)
        if not self.panel.events:
            middle = ((LEFT + RIGHT) / 2, (self.rows[0][1] + self.rows[0][2]) / 2)
            self.canvas.words(middle, "nothing here takes time", 15, FAINT, "mm")
        for event in self.panel.events:
            if is_loop(event):
                self._frame(event)

    def _heading(self) -> None:
        y, panel = self.top + 12, self.panel
        self.canvas.words((MARGIN, y), _cut(panel.title, 18, width(panel.note, 15) + 24), 18)
        self.canvas.words((RIGHT, y), panel.note, 15, WAITING, "rm")

    def _background(self) -> None:
        for lane, top, bottom in self.rows:
            self.canvas.box((LEFT, top, RIGHT, bottom), PALE)
            name = _cut(lane.name, 15, WIDTH - 2 * MARGIN - (LEFT - MARGIN - 12))
            self.canvas.words((LEFT - 12, (top + bottom) / 2), name, 15, INK, "rm")
        for at, words in ticks(self.panel.seconds):
            x = self.panel.x(at)
            self.canvas.line((x, self.begin, x, self.end + 6), GRID)
            # The last one stays on the sheet.
            x = min(x, WIDTH - 4 - width(words, LABEL) / 2)
            self.canvas.words((x, self.end + 18), words, LABEL, FAINT, "mm")

    def _shade(self, wait: Wait) -> None:
        left, right = self.panel.x(wait.start), self.panel.x(wait.end)
        if right - left >= 1:
            self.canvas.box((left, self.begin, right, self.end), WAITING_PALE)

    def _lane(self, lane: TimelineLane, top: int, bottom: int) -> None:
        held = [event for event in self.panel.events if event.inside or lane.holds(event)]
        for event in held:
            if is_loop(event):
                self._bands(event, lane, top, bottom)
        bars = joined(
            [event for event in held if not is_loop(event)],
            self.colours,
            NARROW / (RIGHT - LEFT) * self.panel.seconds,
        )
        drawn: list[Bar | Wait] = [*bars, *(self.waits if lane is self.rows[0][0] else ())]
        # The narrow first: what has room of its own must not lose it to them.
        for each in sorted(drawn, key=lambda each: each.end - each.start):
            if isinstance(each, Bar):
                self._bar(each, top, bottom)
            else:
                self._wait(each, top, bottom)

    def _bar(self, bar: Bar, top: int, bottom: int) -> None:
        left, right = self.panel.x(bar.start), self.panel.x(bar.end)
        colour = self.colours[bar.name]
        wide = right - left
        # A hair of white between neighbours, once both are wide enough to spare it.
        gap = 0.5 if wide >= 3 else 0.0
        self.canvas.box((left, top, right - gap, bottom), colour, round_by=3 if wide >= 12 else 0)
        lines = _label(bar, wide - 8, bottom - top)
        middle = (top + bottom) / 2 - 9 * (len(lines) - 1)
        for number, words in enumerate(lines):
            self.canvas.words(
                ((left + right) / 2, middle + 18 * number), words, LABEL, _ink(colour), "mm"
            )

    def _wait(self, wait: Wait, top: int, bottom: int) -> None:
        left, right = self.panel.x(wait.start), self.panel.x(wait.end)
        box = (left, top, right, bottom)
        if not wait.on_network:
            self.canvas.hatch(box, PALE, COPYING)
            return
        self.canvas.hatch(box, WAITING_PALE, WAITING)
        self._say_waits("waits", box)

    def _say_waits(self, words: str, box: tuple[float, float, float, float]) -> None:
        """On white, as nobody can read words on slanted lines."""
        left, top, right, bottom = box
        room = width(words, LABEL) + 10
        if right - left < room + 6 or bottom - top < 22:
            return
        middle, centre = (left + right) / 2, (top + bottom) / 2
        chip = (middle - room / 2, centre - 10, middle + room / 2, centre + 10)
        self.canvas.box(chip, "#ffffff", round_by=4)
        self.canvas.words((middle, centre), words, LABEL, WAITING, "mm")

    def _bands(self, event: TimelineEvent, lane: TimelineLane, top: int, bottom: int) -> None:
        left, right = self.panel.x(event.start), self.panel.x(event.end)
        inside = event.inside
        assert inside is not None
        if not inside.seconds:
            return
        seconds: dict[str, float] = {}
        for part, times in inside.flat():
            if lane.holds(part):
                name = self.colours.shown_as(part)
                seconds[name] = seconds.get(name, 0.0) + part.seconds * times
        y: float = bottom
        for name, took in by_length(seconds):
            above = y - (bottom - top) * min(1.0, took / inside.seconds)
            self.canvas.box((left, above, right, y), self.colours[name])
            words = f"{name} {share(took / inside.seconds)}"
            if y - above >= 15 and width(words, LABEL) + 8 <= right - left:
                place = ((left + right) / 2, (above + y) / 2)
                self.canvas.words(place, words, LABEL, _ink(self.colours[name]), "mm")
            y = above
        waited = exposed(inside)
        if lane.resources == (DEVICE,) and waited:
            above = y - (bottom - top) * waited / inside.seconds
            box = (left, max(top, above), right, y)
            self.canvas.hatch(box, WAITING_PALE, WAITING)
            self._say_waits(f"waits {share(waited / inside.seconds)}", box)

    def _frame(self, event: TimelineEvent) -> None:
        left, right = self.panel.x(event.start), self.panel.x(event.end)
        if right - left < 4:
            return
        top = self.begin - self.panel.tabs + 4
        self.canvas.box((left, self.begin - 3, right, self.end + 3), None, INK, 3)
        letter = self.picture.letters.get(identity(event), "")
        turns = "×?" if turns_unknown(event) else f"×{event.turns:,}"
        assert event.inside is not None
        each = duration(event.inside.seconds)
        named = f"{letter}  {turns}" if letter else turns
        words = _first_fitting(
            (f"{named},  {each} a turn", named, turns, letter), right - left - 12
        )
        if words:
            wide = width(words, LABEL) + 14
            self.canvas.box((left, top, left + wide, self.begin - 2), INK, round_by=3)
            self.canvas.words((left + 7, (top + self.begin - 2) / 2), words, LABEL, "#ffffff")


def _rows(entries: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """As many in a row as have room."""
    row: list[tuple[str, str]] = []
    for entry in entries:
        if row and sum(_entry(words) for _, words in [*row, entry]) > RIGHT - MARGIN:
            yield row
            row = []
        row.append(entry)
    if row:
        yield row


def _entry(words: str) -> float:
    return 30 + width(words, 15) + 20


def _label(bar: Bar, room: float, height: int) -> list[str]:
    """What a bar has room for: what it is and where it stands, or the one or the other."""
    if room < 20:
        return []
    line = f":{bar.source.rpartition(':')[2]}" if bar.source else ""
    if height >= COMPUTING and line and width(bar.kind, LABEL) <= room:
        return [bar.kind, bar.source if width(bar.source, LABEL) <= room else line]
    both = f"{bar.kind}  {bar.source}"
    words = _first_fitting((both.strip(), bar.kind, line), room)
    return [words] if words else []


def _first_fitting(choices: Sequence[str], room: float) -> str:
    return next((words for words in choices if words and width(words, LABEL) <= room), "")


def _cut(words: str, size: int, taken: float = 0.0) -> str:
    """Words that fit across the sheet beside what is taken of it."""
    room = WIDTH - 2 * MARGIN - taken
    if width(words, size) <= room:
        return words
    shorter = (words[:long] + "…" for long in range(len(words) - 1, 0, -1))
    return next((cut for cut in shorter if width(cut, size) <= room), "")


def _ink(colour: str) -> str:
    return "#ffffff" if is_dark(colour) else INK


def _pass(event: TimelineEvent) -> str:
    """Which of the two passes a loop belongs to, by what JAX writes into its name."""
    if "transpose(" in event.place.op_name:
        return "backward "
    return "forward " if "jvp(" in event.place.op_name else ""
