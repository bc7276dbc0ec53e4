"""The first operation where two ways of running a function part.

A program that ends with operation k gives only that operation's results, in both ways, and they
are compared bit by bit. The search halves the operations that an output depends on, always between
one that agrees and a later one that differs; so it ends at a neighbouring pair of them even where a
difference comes, goes and comes back. Then the operands are asked, too: the neighbour may lie on
another branch. A program that ends earlier is also fused otherwise: what is found is an operation
that differs although everything it takes agrees, as seen at the ends of such programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from drumline.numerics.rounding.last_places import Difference, difference
from drumline.numerics.rounding.operations import TracedFunction, TracedOperation


class Runs(Protocol):
    """What can be cut off after any of its operations."""

    def results(self, index: int) -> list[np.ndarray]:
        """The results of one operation."""


@dataclass(frozen=True)
class Parting:
    """The first operation that differs, by how much, and why."""

    operation: TracedOperation
    difference: Difference
    why: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "operation": self.operation.to_dict(),
            "difference": self.difference.to_dict(),
            "why": self.why,
        }


class PartingSearch:
    """Looks for partings from one way of running, whose results are kept for the next search."""

    def __init__(self, program: TracedFunction, runs: Runs) -> None:
        """Look for where others part from `runs`."""
        self._program = program
        self._runs = runs
        self._kept: dict[int, list[np.ndarray]] = {}

    def first(self, other: Runs, ends: Sequence[int]) -> tuple[int, Difference] | None:
        """The first operation where the other parts on its way to one of these, and how far.

        None where none of these differs at the end of a program of its own.
        """
        known: dict[int, Difference] = {}
        # Two searches' worth: the first, and those along the branches it may have missed.
        most = 2 * math.ceil(math.log2(len(self._program) + 1)) + 4

        def apart(index: int) -> bool:
            if index not in known:
                known[index] = self._difference(other, index)
            return known[index].differing > 0

        found = next((end for end in sorted(set(ends)) if len(known) < most and apart(end)), None)
        while found is not None:
            found = self._halve(found, apart)
            earlier = (maker for maker in self._program.operands(found) if len(known) < most)
            branch = next((maker for maker in earlier if apart(maker)), None)
            if branch is None:
                return found, known[found]
            found = branch
        return None

    def _halve(self, differs: int, apart: Callable[[int], bool]) -> int:
        # A mask between two layers always agrees, and would send the search down to its branch.
        before = self._program.ancestors(differs)[:-1]
        path = [*(index for index in before if index in self._program.from_floats), differs]
        agreed, parted = -1, len(path) - 1
        while parted - agreed > 1:
            middle = (agreed + parted) // 2
            if apart(path[middle]):
                parted = middle
            else:
                agreed = middle
        return path[parted]

    def _difference(self, other: Runs, index: int) -> Difference:
        """How far the results of one operation are apart; of several, the one farthest."""
        if index not in self._kept:
            self._kept[index] = self._runs.results(index)
        pairs = zip(self._kept[index], other.results(index), strict=True)
        found = [difference(ours, theirs) for ours, theirs in pairs]
        return max(found, key=lambda d: (d.differing > 0, d.units or d.largest), default=_SAME)


_SAME = Difference(0, 0, 0.0, None)
