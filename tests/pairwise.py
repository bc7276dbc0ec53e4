"""Test cases that cover every pair of values of two options, instead of all combinations.

Most bugs appear with one or two particular values, so pairs find them at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases with one value of every option; the same cases in every process.

    The choice is greedy: the next case is the first one that covers the most missing pairs.
    """
    combinations_of_all = list(product(*(range(len(values)) for values in options)))
    missing = {pair for case in combinations_of_all for pair in _pairs(case)}
    cases = []
    while missing:
        best = max(combinations_of_all, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append(best)
    return [
        tuple(values[index] for values, index in zip(options, case, strict=True))
        for case in sorted(cases)
    ]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Return every pair of two options with their values in this case."""
    return set(combinations(enumerate(case), 2))
