"""Write a timeline as a trace file in the trace-event JSON of Perfetto (ui.perfetto.dev).

Each resource is a track. Of a loop, the file has the first iteration in full and one slice for the
others, so that it stays small. That slice records the busy time of its resource.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.errors import UserError
from drumline.inspect.compiling.axes import format_mesh
from drumline.inspect.cost.timeline import DEVICE, Timeline, TimelineEvent
from drumline.inspect.formatting import format_seconds
from drumline.inspect.lanes import (
    COLLECTIVES,
    Wait,
    exposed_seconds,
    find_lanes,
    find_waits,
    flatten_calls,
    has_unknown_trip_count,
    is_loop,
)

if TYPE_CHECKING:
    from drumline.inspect.estimate import Estimate

PROCESS = 1
"""The process id of all tracks. Perfetto groups tracks by process."""


@dataclass(frozen=True)
class TraceSlice:
    """A bar on a track. Times are whole nanoseconds, as in Perfetto."""

    track: str
    name: str
    category: str
    start: int
    end: int
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimeWindow:
    """The interval of a timeline in the trace."""

    start: float
    end: float

    def nanoseconds(self, seconds: float) -> int:
        """Convert a time on the timeline to the trace, limited to the end of the window."""
        return round(min(self.start + seconds, self.end) * 1e9)


def write_trace(estimate: Estimate, path: Path) -> None:
    """Write a trace file. A name that ends in .gz compresses it.

    Raises:
        UserError: the file cannot be written.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    text = json.dumps(build_trace(estimate), ensure_ascii=False, separators=(",", ":")).encode()
    try:
        # Without a timestamp, equal estimates give equal files.
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def build_trace(estimate: Estimate) -> dict[str, Any]:
    """Return the content of the trace file."""
    timeline = estimate.timeline
    slices = list(_slices(timeline, TimeWindow(0.0, timeline.seconds)))
    mesh = f" ({format_mesh(estimate.mesh)})" if estimate.mesh else ""
    events = [_metadata("process_name", 0, f"{estimate.name} on {estimate.on}{mesh}")]
    thread = 0
    for resource, name in _tracks(timeline):
        rows = _split_into_rows(item for item in slices if item.track == resource)
        for row, members in enumerate(rows):
            thread += 1
            events.append(_metadata("thread_name", thread, f"{name} ({row + 1})" if row else name))
            events.append(_metadata("thread_sort_index", thread, thread))
            events += [_slice_event(item, thread) for item in members]
    events += _exposed_counter(timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": estimate.name,
            "on": estimate.on,
            "mesh": format_mesh(estimate.mesh) if estimate.mesh else "",
            "seconds": estimate.seconds,
            "mfu": estimate.mfu,
            "bound": estimate.bound,
            "exposed_seconds": estimate.exposed,
            "compiled_by": estimate.compiled_by,
            "times": "the model's, not measured",
        },
    }


def _tracks(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Yield the resources with their names, in the order of the lanes."""
    for lane in find_lanes(timeline):
        for resource in lane.resources:
            direction = resource.rpartition(" ")[2]
            yield resource, f"{lane.name}, {direction}" if len(lane.resources) > 1 else lane.name


def _slices(timeline: Timeline, window: TimeWindow) -> Iterator[TraceSlice]:
    events = list(flatten_calls(timeline))
    for event in events:
        if is_loop(event):
            yield from _loop_slices(event, window)
        else:
            for resource in event.resource.split("+"):
                yield _slice(event, resource, window)
    for wait in find_waits(events, timeline.seconds):
        source = f" at {wait.event.location.short}" if wait.event.location.short else ""
        yield TraceSlice(
            DEVICE,
            f"waits for {wait.event.kind}{source}",
            "wait",
            window.nanoseconds(wait.start),
            window.nanoseconds(wait.end),
            _arguments(wait.event),
        )


def _slice(event: TimelineEvent, resource: str, window: TimeWindow) -> TraceSlice:
    name = " ".join(filter(None, (event.kind, event.location.short)))
    category = "collective" if event.kind in COLLECTIVES else "operation"
    start, end = window.nanoseconds(event.start), window.nanoseconds(event.end)
    return TraceSlice(resource, name, category, start, end, _arguments(event))


def _arguments(event: TimelineEvent) -> dict[str, Any]:
    """Return the details that Perfetto shows for a selected slice."""
    details: dict[str, Any] = {
        "source": event.location.source,
        "scope": event.location.scope,
        "instruction": event.name,
        "axes": ", ".join(event.axes),
        "bytes": round(event.cost.bytes),
        "flops": round(event.cost.flops),
        "bound": event.cost.bound,
        "recomputed": event.cost.recomputed,
    }
    arguments = {name: value for name, value in details.items() if value}
    if event.kind in COLLECTIVES:
        arguments["exposed"] = format_seconds(event.exposed)
        arguments["exposed_us"] = event.exposed * 1e6
    return arguments


def _loop_slices(event: TimelineEvent, window: TimeWindow) -> Iterator[TraceSlice]:
    body = event.body
    assert body is not None
    start = window.start + event.start
    end = min(window.start + event.end, window.end)
    loop_window = TimeWindow(start, end)
    first_window = TimeWindow(start, min(start + body.seconds, end))
    count = "unknown" if has_unknown_trip_count(event) else event.trip_count
    arguments = _arguments(event) | {
        "turns": count,
        "exposed_us": exposed_seconds(body) * event.trip_count * 1e6,
    }
    title = f"loop ×{'?' if count == 'unknown' else count}"
    name = " ".join(filter(None, (title, event.location.short)))
    loop_end = loop_window.nanoseconds(event.seconds)
    first_start = first_window.nanoseconds(0.0)
    first_end = first_window.nanoseconds(body.seconds)
    yield TraceSlice(DEVICE, name, "loop", loop_window.nanoseconds(0.0), loop_end, arguments)
    yield TraceSlice(DEVICE, "turn 1", "turn", first_start, first_end)
    yield from _slices(body, first_window)
    later_turns = event.trip_count - 1
    if later_turns < 1:
        return
    name = f"turns 2–{event.trip_count}" if later_turns > 1 else "turn 2"
    for resource, seconds in _busy_seconds(body).items():
        arguments = {
            "turns": later_turns,
            "turn_us": body.seconds * 1e6,
            "busy_us": seconds * later_turns * 1e6,
        }
        yield TraceSlice(resource, name, "turns", first_end, loop_end, arguments)


def _busy_seconds(timeline: Timeline) -> dict[str, float]:
    """Return the busy time by resource, including an idle device."""
    busy = {DEVICE: 0.0}
    for event, executions in timeline.leaf_events():
        for resource in event.resource.split("+"):
            busy[resource] = busy.get(resource, 0.0) + event.seconds * executions
    return busy


def _split_into_rows(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Divide slices into rows, because slices of a track must be nested or disjoint.

    A collective that continues when a loop starts would overlap the loop in part.
    """
    rows: list[list[TraceSlice]] = [[]]
    open_ends: list[list[int]] = [[]]
    for item in sorted(slices, key=lambda item: (item.start, -item.end)):
        for ends in open_ends:
            while ends and ends[-1] <= item.start:
                ends.pop()
        fitting = (n for n, ends in enumerate(open_ends) if not ends or item.end <= ends[-1])
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            open_ends.append([])
        rows[row].append(item)
        open_ends[row].append(item.end)
    return rows


def _slice_event(item: TraceSlice, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "name": item.name,
        "cat": item.category,
        "ts": item.start / 1000,
        "dur": (item.end - item.start) / 1000,
        "args": item.arguments,
    }


def _metadata(name: str, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": {key: value}}


def _exposed_counter(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a counter track with the accumulated exposed communication."""
    steps = [(0.0, 0.0), *_exposed_steps(timeline, 0.0)]
    if len(steps) == 1:
        return []
    total = 0.0
    points = []
    for time, seconds in steps:
        total += seconds
        points.append(
            {
                "ph": "C",
                "pid": PROCESS,
                "tid": 0,
                "name": "exposed communication (ms)",
                "ts": round(time * 1e9) / 1000,
                "args": {"ms": total * 1e3},
            }
        )
    return points


def _exposed_steps(timeline: Timeline, offset: float) -> Iterator[tuple[float, float]]:
    """Yield the ends and durations of the waits. Later iterations of a loop are a single wait."""
    events = list(flatten_calls(timeline))
    items: list[TimelineEvent | Wait] = [event for event in events if is_loop(event)]
    items += [wait for wait in find_waits(events, timeline.seconds) if wait.on_network]
    for item in sorted(items, key=lambda item: item.end):
        if isinstance(item, Wait):
            yield offset + item.end, item.seconds
        elif item.body is not None and (exposed := exposed_seconds(item.body)):
            yield from _exposed_steps(item.body, offset + item.start)
            if item.trip_count > 1:
                yield offset + item.end, exposed * (item.trip_count - 1)
