"""The timeline as a trace file, in the trace-event JSON that Perfetto (ui.perfetto.dev) opens.

A track for each resource. Of a loop, the first turn is written out and the others are one slice, so
that a file stays small; that slice says how long its resource is busy in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.errors import UserError
from drumline.inspect.compiling.axes import shown
from drumline.inspect.cost.timeline import DEVICE, Timeline, TimelineEvent
from drumline.inspect.formatting import duration
from drumline.inspect.lanes import (
    COLLECTIVES,
    exposed,
    is_loop,
    lanes,
    spread,
    turns_unknown,
    waits,
)

if TYPE_CHECKING:
    from drumline.inspect.estimate import Estimate

PROCESS = 1
"""Perfetto groups tracks by process; an estimate is one."""


@dataclass(frozen=True)
class TraceSlice:
    """A stretch of a track, in whole nanoseconds, as Perfetto counts them."""

    track: str
    name: str
    category: str
    start: int
    end: int
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceStretch:
    """The time that a timeline is laid into."""

    begin: float
    end: float

    def at(self, seconds: float) -> int:
        """A time within it; rounding must not carry it over the end."""
        return round(min(self.begin + seconds, self.end) * 1e9)


def write_trace(told: Estimate, path: Path) -> None:
    """Write a trace file, compressed where it is named .gz.

    Raises:
        UserError: it cannot be written.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    text = json.dumps(trace_of(told), ensure_ascii=False, separators=(",", ":")).encode()
    try:
        # Without the time of writing: equal estimates make equal files.
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as trouble:
        raise UserError(f"{path}: cannot be written: {trouble.strerror or trouble}") from None


def trace_of(told: Estimate) -> dict[str, Any]:
    """The whole file."""
    timeline = told.timeline
    slices = list(_slices(timeline, TraceStretch(0.0, timeline.seconds)))
    mesh = f" ({shown(told.mesh)})" if told.mesh else ""
    events = [_metadata("process_name", 0, f"{told.name} on {told.on}{mesh}")]
    number = 0
    for resource, name in _tracks(timeline):
        for row, kept in enumerate(_nested(one for one in slices if one.track == resource)):
            number += 1
            events.append(_metadata("thread_name", number, f"{name} ({row + 1})" if row else name))
            events.append(_metadata("thread_sort_index", number, number))
            events += [_written(one, number) for one in kept]
    events += _counter(timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": told.name,
            "on": told.on,
            "mesh": shown(told.mesh) if told.mesh else "",
            "seconds": told.seconds,
            "mfu": told.mfu,
            "bound": told.bound,
            "exposed_seconds": told.exposed,
            "compiled_by": told.compiled_by,
            "times": "the model's, not measured",
        },
    }


def _tracks(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Every resource in the order of the lanes, with its name."""
    for lane in lanes(timeline):
        for resource in lane.resources:
            way = resource.rpartition(" ")[2]
            yield resource, f"{lane.name}, {way}" if len(lane.resources) > 1 else lane.name


def _slices(timeline: Timeline, within: TraceStretch) -> Iterator[TraceSlice]:
    events = list(spread(timeline))
    for event in events:
        if is_loop(event):
            yield from _loop(event, within)
        else:
            for resource in event.resource.split("+"):
                yield _slice(event, resource, within)
    for wait in waits(events, timeline.seconds):
        where = f" at {wait.event.place.short}" if wait.event.place.short else ""
        yield TraceSlice(
            DEVICE,
            f"waits for {wait.event.kind}{where}",
            "wait",
            within.at(wait.start),
            within.at(wait.end),
            _facts(wait.event),
        )


def _slice(event: TimelineEvent, resource: str, within: TraceStretch) -> TraceSlice:
    name = " ".join(filter(None, (event.kind, event.place.short)))
    category = "collective" if event.kind in COLLECTIVES else "operation"
    start, end = within.at(event.start), within.at(event.end)
    return TraceSlice(resource, name, category, start, end, _facts(event))


def _facts(event: TimelineEvent) -> dict[str, Any]:
    """What a reader sees of a slice when they select it."""
    facts: dict[str, Any] = {
        "source": event.place.source,
        "scope": event.place.scope,
        "instruction": event.name,
        "axes": ", ".join(event.axes),
        "bytes": round(event.cost.bytes),
        "flops": round(event.cost.flops),
        "bound": event.cost.bound,
        "recomputed": event.cost.recomputed,
    }
    kept = {name: value for name, value in facts.items() if value}
    if event.kind in COLLECTIVES:
        kept["exposed"] = duration(event.exposed)
        kept["exposed_us"] = event.exposed * 1e6
    return kept


def _loop(event: TimelineEvent, within: TraceStretch) -> Iterator[TraceSlice]:
    inside = event.inside
    assert inside is not None
    begin = within.begin + event.start
    end = min(within.begin + event.end, within.end)
    first = TraceStretch(begin, min(begin + inside.seconds, end))
    whole = TraceStretch(begin, end)
    turns = "unknown" if turns_unknown(event) else event.turns
    facts = _facts(event) | {"turns": turns, "exposed_us": exposed(inside) * event.turns * 1e6}
    name = " ".join(
        filter(None, (f"loop ×{'?' if turns == 'unknown' else turns}", event.place.short))
    )
    yield TraceSlice(DEVICE, name, "loop", whole.at(0.0), whole.at(event.seconds), facts)
    yield TraceSlice(DEVICE, "turn 1", "turn", first.at(0.0), first.at(inside.seconds))
    yield from _slices(inside, first)
    if event.turns < 2:
        return
    rest = f"turns 2–{event.turns}" if event.turns > 2 else "turn 2"
    for resource, seconds in _busy(inside).items():
        yield TraceSlice(
            resource,
            rest,
            "turns",
            first.at(inside.seconds),
            whole.at(event.seconds),
            {
                "turns": event.turns - 1,
                "turn_us": inside.seconds * 1e6,
                "busy_us": seconds * (event.turns - 1) * 1e6,
            },
        )


def _busy(timeline: Timeline) -> dict[str, float]:
    """Seconds of each resource in one turn; the device's even if it only waits."""
    busy = {DEVICE: 0.0}
    for event, times in timeline.flat():
        for resource in event.resource.split("+"):
            busy[resource] = busy.get(resource, 0.0) + event.seconds * times
    return busy


def _nested(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Rows in which slices lie within one another or apart, as a track must have them.

    A collective that runs on while a loop begins would cross the loop's own.
    """
    rows: list[tuple[list[TraceSlice], list[int]]] = [([], [])]
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        for _, ends in rows:
            while ends and ends[-1] <= one.start:
                ends.pop()
        row = next((row for row in rows if not row[1] or one.end <= row[1][-1]), None)
        if row is None:
            row = ([], [])
            rows.append(row)
        row[0].append(one)
        row[1].append(one.end)
    return [kept for kept, _ in rows]


def _written(one: TraceSlice, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "name": one.name,
        "cat": one.category,
        "ts": one.start / 1000,
        "dur": (one.end - one.start) / 1000,
        "args": one.told,
    }


def _metadata(name: str, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": {key: value}}


def _counter(timeline: Timeline) -> list[dict[str, Any]]:
    """How long the device has waited for the network so far."""
    steps = [(0.0, 0.0), *_waited(timeline, 0.0)]
    if len(steps) == 1:
        return []
    total = 0.0
    points = []
    for at, more in steps:
        total += more
        points.append(
            {
                "ph": "C",
                "pid": PROCESS,
                "tid": 0,
                "name": "exposed communication (ms)",
                "ts": round(at * 1e9) / 1000,
                "args": {"ms": total * 1e3},
            }
        )
    return points


def _waited(timeline: Timeline, offset: float) -> Iterator[tuple[float, float]]:
    """When a wait ends, and how long it was; the later turns of a loop as one."""
    events = list(spread(timeline))
    ended: list[TimelineEvent | Any] = [e for e in events if is_loop(e)]
    ended += [wait for wait in waits(events, timeline.seconds) if wait.on_network]
    for one in sorted(ended, key=lambda one: one.end):
        if not isinstance(one, TimelineEvent):
            yield offset + one.end, one.seconds
        elif one.inside is not None and (each := exposed(one.inside)):
            yield from _waited(one.inside, offset + one.start)
            if one.turns > 1:
                yield offset + one.end, each * (one.turns - 1)
