"""Plot errors as curves in an SVG file, with a logarithmic y axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from drumline.errors import UserError

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 210, 52, 56
COLOURS = ("#1a5fb4", "#c64600", "#26a269", "#813d9c", "#986a44", "#5e5c64", "#e5a50a", "#0e7a8a")
TICK_WIDTH = 48
"""The width of a label below the x axis."""


@dataclass(frozen=True)
class Chart:
    """The contents of a plot.

    Attributes:
        title: The title above the plot.
        x: The label of the x axis.
        y: The label of the y axis.
        curves: The points of the curves by name. Points with a coordinate that is not positive are
            left out.
        labels: Labels of positions on the x axis, instead of numbers.
        log_x: True if the x axis is logarithmic.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    labels: Mapping[float, str] = field(default_factory=dict)
    log_x: bool = True


def write_svg(path: str | Path, chart: Chart) -> None:
    """Write a chart to an SVG file.

    Raises:
        UserError: The file is not named .svg or cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise UserError(f"{path}: plots are SVG files; name it {path.stem}.svg")
    try:
        path.write_text(render_svg(chart), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def render_svg(chart: Chart) -> str:
    """Return a chart as the text of an SVG file."""
    curves = {
        name: [(x, y) for x, y in points if 0 < x < math.inf and 0 < y < math.inf]
        for name, points in chart.curves.items()
    }
    points = [point for curve in curves.values() for point in curve] or [(1.0, 1.0)]
    scale = math.log10 if chart.log_x else float
    x_axis = _Axis.from_values([x for x, _ in points], LEFT, WIDTH - RIGHT, scale)
    y_axis = _Axis.from_powers([y for _, y in points], HEIGHT - BOTTOM, TOP)
    ticks = chart.labels or _select_ticks(x_axis, sorted({x for x, _ in points}))
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}'"
        f" height='{HEIGHT}' font-family='Helvetica, Arial, sans-serif' font-size='13'"
        " fill='#1c1c1c'>",
        f"<title>{escape(chart.title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='28' font-size='16' font-weight='bold'>{escape(chart.title)}</text>",
        *_draw_grid(x_axis, y_axis, ticks),
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 14}' text-anchor='middle'>"
        f"{escape(chart.x)}</text>",
        f"<text x='20' y='{(TOP + HEIGHT - BOTTOM) / 2}' text-anchor='middle' transform='rotate(-90"
        f" 20 {(TOP + HEIGHT - BOTTOM) / 2})'>{escape(chart.y)}</text>",
    ]
    for index, (name, curve) in enumerate(curves.items()):
        pixels = [(x_axis.to_pixel(x), y_axis.to_pixel(y)) for x, y in curve]
        parts += _draw_curve(index, len(curves) - 1 - index, name, pixels)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`, in the units of `scale`, between two pixels."""

    low: float
    high: float
    first_pixel: float
    last_pixel: float
    scale: Callable[[float], float]

    @staticmethod
    def from_values(
        values: Sequence[float], first: float, last: float, scale: Callable[[float], float]
    ) -> _Axis:
        low, high = scale(min(values)), scale(max(values))
        return _Axis(low, high if high > low else low + 1, first, last, scale)

    @staticmethod
    def from_powers(values: Sequence[float], first: float, last: float) -> _Axis:
        """Return a logarithmic axis that starts and ends at powers of ten."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return _Axis(low, high if high > low else low + 1, first, last, math.log10)

    def to_pixel(self, value: float) -> float:
        fraction = (self.scale(value) - self.low) / (self.high - self.low)
        return self.first_pixel + fraction * (self.last_pixel - self.first_pixel)


def _select_ticks(axis: _Axis, values: Sequence[float]) -> dict[float, str]:
    """Return labels for the values that have enough space, including the first and the last."""
    ticks = [values[0]]
    for value in values[1:-1]:
        space_before = axis.to_pixel(value) - axis.to_pixel(ticks[-1])
        space_after = axis.to_pixel(values[-1]) - axis.to_pixel(value)
        if min(space_before, space_after) >= TICK_WIDTH:
            ticks.append(value)
    return {tick: f"{tick:,g}" for tick in dict.fromkeys([*ticks, values[-1]])}


def _draw_grid(x_axis: _Axis, y_axis: _Axis, ticks: Mapping[float, str]) -> Iterator[str]:
    step = max(1, round((y_axis.high - y_axis.low) / 8))
    for power in range(int(y_axis.low), int(y_axis.high) + 1, step):
        y = y_axis.to_pixel(10.0**power)
        yield f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e4e4e4'/>"
        yield f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>1e{power:+03d}</text>"
    for value, text in ticks.items():
        x, y = x_axis.to_pixel(value), HEIGHT - BOTTOM + 20
        yield f"<text x='{x:.1f}' y='{y}' text-anchor='middle'>{escape(text)}</text>"


def _draw_curve(
    index: int, later_curves: int, name: str, points: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """Draw a curve, wider than the later curves that cover it, so that all are visible."""
    colour = COLOURS[index % len(COLOURS)]
    style = f"stroke='{colour}' stroke-width='{1.5 + 1.5 * later_curves:g}' fill='none'"
    if len(points) > 1:
        yield f"<polyline points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}' {style}/>"
    for x, y in points:
        yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{3 + later_curves}' fill='{colour}'/>"
    x, y = WIDTH - RIGHT + 16, TOP + 8 + 20 * index
    yield f"<line x1='{x}' x2='{x + 26}' y1='{y}' y2='{y}' {style}/>"
    yield f"<text x='{x + 34}' y='{y + 4}'>{escape(name)}</text>"
