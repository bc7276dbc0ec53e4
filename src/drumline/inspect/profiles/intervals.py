"""Arithmetic with stretches of time: what covers what, and what a loop spends in itself.

Times are nanoseconds in float64 arrays, a start and an end for each stretch.
"""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]

ROUNDING = 2.0
"""Starts and durations are cut to whole nanoseconds, so an inner event may end this much late."""


@dataclass(frozen=True)
class Stretches:
    """Stretches of time, each with the number of the operation that ran."""

    starts: Times
    ends: Times
    operations: Numbers

    @staticmethod
    def of(rows: list[tuple[float, float, int]]) -> "Stretches":
        """From rows of start, end and operation."""
        if not rows:
            return Stretches(np.empty(0), np.empty(0), np.empty(0, np.int64))
        starts, ends, operations = zip(*rows, strict=True)
        return Stretches(np.array(starts, float), np.array(ends, float), np.array(operations))

    @staticmethod
    def together(parts: list["Stretches"]) -> "Stretches":
        """All the stretches of several."""
        if not parts:
            return Stretches.of([])
        return Stretches(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.ends for part in parts]),
            np.concatenate([part.operations for part in parts]),
        )

    def where(self, chosen: NDArray[np.bool_]) -> "Stretches":
        """Those that are chosen by the operation's number."""
        if not len(self.operations):
            return self
        mask = chosen[self.operations]
        return Stretches(self.starts[mask], self.ends[mask], self.operations[mask])

    def lengths(self, count: int) -> Times:
        """The time of each of `count` operations."""
        return _sums(self.operations, self.ends - self.starts, count)


def _sums(operations: Numbers, weights: Times, count: int) -> Times:
    # Without a single event the sums come as whole numbers.
    return np.bincount(operations, weights=weights, minlength=count).astype(np.float64)


class Cover:
    """The union of stretches of time."""

    def __init__(self, starts: Times, ends: Times) -> None:
        """Join what touches or overlaps."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        reached = np.maximum.accumulate(ends) if len(ends) else ends
        fresh = np.ones(len(starts), bool)
        fresh[1:] = starts[1:] > reached[:-1]
        last = np.append(fresh[1:], True) if len(fresh) else fresh
        self.starts, self.ends = starts[fresh], reached[last]
        self.length = float(np.sum(self.ends - self.starts))
        lengths = self.ends - self.starts
        self._points = np.stack([self.starts, self.ends], axis=1).reshape(-1)
        sums = np.concatenate([[0.0], np.cumsum(lengths)])
        self._sums = np.stack([sums[:-1], sums[1:]], axis=1).reshape(-1)

    def within(self, starts: Times, ends: Times) -> Times:
        """How much of each stretch is covered."""
        if not len(self.starts):
            return np.zeros(len(starts))
        upto = np.interp(ends, self._points, self._sums)
        found: Times = upto - np.interp(starts, self._points, self._sums)
        return found


def exposed(running: Stretches, computing: Cover) -> Times:
    """The part of each stretch, in order of its start, in which nothing is computed.

    What runs at the same time as an earlier one is counted for the earlier one alone, so that the
    parts add up to the time in which something ran and nothing was computed.
    """
    order = np.argsort(running.starts, kind="stable")
    starts, ends = running.starts[order], running.ends[order]
    before = np.full(len(ends), -np.inf)
    before[1:] = np.maximum.accumulate(ends)[:-1] if len(ends) else before[1:]
    begin = np.maximum(starts, before)
    alone = np.maximum(ends, begin)
    found = np.empty(len(starts))
    found[order] = (alone - begin) - computing.within(begin, alone)
    return found


def own_stretches(events: Stretches, enclosing: Container[int]) -> Stretches:
    """The stretches that an operation spends in itself, and not in what runs inside of it.

    Operations in `enclosing`, loops and branches, only surround others: where something runs inside
    of one, no time is its own.
    """
    order = np.lexsort((-events.ends, events.starts))
    starts, ends, operations = events.starts[order], events.ends[order], events.operations[order]
    if np.all(starts[1:] >= ends[:-1]):
        return Stretches(starts, ends, operations)
    rows: list[tuple[float, float, int]] = []
    stack: list[_Open] = []

    def close(upto: float) -> None:
        while stack and stack[-1].end <= upto:
            rows.extend(stack.pop().rest())

    for start, end, operation in zip(
        starts.tolist(), ends.tolist(), operations.tolist(), strict=True
    ):
        close(start)
        # One that outlasts the one before it stands beside it, as kernels on a GPU do.
        while stack and end > stack[-1].end + ROUNDING:
            rows.extend(stack.pop().rest())
        if stack:
            end = min(end, stack[-1].end)
            rows.extend(stack[-1].interrupt(start, end))
        stack.append(_Open(start, end, operation, operation in enclosing))
    close(np.inf)
    return Stretches.of(rows)


class _Open:
    """An event that has not ended, and the time from which nothing of it was told."""

    def __init__(self, start: float, end: float, operation: int, encloses: bool) -> None:
        self.end = end
        self.operation = operation
        self._told = start
        self._encloses = encloses
        self._silent = False

    def interrupt(self, start: float, end: float) -> list[tuple[float, float, int]]:
        self._silent = self._encloses
        own = self._piece(start)
        self._told = max(self._told, end)
        return own

    def rest(self) -> list[tuple[float, float, int]]:
        return self._piece(self.end)

    def _piece(self, upto: float) -> list[tuple[float, float, int]]:
        if self._silent or upto <= self._told:
            return []
        return [(self._told, upto, self.operation)]
