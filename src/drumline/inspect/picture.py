"""Draw a timeline: a panel for the call, and panels for an iteration of the longest loops.

A panel has lanes for the device and for the kinds of links. Colours distinguish the kinds of
operations, and red marks waits for the network. A loop is a frame of bands for the kinds of
operations, with heights in proportion to their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.errors import UserError
from drumline.inspect.canvas import INK, Canvas, text_width
from drumline.inspect.compiling.axes import format_mesh
from drumline.inspect.cost.timeline import COPIES, DEVICE, Timeline, TimelineEvent
from drumline.inspect.formatting import format_seconds, format_share
from drumline.inspect.lanes import (
    COLLECTIVES,
    TimelineLane,
    Wait,
    exposed_seconds,
    find_lanes,
    find_waits,
    flatten_calls,
    has_unknown_trip_count,
    is_loop,
    nested_loops,
)

if TYPE_CHECKING:
    from drumline.inspect.estimate import Estimate

# Colours ----------------------------------------------------------------------------------------

WAIT_COLOUR = "#d62839"
"""Red, reserved for waits on the network."""
WAIT_BACKGROUND = "#fdeaec"
COPY_WAIT_COLOUR = "#6b7785"
"""The colour of waits for copies between memories."""
PALE, GRID, FAINT = "#f3f5f8", "#dfe4ea", "#5b6875"
OTHER = "other operations"

_FIXED_COLOURS = {
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
_KERNEL_COLOURS = ("#6b4fa1", "#9b82cf", "#453a73", "#b9a5e3", "#7d5fc4", "#5a3d86")
"""Colours of handwritten kernels, by duration. The last colour is for all further kernels."""


@dataclass(frozen=True)
class Colours:
    """The colours of the kinds of operations, which depend on the program only for kernels."""

    kernels: tuple[str, ...]
    """The names of handwritten kernels, by descending duration."""

    @staticmethod
    def from_events(events: Iterable[tuple[TimelineEvent, int]]) -> Colours:
        """Choose colours for events and their numbers of executions."""
        seconds: dict[str, float] = {}
        kernels = set()
        for event, executions in events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.seconds * executions
            # A single instruction with the scope identifies a kernel.
            if f"kernel[{event.kind}" in event.location.op_name or event.kind == "custom-call":
                kernels.add(event.kind)
        return Colours(tuple(sorted(kernels, key=lambda kind: -seconds[kind])))

    def legend_name(self, event: TimelineEvent) -> str:
        """Return the name of an event in the legend."""
        if event.resource == COPIES:
            return COPIES
        named = (
            event.kind in COLLECTIVES or event.kind in _FIXED_COLOURS or event.kind in self.kernels
        )
        return event.kind if named else OTHER

    def __getitem__(self, name: str) -> str:
        """Return the colour of a name in the legend."""
        if name in self.kernels and name not in _FIXED_COLOURS:
            return _KERNEL_COLOURS[min(self.kernels.index(name), len(_KERNEL_COLOURS) - 1)]
        return _FIXED_COLOURS.get(name, _FIXED_COLOURS[OTHER])


def _text_colour(background: str) -> str:
    """Return white on dark colours and ink on others."""
    red, green, blue = (int(background[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else INK


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))


# Geometry -----------------------------------------------------------------------------------------

WIDTH, MARGIN = 1600, 36
LEFT, RIGHT = 170, WIDTH - MARGIN
"""The ends of the time axis."""
DEVICE_HEIGHT, LINK_HEIGHT, LANE_GAP = 66, 34, 6
TITLE_HEIGHT, TAB_HEIGHT, AXIS_HEIGHT, PANEL_GAP = 34, 26, 32, 20
"""The heights of a panel's title, loop labels and axis, and the gap between panels."""
NARROW = 12
"""The maximum width of a bar without space for text."""
LABEL = 13
"""The size of text in bars."""
MAX_ENLARGED = 3
"""The maximum number of loops with a panel."""
MIN_ENLARGED_SHARE = 0.01
"""The minimum share of the call for a loop with a panel."""


@dataclass(frozen=True)
class Panel:
    """A timeline with a title."""

    title: str
    note: str
    events: tuple[TimelineEvent, ...]
    seconds: float
    waits: tuple[Wait, ...]

    @staticmethod
    def from_timeline(title: str, timeline: Timeline) -> Panel:
        """Make a panel of a whole timeline."""
        events = tuple(flatten_calls(timeline))
        waits = tuple(find_waits(events, timeline.seconds))
        exposed = exposed_seconds(timeline)
        note = ""
        if exposed:
            share = exposed / timeline.seconds if timeline.seconds else 0.0
            note = f"waits for the network {format_seconds(exposed)}, {format_share(share)}"
        return Panel(title, note, events, timeline.seconds, waits)

    @property
    def tab_height(self) -> int:
        """The height of the loop labels."""
        return TAB_HEIGHT if any(is_loop(event) for event in self.events) else 0

    def height(self, lanes: Sequence[TimelineLane]) -> int:
        """Return the height with title and axis."""
        rows = sum(lane_height(lane) + LANE_GAP for lane in lanes)
        return TITLE_HEIGHT + self.tab_height + rows + AXIS_HEIGHT

    def x(self, seconds: float) -> float:
        """Return the horizontal position of a time."""
        return LEFT + (RIGHT - LEFT) * (seconds / self.seconds if self.seconds else 0.0)


@dataclass(frozen=True)
class Bar:
    """Adjacent events of the same kind and source line."""

    start: float
    end: float
    name: str
    kind: str
    source: str


def lane_height(lane: TimelineLane) -> int:
    """Return the height of a lane."""
    return DEVICE_HEIGHT if lane.resources == (DEVICE,) else LINK_HEIGHT


def join_bars(events: Sequence[TimelineEvent], colours: Colours, narrow: float) -> Iterator[Bar]:
    """Yield bars. Adjacent bars of a handwritten kernel are joined, as are narrow bars."""
    last: Bar | None = None
    for event in sorted(events, key=lambda event: event.start):
        bar = Bar(
            event.start, event.end, colours.legend_name(event), event.kind, event.location.short
        )
        if last is not None and _can_join(last, bar, narrow, event.kind in colours.kernels):
            last = replace(last, end=max(last.end, bar.end))
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def _can_join(last: Bar, bar: Bar, narrow: float, is_kernel: bool) -> bool:
    if (last.kind, last.source) != (bar.kind, bar.source):
        return False
    if bar.start - last.end > 1e-9 * bar.end:  # more than rounding
        return False
    return is_kernel or min(last.end - last.start, bar.end - bar.start) < narrow


def join_waits(waits: Sequence[Wait]) -> Iterator[Wait]:
    """Join adjacent waits."""
    last: Wait | None = None
    for wait in waits:
        if last is not None and last.end == wait.start and last.on_network == wait.on_network:
            last = Wait(last.start, wait.end, last.event)
            continue
        if last is not None:
            yield last
        last = wait
    if last is not None:
        yield last


def longest_loops(timeline: Timeline) -> dict[tuple[int, int], tuple[TimelineEvent, int]]:
    """Return the loops to enlarge and their executions, in execution order."""
    loops: dict[tuple[int, int], tuple[TimelineEvent, int]] = {}
    for event, executions in nested_loops(timeline):
        if event.body is not None and event.body.events:
            first, count = loops.get(loop_key(event), (event, 0))
            loops[loop_key(event)] = first, count + executions
    seconds = {key: event.seconds * count for key, (event, count) in loops.items()}
    longest = sorted(loops, key=lambda key: -seconds[key])[:MAX_ENLARGED]
    min_seconds = MIN_ENLARGED_SHARE * timeline.seconds
    return {key: loops[key] for key in loops if key in longest and seconds[key] >= min_seconds}


def loop_key(event: TimelineEvent) -> tuple[int, int]:
    """Return a key that is equal for loops with the same body and trip count."""
    return (id(event.body.events) if event.body is not None else 0, event.trip_count)


def axis_ticks(seconds: float) -> list[tuple[float, str]]:
    """Return about seven to fourteen round times from 0 on, with their labels."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    step = seconds / 14
    power = 10.0 ** floor(log10(step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
    count = floor(seconds / step * (1 + 1e-9))
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= factor or unit == "ns":
            decimals = max(0, ceil(-log10(step / factor) - 1e-9))
            return [
                (tick * step, f"{tick * step / factor:,.{decimals}f} {unit}")
                for tick in range(count + 1)
            ]
    raise AssertionError


# Drawing ------------------------------------------------------------------------------------------


def draw(estimate: Estimate, path: Path) -> None:
    """Draw an estimate as a PNG file.

    Raises:
        UserError: the name does not end in .png, the file cannot be written, or Pillow is missing.
    """
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: the timeline is drawn as PNG; name it {path.stem}.png")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    Picture(estimate).draw().save(path)


class Picture:
    """The picture of an estimate."""

    def __init__(self, estimate: Estimate) -> None:
        """Choose lanes, colours and the loops to enlarge."""
        self.estimate = estimate
        self.lanes = find_lanes(estimate.timeline)
        self.colours = Colours.from_events(estimate.timeline.leaf_events())
        self.enlarged = longest_loops(estimate.timeline)
        self.letters = dict(zip(self.enlarged, "ABC", strict=False))
        self.legend = list(_legend_rows(self._legend_entries()))

    def draw(self) -> Canvas:
        """Draw the picture on a new canvas."""
        panels = list(self._panels())
        y0 = 92 + 28 * len(self.legend) + 10
        height = y0 + sum(panel.height(self.lanes) + PANEL_GAP for panel in panels) + 30
        canvas = Canvas(WIDTH, height)
        self._draw_head(canvas)
        for panel in panels:
            _PanelDrawing(canvas, panel, self, y0).draw()
            y0 += panel.height(self.lanes) + PANEL_GAP
        canvas.text((MARGIN, height - 24), self._footer(), 14, FAINT)
        return canvas

    def _panels(self) -> Iterator[Panel]:
        yield Panel.from_timeline("The whole call", self.estimate.timeline)
        for event, executions in self.enlarged.values():
            if event.body is not None:
                yield Panel.from_timeline(self._loop_title(event, executions), event.body)

    def _loop_title(self, event: TimelineEvent, executions: int) -> str:
        assert event.body is not None
        source = f" at {event.location.short}" if event.location.short else ""
        entries = f", entered {executions:,} times" if executions > 1 else ""
        loop = f"the {_pass_name(event)}loop{source}{entries}"
        letter, seconds = self.letters[loop_key(event)], format_seconds(event.body.seconds)
        if has_unknown_trip_count(event):
            return f"{letter}:  one turn of {loop}, {seconds}; the number of turns is unknown"
        share = format_share(event.seconds * executions / self.estimate.seconds)
        return (
            f"{letter}:  one turn of {event.trip_count:,} of {loop}, {seconds}; "
            f"all turns: {share} of the call"
        )

    def _draw_head(self, canvas: Canvas) -> None:
        estimate = self.estimate
        mesh = f", mesh {format_mesh(estimate.mesh)}" if estimate.mesh else ""
        title = _truncate(f"{estimate.name} on {estimate.on}{mesh}", 28)
        canvas.text((MARGIN, 40), title, 28)
        at_least = "at least " if estimate.at_least else ""
        results = "  ·  ".join(
            (
                f"{at_least}{format_seconds(estimate.seconds)} a call",
                f"MFU {100 * estimate.mfu:.1f} %",
                f"bound by {estimate.bound}",
            )
        )
        canvas.text((MARGIN, 74), _truncate(results, 18), 18, FAINT)
        for row, entries in enumerate(self.legend):
            self._draw_legend_row(canvas, entries, 92 + 28 * row + 14)

    def _legend_entries(self) -> list[tuple[str, str]]:
        """Return the names in the legend and their texts."""
        seconds: dict[str, float] = {}
        copy_wait = 0.0
        for event, executions in self.estimate.timeline.leaf_events():
            name = self.colours.legend_name(event)
            seconds[name] = seconds.get(name, 0.0) + event.seconds * executions
            if event.resource == COPIES:
                copy_wait += event.exposed * executions
        entries = [
            (name, f"{name} {format_seconds(total)}") for name, total in _longest_first(seconds)
        ]
        if exposed := exposed_seconds(self.estimate.timeline):
            entries.append((WAIT_COLOUR, f"waiting for the network {format_seconds(exposed)}"))
        if copy_wait:
            entries.append((COPY_WAIT_COLOUR, f"waiting for copies {format_seconds(copy_wait)}"))
        return entries

    def _draw_legend_row(
        self, canvas: Canvas, entries: Sequence[tuple[str, str]], y: float
    ) -> None:
        x: float = MARGIN
        for name, text in entries:
            swatch = (x, y - 8, x + 22, y + 8)
            if name in (WAIT_COLOUR, COPY_WAIT_COLOUR):
                canvas.hatch(swatch, WAIT_BACKGROUND if name == WAIT_COLOUR else PALE, name)
            else:
                canvas.box(swatch, self.colours[name], radius=3)
            canvas.text((x + 30, y), text, 15)
            x += _entry_width(text)

    def _footer(self) -> str:
        bands = "In a loop, a band's height is its share of a turn.  " if self.letters else ""
        compiler = self.estimate.compiled_by
        text = f"{bands}Compiled by {compiler}; times are the model's, not measured."
        return _truncate(text, 14)


class _PanelDrawing:
    """Draws a panel on a canvas."""

    def __init__(self, canvas: Canvas, panel: Panel, picture: Picture, y0: int) -> None:
        self.canvas = canvas
        self.panel = panel
        self.picture = picture
        self.colours = picture.colours
        self.y0 = y0
        self.lanes_top = y0 + TITLE_HEIGHT + panel.tab_height
        self.waits = list(join_waits(panel.waits))
        self.rows: list[tuple[TimelineLane, int, int]] = []
        y = self.lanes_top
        for lane in picture.lanes:
            self.rows.append((lane, y, y + lane_height(lane)))
            y += lane_height(lane) + LANE_GAP
        self.lanes_bottom = y - LANE_GAP

    def draw(self) -> None:
        self._draw_title()
        self._draw_background()
        for wait in self.waits:
            if wait.on_network:
                self._shade_wait(wait)
        for lane, y0, y1 in self.rows:
            self._draw_lane(lane, y0, y1)
        if not self.panel.events:
            _, y0, y1 = self.rows[0]
            middle = ((LEFT + RIGHT) / 2, (y0 + y1) / 2)
            self.canvas.text(middle, "nothing here takes time", 15, FAINT, "mm")
        for event in self.panel.events:
            if is_loop(event):
                self._draw_frame(event)

    def _draw_title(self) -> None:
        y, panel = self.y0 + 12, self.panel
        title = _truncate(panel.title, 18, text_width(panel.note, 15) + 24)
        self.canvas.text((MARGIN, y), title, 18)
        self.canvas.text((RIGHT, y), panel.note, 15, WAIT_COLOUR, "rm")

    def _draw_background(self) -> None:
        for lane, y0, y1 in self.rows:
            self.canvas.box((LEFT, y0, RIGHT, y1), PALE)
            name = _truncate(lane.name, 15, WIDTH - 2 * MARGIN - (LEFT - MARGIN - 12))
            self.canvas.text((LEFT - 12, (y0 + y1) / 2), name, 15, INK, "rm")
        for time, label in axis_ticks(self.panel.seconds):
            x = self.panel.x(time)
            self.canvas.line((x, self.lanes_top, x, self.lanes_bottom + 6), GRID)
            # Keep the last label on the canvas.
            x = min(x, WIDTH - 4 - text_width(label, LABEL) / 2)
            self.canvas.text((x, self.lanes_bottom + 18), label, LABEL, FAINT, "mm")

    def _shade_wait(self, wait: Wait) -> None:
        x0, x1 = self.panel.x(wait.start), self.panel.x(wait.end)
        if x1 - x0 >= 1:
            self.canvas.box((x0, self.lanes_top, x1, self.lanes_bottom), WAIT_BACKGROUND)

    def _draw_lane(self, lane: TimelineLane, y0: int, y1: int) -> None:
        events = [event for event in self.panel.events if event.body or lane.contains(event)]
        for event in events:
            if is_loop(event):
                self._draw_bands(event, lane, y0, y1)
        bars = join_bars(
            [event for event in events if not is_loop(event)],
            self.colours,
            NARROW / (RIGHT - LEFT) * self.panel.seconds,
        )
        waits = self.waits if lane is self.rows[0][0] else ()
        items: list[Bar | Wait] = [*bars, *waits]
        # Draw wide items last, so that narrow neighbours do not cover them.
        for item in sorted(items, key=lambda item: item.end - item.start):
            if isinstance(item, Bar):
                self._draw_bar(item, y0, y1)
            else:
                self._draw_wait(item, y0, y1)

    def _draw_bar(self, bar: Bar, y0: int, y1: int) -> None:
        x0, x1 = self.panel.x(bar.start), self.panel.x(bar.end)
        colour = self.colours[bar.name]
        width = x1 - x0
        # Separate bars by a thin white line if they are wide enough.
        gap = 0.5 if width >= 3 else 0.0
        self.canvas.box((x0, y0, x1 - gap, y1), colour, radius=3 if width >= 12 else 0)
        lines = _bar_label(bar, width - 8, y1 - y0)
        middle = (y0 + y1) / 2 - 9 * (len(lines) - 1)
        for index, line in enumerate(lines):
            point = ((x0 + x1) / 2, middle + 18 * index)
            self.canvas.text(point, line, LABEL, _text_colour(colour), "mm")

    def _draw_wait(self, wait: Wait, y0: int, y1: int) -> None:
        box = (self.panel.x(wait.start), y0, self.panel.x(wait.end), y1)
        if not wait.on_network:
            self.canvas.hatch(box, PALE, COPY_WAIT_COLOUR)
            return
        self.canvas.hatch(box, WAIT_BACKGROUND, WAIT_COLOUR)
        self._label_wait("waits", box)

    def _label_wait(self, text: str, box: tuple[float, float, float, float]) -> None:
        """Draw text on a white box, because it is illegible on hatching."""
        x0, y0, x1, y1 = box
        width = text_width(text, LABEL) + 10
        if x1 - x0 < width + 6 or y1 - y0 < 22:
            return
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        self.canvas.box((x - width / 2, y - 10, x + width / 2, y + 10), "#ffffff", radius=4)
        self.canvas.text((x, y), text, LABEL, WAIT_COLOUR, "mm")

    def _draw_bands(self, event: TimelineEvent, lane: TimelineLane, y0: int, y1: int) -> None:
        x0, x1 = self.panel.x(event.start), self.panel.x(event.end)
        body = event.body
        assert body is not None
        if not body.seconds:
            return
        seconds: dict[str, float] = {}
        for inner, executions in body.leaf_events():
            if lane.contains(inner):
                name = self.colours.legend_name(inner)
                seconds[name] = seconds.get(name, 0.0) + inner.seconds * executions
        y: float = y1
        for name, total in _longest_first(seconds):
            band_top = y - (y1 - y0) * min(1.0, total / body.seconds)
            self.canvas.box((x0, band_top, x1, y), self.colours[name])
            text = f"{name} {format_share(total / body.seconds)}"
            if y - band_top >= 15 and text_width(text, LABEL) + 8 <= x1 - x0:
                point = ((x0 + x1) / 2, (band_top + y) / 2)
                self.canvas.text(point, text, LABEL, _text_colour(self.colours[name]), "mm")
            y = band_top
        exposed = exposed_seconds(body)
        if lane.resources == (DEVICE,) and exposed:
            band_top = y - (y1 - y0) * exposed / body.seconds
            box = (x0, max(y0, band_top), x1, y)
            self.canvas.hatch(box, WAIT_BACKGROUND, WAIT_COLOUR)
            self._label_wait(f"waits {format_share(exposed / body.seconds)}", box)

    def _draw_frame(self, event: TimelineEvent) -> None:
        x0, x1 = self.panel.x(event.start), self.panel.x(event.end)
        if x1 - x0 < 4:
            return
        y0, y1 = self.lanes_top - self.panel.tab_height + 4, self.lanes_top - 2
        self.canvas.box((x0, self.lanes_top - 3, x1, self.lanes_bottom + 3), None, INK, 3)
        letter = self.picture.letters.get(loop_key(event), "")
        count = "×?" if has_unknown_trip_count(event) else f"×{event.trip_count:,}"
        assert event.body is not None
        seconds = format_seconds(event.body.seconds)
        name = f"{letter}  {count}" if letter else count
        label = _first_fitting((f"{name},  {seconds} a turn", name, count, letter), x1 - x0 - 12)
        if label:
            width = text_width(label, LABEL) + 14
            self.canvas.box((x0, y0, x0 + width, y1), INK, radius=3)
            self.canvas.text((x0 + 7, (y0 + y1) / 2), label, LABEL, "#ffffff")


def _legend_rows(entries: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Divide the legend into rows that fit on the canvas."""
    row: list[tuple[str, str]] = []
    for entry in entries:
        if row and sum(_entry_width(text) for _, text in [*row, entry]) > RIGHT - MARGIN:
            yield row
            row = []
        row.append(entry)
    if row:
        yield row


def _entry_width(text: str) -> float:
    return 30 + text_width(text, 15) + 20


def _bar_label(bar: Bar, width: float, height: int) -> list[str]:
    """Return the kind and source of a bar, as far as they fit."""
    if width < 20:
        return []
    line = f":{bar.source.rpartition(':')[2]}" if bar.source else ""
    if height >= DEVICE_HEIGHT and line and text_width(bar.kind, LABEL) <= width:
        return [bar.kind, bar.source if text_width(bar.source, LABEL) <= width else line]
    kind_and_source = f"{bar.kind}  {bar.source}".strip()
    label = _first_fitting((kind_and_source, bar.kind, line), width)
    return [label] if label else []


def _first_fitting(labels: Sequence[str], width: float) -> str:
    return next((label for label in labels if label and text_width(label, LABEL) <= width), "")


def _truncate(text: str, size: int, used_width: float = 0.0) -> str:
    """Shorten a text to the width of the canvas that is not yet used."""
    width = WIDTH - 2 * MARGIN - used_width
    if text_width(text, size) <= width:
        return text
    shorter = (text[:length] + "…" for length in range(len(text) - 1, 0, -1))
    return next((candidate for candidate in shorter if text_width(candidate, size) <= width), "")


def _pass_name(event: TimelineEvent) -> str:
    """Return the pass of a loop, if JAX's name for it shows it."""
    if "transpose(" in event.location.op_name:
        return "backward "
    return "forward " if "jvp(" in event.location.op_name else ""
