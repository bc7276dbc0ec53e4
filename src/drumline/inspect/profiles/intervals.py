"""Arithmetic on time intervals: unions, overlaps, and the self time of nested operations.

Times are nanoseconds in float64 arrays.
"""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 2.0
"""The excess of a nested event's end, because starts and durations are truncated to nanoseconds."""


@dataclass(frozen=True)
class Intervals:
    """Time intervals with the indices of their operations."""

    starts: Times
    ends: Times
    operations: Indices

    @staticmethod
    def from_rows(rows: list[tuple[float, float, int]]) -> "Intervals":
        """Make intervals from rows of start, end and operation."""
        if not rows:
            return Intervals(np.empty(0), np.empty(0), np.empty(0, np.int64))
        starts, ends, operations = zip(*rows, strict=True)
        return Intervals(np.array(starts, float), np.array(ends, float), np.array(operations))

    @staticmethod
    def concatenate(interval_sets: list["Intervals"]) -> "Intervals":
        """Join sets of intervals."""
        if not interval_sets:
            return Intervals.from_rows([])
        return Intervals(
            np.concatenate([intervals.starts for intervals in interval_sets]),
            np.concatenate([intervals.ends for intervals in interval_sets]),
            np.concatenate([intervals.operations for intervals in interval_sets]),
        )

    def select(self, mask: NDArray[np.bool_]) -> "Intervals":
        """Return the intervals of the operations that the mask selects by index."""
        if not len(self.operations):
            return self
        selected = mask[self.operations]
        return Intervals(self.starts[selected], self.ends[selected], self.operations[selected])

    def operation_times(self, count: int) -> Times:
        """Return the total times of `count` operations."""
        lengths = self.ends - self.starts
        # For empty input, bincount returns integers.
        return np.bincount(self.operations, lengths, minlength=count).astype(np.float64)


class IntervalUnion:
    """The union of time intervals."""

    def __init__(self, starts: Times, ends: Times) -> None:
        """Join intervals that touch or overlap."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        latest_ends = np.maximum.accumulate(ends) if len(ends) else ends
        is_first = np.ones(len(starts), bool)
        is_first[1:] = starts[1:] > latest_ends[:-1]
        is_last = np.append(is_first[1:], True) if len(is_first) else is_first
        self.starts, self.ends = starts[is_first], latest_ends[is_last]
        lengths = self.ends - self.starts
        self.length = float(np.sum(lengths))
        self._points = np.stack([self.starts, self.ends], axis=1).reshape(-1)
        sums = np.concatenate([[0.0], np.cumsum(lengths)])
        self._covered = np.stack([sums[:-1], sums[1:]], axis=1).reshape(-1)

    def overlap(self, starts: Times, ends: Times) -> Times:
        """Return the times that the union covers of the intervals."""
        if not len(self.starts):
            return np.zeros(len(starts))
        until_end = np.interp(ends, self._points, self._covered)
        overlap: Times = until_end - np.interp(starts, self._points, self._covered)
        return overlap


def uncovered_time(running: Intervals, computing: IntervalUnion) -> Times:
    """Return the times of the intervals without computation.

    Where intervals overlap, the time counts for the first to start. So the sum is the time in which
    something runs and nothing is computed.
    """
    order = np.argsort(running.starts, kind="stable")
    starts, ends = running.starts[order], running.ends[order]
    earlier_ends = np.full(len(ends), -np.inf)
    earlier_ends[1:] = np.maximum.accumulate(ends)[:-1] if len(ends) else earlier_ends[1:]
    own_starts = np.maximum(starts, earlier_ends)
    own_ends = np.maximum(ends, own_starts)
    uncovered = np.empty(len(starts))
    uncovered[order] = (own_ends - own_starts) - computing.overlap(own_starts, own_ends)
    return uncovered


def self_intervals(events: Intervals, containers: Container[int]) -> Intervals:
    """Return the intervals of the operations without nested operations.

    Operations in `containers` (loops and branches) have no time of their own if anything is nested
    in them.
    """
    order = np.lexsort((-events.ends, events.starts))
    starts, ends, operations = events.starts[order], events.ends[order], events.operations[order]
    if np.all(starts[1:] >= ends[:-1]):
        return Intervals(starts, ends, operations)
    rows: list[tuple[float, float, int]] = []
    stack: list[_OpenEvent] = []

    def close(time: float) -> None:
        while stack and stack[-1].end <= time:
            rows.extend(stack.pop().finish())

    for start, end, operation in zip(
        starts.tolist(), ends.tolist(), operations.tolist(), strict=True
    ):
        close(start)
        # An event that outlasts the previous event is not nested, such as kernels of a GPU.
        while stack and end > stack[-1].end + ROUNDING:
            rows.extend(stack.pop().finish())
        if stack:
            end = min(end, stack[-1].end)
            rows.extend(stack[-1].interrupt(start, end))
        stack.append(_OpenEvent(start, end, operation, operation in containers))
    close(np.inf)
    return Intervals.from_rows(rows)


class _OpenEvent:
    """An event that has not ended, and the end of its rows."""

    def __init__(self, start: float, end: float, operation: int, is_container: bool) -> None:
        self.end = end
        self.operation = operation
        self._recorded_until = start
        self._is_container = is_container
        self._has_nested = False

    def interrupt(self, start: float, end: float) -> list[tuple[float, float, int]]:
        """Return the row up to a nested event."""
        self._has_nested = True
        rows = self._rows(start)
        self._recorded_until = max(self._recorded_until, end)
        return rows

    def finish(self) -> list[tuple[float, float, int]]:
        """Return the row up to the end of the event."""
        return self._rows(self.end)

    def _rows(self, end: float) -> list[tuple[float, float, int]]:
        if (self._is_container and self._has_nested) or end <= self._recorded_until:
            return []
        return [(self._recorded_until, end, self.operation)]
