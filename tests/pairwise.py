"""Fewer cases than all combinations, in which every two values of two options still meet.

Most bugs need one value or two to show: options that do not know of each other are held together
by pairs as well as by their whole product, at a fraction of its programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose cases, each with one value of every option; the same ones in every process.

    Greedy: the next case is the one with the most pairs that no case has yet, the first such in
    the order of the product.
    """
    every = list(product(*(range(len(values)) for values in options)))
    missing = {pair for case in every for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return [
        tuple(values[number] for values, number in zip(options, case, strict=True))
        for case in sorted(chosen)
    ]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Two options each, with the values that they have in the case."""
    return set(combinations(enumerate(case), 2))
