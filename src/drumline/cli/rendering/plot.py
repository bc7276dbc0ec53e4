"""Plots of a job's metrics, as braille characters for a terminal and as SVG. Pure functions.

`draw` makes a Drawing from the server's history of a job; `render_chart` and `svg` render it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import typer

from drumline.cli.rendering.text import display_width, plural, sanitize, truncate
from drumline.cli.rendering.views import is_number

History = Mapping[str, Any]
Point = tuple[float, float]

STEP = "step"
"""The metric that is drawn over time. All others are drawn over the step."""
_INTERRUPTIONS = {
    "preempted": "preempted",
    "program failed": "failed",
    "set-up failed": "set-up failed",
    "stuck": "stuck",
    "bad host": "bad host",
    "left": "left",
    "cancelled": "cancelled",
}
_TIME_UNITS = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86400.0, "days"))


class NothingToDraw(Exception):
    """The job has not reported the metric. The text is the message for the user."""


@dataclass(frozen=True)
class Curve:
    """The curve of an attempt, as segments without gaps."""

    attempt: int
    segments: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class Interruption:
    """The end of an attempt before the job was done."""

    x: float
    label: str


@dataclass(frozen=True)
class Axis:
    """An axis: its label, range and ticks."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def tick_label(self, tick: float) -> str:
        """Return a label such as `20,000`, `0.25` or `1e-05`."""
        if tick and not 1e-4 <= abs(tick) < 1e7:
            return f"{tick:.3g}"
        gap = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
        return f"{tick:,.{decimals}f}"


@dataclass(frozen=True)
class Drawing:
    """A plot, independent of its output format."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    interruptions: tuple[Interruption, ...]
    rerun_steps: tuple[tuple[float, float], ...]
    """Steps that ran twice: from the step that an attempt resumed from to the last one before."""
    notes: tuple[str, ...]


# --- drawing ----------------------------------------------------------------------------------


def metrics_in(history: History) -> list[str]:
    """Return the metrics of the job in the order of their first report."""
    names = dict.fromkeys(name for point in history["points"] for name in point["metrics"])
    return [*names, STEP]


def draw(history: History, metric: str | None) -> Drawing:
    """Draw a metric. The default is the loss, or else the step over time."""
    job, points = history["job"], history["points"]
    if not points:
        raise NothingToDraw(
            f"{job['id']} has not reported any step yet; a program reports steps with"
            " drumline.heartbeat(step=…), or with a progress pattern in its job file"
        )
    names = metrics_in(history)
    selected = metric or ("loss" if "loss" in names else STEP)
    if selected not in names:
        raise NothingToDraw(
            f"--metric {sanitize(selected)}: {job['id']} does not report it; it reports "
            f"{', '.join(map(sanitize, names))}"
        )
    over_time = selected == STEP
    start = points[0]["time"]
    unit_seconds, unit = _time_unit(points[-1]["time"] - start) if over_time else (1.0, STEP)
    curves = tuple(
        Curve(attempt, _segments(_point(point, selected, start, unit_seconds) for point in group))
        for attempt, group in groupby(points, key=lambda point: int(point["attempt"]))
    )
    drawn = [point for curve in curves for segment in curve.segments for point in segment]
    if not drawn:
        raise NothingToDraw(f"{job['id']} has not reported a number for {sanitize(selected)}")
    interruptions = tuple(_interruptions(history, (start, unit_seconds) if over_time else None))
    xs = [x for x, _ in drawn] + [interruption.x for interruption in interruptions]
    return Drawing(
        title=f"{job['id']} {sanitize(job['name'])} · {sanitize(selected)}",
        x=_axis(unit, min(xs), max(xs), integer=not over_time),
        y=_axis(sanitize(selected), *_padded_range([y for _, y in drawn])),
        curves=curves,
        interruptions=interruptions,
        rerun_steps=() if over_time else tuple(_rerun_steps(history["attempts"])),
        notes=_notes(history["attempts"], history.get("steps_again")),
    )


def _point(
    report: Mapping[str, Any], metric: str, start: float, unit_seconds: float
) -> Point | None:
    if metric == STEP:
        return (report["time"] - start) / unit_seconds, float(report["step"])
    value = report["metrics"].get(metric)
    return (float(report["step"]), float(value)) if is_number(value) else None


def _segments(points: Iterable[Point | None]) -> tuple[tuple[Point, ...], ...]:
    """Split points into segments. None is a gap."""
    grouped = groupby(points, key=lambda point: point is not None)
    return tuple(tuple(point for point in run if point) for present, run in grouped if present)


def _time_unit(seconds: float) -> tuple[float, str]:
    """Return the most readable unit for a duration."""
    units = reversed(_TIME_UNITS)
    return next((unit for unit in units if seconds >= 2 * unit[0]), _TIME_UNITS[0])


def _interruptions(history: History, time: tuple[float, float] | None) -> Iterable[Interruption]:
    for attempt in history["attempts"]:
        steps = attempt.get("course")
        label = _INTERRUPTIONS.get(attempt.get("outcome") or "")
        if not steps or not label:
            continue
        if time is None:
            yield Interruption(float(steps["step"]), label)
        else:
            yield Interruption((steps["stepped_at"] - time[0]) / time[1], label)


def _rerun_steps(attempts: Sequence[Mapping[str, Any]]) -> Iterable[tuple[float, float]]:
    last_step: float | None = None
    for attempt in attempts:
        steps = attempt.get("course")
        if not steps:
            continue
        resumed = steps.get("resumed")
        if last_step is not None and resumed is not None and resumed < last_step:
            yield float(resumed), last_step
        last_step = float(steps["step"])


def _notes(attempts: Sequence[Mapping[str, Any]], steps_again: object) -> tuple[str, ...]:
    """Return notes such as `3 attempts`, `2 preempted` and `11 steps repeated`.

    They count all attempts, as `show` does, also those that reported no step.
    """
    outcomes = [_INTERRUPTIONS.get(attempt.get("outcome") or "") for attempt in attempts]
    labels = [label for label in outcomes if label]
    notes = [plural(len(attempts), "attempt")]
    notes += [f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)]
    if is_number(steps_again) and labels:
        notes.append(f"{plural(int(steps_again), 'step')} repeated")
    return tuple(notes)


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range a little larger than the values, below zero only if they are."""
    low, high = min(values), max(values)
    padding = 0.04 * (high - low)
    return (max(0.0, low - padding) if low >= 0 else low - padding), high + padding


def _axis(label: str, low: float, high: float, integer: bool = False) -> Axis:
    if high <= low:
        padding = abs(low) / 2 or 1.0
        low, high = low - padding, high + padding
    return Axis(label, low, high, ticks(low, high, integer=integer))


def ticks(low: float, high: float, max_ticks: int = 6, integer: bool = False) -> tuple[float, ...]:
    """Return round values in a range: multiples of 1, 2 or 5 times a power of ten."""
    min_gap = (high - low) / max_ticks
    scale = 10.0 ** math.floor(math.log10(min_gap))
    gap = next(scale * size for size in (1, 2, 5, 10) if scale * size >= min_gap * (1 - 1e-9))
    if integer:
        gap = max(gap, 1.0)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return tuple(index * gap for index in range(first, last + 1))


# --- terminal ---------------------------------------------------------------------------------

MIN_COLUMNS, MIN_ROWS = 20, 4
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_CHART_COLOURS = ("cyan", "blue")
_INTERRUPTION_MARK, _RERUN_MARK = "┊", "━"


class _Canvas:
    """Braille characters of two by four dots, each in the colour of the newest attempt there."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._curve = [[0] * columns for _ in range(rows)]

    def line(self, begin: Point, end: Point, curve: int) -> None:
        """Draw a line of dots. Coordinates are from 0 to 1, from the lower left."""
        x_dots, y_dots = 2 * self.columns - 1, 4 * self.rows - 1
        x0, y0, x1, y1 = begin[0] * x_dots, begin[1] * y_dots, end[0] * x_dots, end[1] * y_dots
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for index in range(steps + 1):
            x = round(x0 + (x1 - x0) * index / steps)
            y = y_dots - round(y0 + (y1 - y0) * index / steps)
            if 0 <= x <= x_dots and 0 <= y <= y_dots:
                self._dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                self._curve[y // 4][x // 2] = curve

    def row(self, index: int, interruptions: set[int], colour: bool) -> str:
        """Return one line of text. Interruptions are visible where no curve is drawn."""
        cells = []
        for column, dots in enumerate(self._dots[index]):
            if dots:
                cell = chr(0x2800 + dots)
                shade = _CHART_COLOURS[self._curve[index][column] % 2]
                cells.append(typer.style(cell, fg=shade) if colour else cell)
            else:
                mark = _INTERRUPTION_MARK if column in interruptions else " "
                cells.append(typer.style(mark, fg="yellow") if colour and mark != " " else mark)
        return "".join(cells)


def render_chart(drawing: Drawing, columns: int, rows: int, colour: bool = False) -> list[str]:
    """Render a drawing with its axes in the given number of columns and rows."""
    labels = {tick: drawing.y.tick_label(tick) for tick in drawing.y.ticks}
    margin = max(map(display_width, labels.values()), default=0) + 1
    canvas = _Canvas(max(columns - margin - 1, MIN_COLUMNS), max(rows - 4, MIN_ROWS))
    for index, curve in enumerate(drawing.curves):
        for segment in curve.segments:
            points = [(drawing.x.fraction(x), drawing.y.fraction(y)) for x, y in segment]
            for begin, end in zip(points, points[1:] or points, strict=False):
                canvas.line(begin, end, index)
    label_of_row = {
        canvas.rows - 1 - round(drawing.y.fraction(tick) * (canvas.rows - 1)): text
        for tick, text in labels.items()
    }
    interruptions = {
        _column(drawing.x.fraction(interruption.x), canvas.columns)
        for interruption in drawing.interruptions
    }
    title = truncate(drawing.title, columns)
    lines = [typer.style(title, bold=True) if colour else title]
    for row in range(canvas.rows):
        label = label_of_row.get(row, "")
        edge = "┤" if label else "│"
        lines.append(f"{label:>{margin}}{edge}{canvas.row(row, interruptions, colour)}".rstrip())
    lines += _render_x_axis(drawing, margin, canvas.columns)
    if len(drawing.notes) > 1 or len(drawing.curves) > 1:
        marks = f"{_INTERRUPTION_MARK} " if drawing.interruptions else ""
        legend = marks + " · ".join(drawing.notes)
        legend += f" ({_RERUN_MARK})" if drawing.rerun_steps else ""
        lines.append(" " * (margin + 1) + truncate(legend, canvas.columns))
    return lines


def _column(fraction: float, columns: int) -> int:
    return min(max(round(fraction * (2 * columns - 1)) // 2, 0), columns - 1)


def _render_x_axis(drawing: Drawing, margin: int, columns: int) -> list[str]:
    """Return the axis, with as many tick labels as are legible, and its label."""
    edge, text = ["─"] * columns, [" "] * columns
    axis_label = drawing.x.label
    free_from, free_to = 0, columns - len(axis_label) - 1
    for tick in drawing.x.ticks:
        column = _column(drawing.x.fraction(tick), columns)
        edge[column] = "┴"
        label = drawing.x.tick_label(tick)
        start = min(max(column - len(label) // 2, 0), columns - len(label))
        if start >= free_from and start + len(label) < free_to:
            text[start : start + len(label)] = label
            free_from = start + len(label) + 1
    for begin, end in drawing.rerun_steps:
        first = _column(drawing.x.fraction(begin), columns)
        last = _column(drawing.x.fraction(end), columns)
        edge[first : last + 1] = _RERUN_MARK * (last + 1 - first)
    text[columns - len(axis_label) :] = axis_label
    return [" " * margin + "└" + "".join(edge), " " * (margin + 1) + "".join(text).rstrip()]


# --- SVG --------------------------------------------------------------------------------------

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 64, 56
_SVG_COLOURS = ("#1a5fb4", "#62a0ea")
"""The colours of attempts. They alternate, so that the start of each attempt is visible."""
_INTERRUPTION_COLOUR, _RERUN_COLOUR, _INK, _GRID = "#c64600", "#f8e4c0", "#1c1c1c", "#e4e4e4"
_FONT = "font-family='Helvetica, Arial, sans-serif'"
LABEL_WIDTH = 66
"""The width of an interruption's label. An interruption that follows closer has only its line."""


def svg(drawing: Drawing) -> str:
    """Render a drawing as an SVG file."""
    title = escape(drawing.title)
    elements = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'"
        f" width='{WIDTH}' height='{HEIGHT}' {_FONT} font-size='13' fill='{_INK}'>",
        f"<title>{title}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='26' font-size='16' font-weight='bold'>{title}</text>",
        f"<text x='{LEFT}' y='46' fill='#5e5c64'>{escape(' · '.join(drawing.notes))}</text>",
        *_svg_rerun_steps(drawing),
        *_svg_axes(drawing),
        *_svg_interruptions(drawing),
        *_svg_curves(drawing),
        "</svg>",
    ]
    return "\n".join(elements) + "\n"


def _svg_position(drawing: Drawing, point: Point) -> Point:
    x = LEFT + drawing.x.fraction(point[0]) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - drawing.y.fraction(point[1]) * (HEIGHT - TOP - BOTTOM)
    return x, y


def _svg_x(drawing: Drawing, x: float) -> float:
    return _svg_position(drawing, (x, drawing.y.low))[0]


def _svg_rerun_steps(drawing: Drawing) -> list[str]:
    """Shade the repeated steps, with a minimum width so that they are visible."""
    if not drawing.rerun_steps:
        return []
    right = WIDTH - RIGHT
    elements = [
        f"<rect x='{right - 12}' y='35' width='12' height='12' fill='{_RERUN_COLOUR}'/>",
        f"<text x='{right - 18}' y='46' text-anchor='end' fill='#5e5c64'>repeated</text>",
    ]
    for begin, end in drawing.rerun_steps:
        first, last = _svg_x(drawing, begin), _svg_x(drawing, end)
        width = max(last - first, 2.0)
        elements.append(
            f"<rect x='{first:.1f}' y='{TOP}' width='{width:.1f}' height='{HEIGHT - TOP - BOTTOM}'"
            f" fill='{_RERUN_COLOUR}'><title>steps {begin:,.0f} to {end:,.0f} repeated</title>"
            "</rect>"
        )
    return elements


def _svg_axes(drawing: Drawing) -> list[str]:
    low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    elements = []
    for tick in drawing.y.ticks:
        y = _svg_position(drawing, (drawing.x.low, tick))[1]
        label = escape(drawing.y.tick_label(tick))
        elements += [
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{right}' y2='{y:.1f}' stroke='{_GRID}'/>",
            f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>",
        ]
    for tick in drawing.x.ticks:
        x = _svg_x(drawing, tick)
        label = escape(drawing.x.tick_label(tick))
        elements += [
            f"<line x1='{x:.1f}' y1='{low}' x2='{x:.1f}' y2='{low + 5}' stroke='{_INK}'/>",
            f"<text x='{x:.1f}' y='{low + 20}' text-anchor='middle'>{label}</text>",
        ]
    middle = (TOP + low) / 2
    elements += [
        f"<path d='M{LEFT} {TOP}V{low}H{right}' fill='none' stroke='{_INK}'/>",
        f"<text x='{(LEFT + right) / 2:.0f}' y='{HEIGHT - 14}' text-anchor='middle'>"
        f"{escape(drawing.x.label)}</text>",
        f"<text transform='translate(18 {middle:.0f}) rotate(-90)' text-anchor='middle'>"
        f"{escape(drawing.y.label)}</text>",
    ]
    return elements


def _svg_interruptions(drawing: Drawing) -> list[str]:
    elements: list[str] = []
    free_from = 0.0
    for interruption in sorted(drawing.interruptions, key=lambda interruption: interruption.x):
        x = _svg_x(drawing, interruption.x)
        elements.append(
            f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}'"
            f" stroke='{_INTERRUPTION_COLOUR}' stroke-dasharray='4 3'/>"
        )
        if x >= free_from:
            # Near the right edge the label is on the left of its line.
            anchor, gap = ("end", -4) if x > WIDTH - RIGHT - LABEL_WIDTH else ("start", 4)
            elements.append(
                f"<text x='{x + gap:.1f}' y='{TOP + 12}' font-size='11'"
                f" fill='{_INTERRUPTION_COLOUR}' text-anchor='{anchor}'>"
                f"{escape(interruption.label)}</text>"
            )
        free_from = max(free_from, x + LABEL_WIDTH)
    return elements


def _svg_curves(drawing: Drawing) -> list[str]:
    elements = []
    for index, curve in enumerate(drawing.curves):
        colour = _SVG_COLOURS[index % 2]
        for segment in curve.segments:
            points = [_svg_position(drawing, point) for point in segment]
            if len(points) == 1:
                x, y = points[0]
                elements.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{colour}'/>")
                continue
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            elements.append(
                f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='1.6'"
                f" stroke-linejoin='round'><title>attempt {curve.attempt}</title></path>"
            )
    return elements
