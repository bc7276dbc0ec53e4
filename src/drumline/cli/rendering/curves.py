"""What `plot` draws, on a terminal or as SVG: curves by attempt, interruptions, axes.

Pure functions from the server's history of a job.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from drumline.cli.rendering.text import count, harmless
from drumline.cli.rendering.views import is_number

History = Mapping[str, Any]
Spot = tuple[float, float]

STEP = "step"
"""The metric that is drawn over time; all others are drawn over it."""
_BREAKS = {
    "preempted": "preempted",
    "program failed": "failed",
    "set-up failed": "set-up failed",
    "stuck": "stuck",
    "bad host": "bad host",
    "left": "left",
    "cancelled": "cancelled",
}
_UNITS = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86400.0, "days"))


class NothingToDraw(Exception):
    """The job has not reported the metric; the text is the sentence to show."""


@dataclass(frozen=True)
class Curve:
    """The curve of an attempt: its points in runs without a gap."""

    attempt: int
    runs: tuple[tuple[Spot, ...], ...]


@dataclass(frozen=True)
class Break:
    """Where an attempt ended before the work was done."""

    x: float
    what: str


@dataclass(frozen=True)
class Axis:
    """The label of an axis, its range, and its ticks."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def text(self, tick: float) -> str:
        """The label of a tick: `20,000`, `0.25`, `1e-05`."""
        if tick and not 1e-4 <= abs(tick) < 1e7:
            return f"{tick:.3g}"
        gap = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
        return f"{tick:,.{decimals}f}"


@dataclass(frozen=True)
class Drawing:
    """A whole drawing."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    breaks: tuple[Break, ...]
    again: tuple[tuple[float, float], ...]
    """Steps that ran twice: from where an attempt resumed to where the last one had come."""
    notes: tuple[str, ...]


def metrics_in(history: History) -> list[str]:
    """The metrics of the job, in the order in which it first reported them."""
    names = dict.fromkeys(name for point in history["points"] for name in point["metrics"])
    return [*names, STEP]


def draw(history: History, metric: str | None) -> Drawing:
    """The drawing of a metric; None is the loss, or the step over time."""
    job, points = history["job"], history["points"]
    if not points:
        raise NothingToDraw(
            f"{job['id']} has told no step yet; a program tells them by drumline.heartbeat(step=…),"
            " or its job file has a progress pattern"
        )
    names = metrics_in(history)
    chosen = metric or ("loss" if "loss" in names else STEP)
    if chosen not in names:
        raise NothingToDraw(
            f"--metric {harmless(chosen)}: {job['id']} does not tell it; it tells "
            f"{', '.join(map(harmless, names))}"
        )
    over_time = chosen == STEP
    begin = points[0]["time"]
    size, unit = _unit(points[-1]["time"] - begin) if over_time else (1.0, STEP)
    curves = tuple(
        Curve(number, _runs(_spot(point, chosen, begin, size) for point in group))
        for number, group in groupby(points, key=lambda point: int(point["attempt"]))
    )
    spots = [spot for curve in curves for run in curve.runs for spot in run]
    if not spots:
        raise NothingToDraw(f"{job['id']} has told no {harmless(chosen)} that is a number")
    breaks = tuple(_breaks(history, (begin, size) if over_time else None))
    again = () if over_time else tuple(_again(history["attempts"]))
    xs = [x for x, _ in spots] + [interruption.x for interruption in breaks]
    return Drawing(
        title=f"{job['id']} {harmless(job['name'])} · {harmless(chosen)}",
        x=_axis(unit, min(xs), max(xs), whole=not over_time),
        y=_axis(harmless(chosen), *_padded([y for _, y in spots])),
        curves=curves,
        breaks=breaks,
        again=again,
        notes=_notes(curves, breaks, history.get("steps_again")),
    )


def _spot(point: Mapping[str, Any], metric: str, begin: float, size: float) -> Spot | None:
    if metric == STEP:
        return (point["time"] - begin) / size, float(point["step"])
    value = point["metrics"].get(metric)
    return (float(point["step"]), float(value)) if is_number(value) else None


def _runs(spots: Iterable[Spot | None]) -> tuple[tuple[Spot, ...], ...]:
    """Points in runs without a gap; a missing point is a gap."""
    grouped = groupby(spots, key=lambda spot: spot is not None)
    return tuple(tuple(spot for spot in run if spot) for there, run in grouped if there)


def _unit(seconds: float) -> tuple[float, str]:
    """The most readable unit for a duration."""
    return next((unit for unit in reversed(_UNITS) if seconds >= 2 * unit[0]), _UNITS[0])


def _breaks(history: History, time: tuple[float, float] | None) -> Iterable[Break]:
    for attempt in history["attempts"]:
        course, what = attempt.get("course"), _BREAKS.get(attempt.get("outcome") or "")
        if not course or not what:
            continue
        if time is None:
            yield Break(float(course["step"]), what)
        else:
            yield Break((course["stepped_at"] - time[0]) / time[1], what)


def _again(attempts: Sequence[Mapping[str, Any]]) -> Iterable[tuple[float, float]]:
    reached: float | None = None
    for attempt in attempts:
        course = attempt.get("course")
        if not course:
            continue
        resumed = course.get("resumed")
        if reached is not None and resumed is not None and resumed < reached:
            yield float(resumed), reached
        reached = float(course["step"])


def _notes(curves: Sequence[Curve], breaks: Sequence[Break], again: object) -> tuple[str, ...]:
    """`3 attempts`, `2 preempted`, `11 steps run again`."""
    words = dict.fromkeys(interruption.what for interruption in breaks)
    notes = [count(len({curve.attempt for curve in curves}), "attempt")]
    notes += [
        f"{sum(interruption.what == word for interruption in breaks)} {word}" for word in words
    ]
    if is_number(again) and breaks:
        notes.append(f"{count(int(again), 'step')} run again")
    return tuple(notes)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """A range a little wider than the values, below zero only if they are."""
    low, high = min(values), max(values)
    room = 0.04 * (high - low)
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _axis(label: str, low: float, high: float, whole: bool = False) -> Axis:
    if high <= low:
        room = abs(low) / 2 or 1.0
        low, high = low - room, high + room
    return Axis(label, low, high, ticks(low, high, whole=whole))


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> tuple[float, ...]:
    """Round values in a range: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(rough))
    gap = next(scale * size for size in (1, 2, 5, 10) if scale * size >= rough * (1 - 1e-9))
    if whole:
        gap = max(gap, 1.0)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return tuple(number * gap for number in range(first, last + 1))
