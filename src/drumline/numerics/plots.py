"""Errors as curves in an SVG file, for browsers and papers; upwards by powers of ten."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from drumline.numerics.mistakes import Mistake

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 210, 52, 56
COLOURS = ("#1a5fb4", "#c64600", "#26a269", "#813d9c", "#986a44", "#5e5c64", "#e5a50a", "#0e7a8a")
TICK_ROOM = 48
"""The width of a number under the x axis."""


@dataclass(frozen=True)
class Chart:
    """What is to be drawn.

    Attributes:
        title: above it.
        x: what goes to the right.
        y: what goes up.
        curves: by name, points with both numbers above zero; others are left out.
        labels: names for places on the x axis, instead of numbers.
        by_powers: whether the x axis goes by powers, too.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    labels: Mapping[float, str] = field(default_factory=dict)
    by_powers: bool = True


def write(path: str | Path, chart: Chart) -> None:
    """Draw into a file.

    Raises:
        Mistake: it is not named .svg, or cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise Mistake(f"{path}: it is drawn as SVG; name it {path.stem}.svg")
    try:
        path.write_text(svg_of(chart), encoding="utf-8")
    except OSError as trouble:
        raise Mistake(f"{path}: cannot be written: {trouble.strerror}") from None


def svg_of(chart: Chart) -> str:
    """The whole file."""
    curves = {
        name: [(x, y) for x, y in points if 0 < x < math.inf and 0 < y < math.inf]
        for name, points in chart.curves.items()
    }
    spots = [spot for points in curves.values() for spot in points] or [(1.0, 1.0)]
    scale = math.log10 if chart.by_powers else float
    across = _Axis.around([x for x, _ in spots], LEFT, WIDTH - RIGHT, scale)
    up = _Axis.of_powers([y for _, y in spots], HEIGHT - BOTTOM, TOP)
    ticks = chart.labels or _ticks(across, sorted({x for x, _ in spots}))
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}'"
        f" height='{HEIGHT}' font-family='Helvetica, Arial, sans-serif' font-size='13'"
        " fill='#1c1c1c'>",
        f"<title>{escape(chart.title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='28' font-size='16' font-weight='bold'>{escape(chart.title)}</text>",
        *_grid(up, across, ticks),
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 14}' text-anchor='middle'>"
        f"{escape(chart.x)}</text>",
        f"<text x='20' y='{(TOP + HEIGHT - BOTTOM) / 2}' text-anchor='middle' transform='rotate(-90"
        f" 20 {(TOP + HEIGHT - BOTTOM) / 2})'>{escape(chart.y)}</text>",
    ]
    for number, (name, points) in enumerate(curves.items()):
        spots = [(across.at(x), up.at(y)) for x, y in points]
        parts += _curve(number, len(curves) - 1 - number, name, spots)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    """From `low` to `high`, as `scale` has them, between two places."""

    low: float
    high: float
    begin: float
    end: float
    scale: Callable[[float], float]

    @staticmethod
    def around(
        values: Sequence[float], begin: float, end: float, scale: Callable[[float], float]
    ) -> _Axis:
        low, high = scale(min(values)), scale(max(values))
        return _Axis(low, high if high > low else low + 1, begin, end, scale)

    @staticmethod
    def of_powers(values: Sequence[float], begin: float, end: float) -> _Axis:
        """From one power of ten to another."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return _Axis(low, high if high > low else low + 1, begin, end, math.log10)

    def at(self, value: float) -> float:
        share = (self.scale(value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def _ticks(across: _Axis, places: Sequence[float]) -> dict[float, str]:
    """Those that have room, the first and the last among them."""
    kept = [places[0]]
    for place in places[1:-1]:
        room = across.at(place) - across.at(kept[-1]), across.at(places[-1]) - across.at(place)
        if min(room) >= TICK_ROOM:
            kept.append(place)
    return {place: f"{place:,g}" for place in dict.fromkeys([*kept, places[-1]])}


def _grid(up: _Axis, across: _Axis, ticks: Mapping[float, str]) -> Iterator[str]:
    step = max(1, round((up.high - up.low) / 8))
    for power in range(int(up.low), int(up.high) + 1, step):
        y = up.at(10.0**power)
        yield f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e4e4e4'/>"
        yield f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>1e{power:+03d}</text>"
    for value, text in ticks.items():
        x, y = across.at(value), HEIGHT - BOTTOM + 20
        yield f"<text x='{x:.1f}' y='{y}' text-anchor='middle'>{escape(text)}</text>"


def _curve(
    number: int, above: int, name: str, spots: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """One of several; it is wider than the `above` that are drawn over it, so all are seen."""
    colour = COLOURS[number % len(COLOURS)]
    style = f"stroke='{colour}' stroke-width='{1.5 + 1.5 * above:g}' fill='none'"
    if len(spots) > 1:
        yield f"<polyline points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in spots)}' {style}/>"
    for x, y in spots:
        yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{3 + above}' fill='{colour}'/>"
    x, y = WIDTH - RIGHT + 16, TOP + 8 + 20 * number
    yield f"<line x1='{x}' x2='{x + 26}' y1='{y}' y2='{y}' {style}/>"
    yield f"<text x='{x + 34}' y='{y + 4}'>{escape(name)}</text>"
