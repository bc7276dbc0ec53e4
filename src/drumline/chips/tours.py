"""Tours of the chips of a torus: an order of them in which every hop is one link.

A ring passes its pieces from each chip to the next and from the last to the first. Over chips in
the order of their numbers, every other hop is two links and shares them with others. There is
nearly always a circle instead, which needs no link from one end to the other:

    2×4, by number        2×4, as a circle      3×3, a snake
    0   2   4   6         0 ─ 7 ─ 6 ─ 5         0 ─ 1 ─ 2
    │ ╱ │ ╱ │ ╱ │         │           │                 │
    1   3   5   7         1 ─ 2 ─ 3 ─ 4         5 ─ 4 ─ 3
                                                │
                                                6 ─ 7 ─ 8

A chip has an even or an odd sum of coordinates, and a link leads from one kind to the other. So an
odd number of chips has a circle only where an odd side wraps around, and a single row only where
that row does. All other boxes have one.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, permutations, product
from math import prod

Coordinates = tuple[int, ...]
"""Where a chip is in the torus: a number from 0 on for each side."""


def links(a: Coordinates, b: Coordinates, topology: Sequence[int], wraps: Sequence[bool]) -> int:
    """The number of links from one chip to another, the shortest way."""
    return sum(separations(a, b, topology, wraps))


def separations(
    a: Coordinates, b: Coordinates, topology: Sequence[int], wraps: Sequence[bool]
) -> Coordinates:
    """The number of links from one chip to another along each side, the shortest way."""
    straight = (abs(x - y) for x, y in zip(a, b, strict=True))
    return tuple(
        min(apart, side - apart) if around else apart
        for apart, side, around in zip(straight, topology, wraps, strict=True)
    )


def closes(tour: Sequence[Coordinates], topology: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Whether a tour is a circle: from its last chip to its first is no longer than its other hops.

    A ring that sends both ways needs a circle: on a snake, what goes from the last chip to the
    first takes the links of all others a second time.
    """
    others = (links(a, b, topology, wraps) for a, b in pairwise(tour))
    return links(tour[-1], tour[0], topology, wraps) <= max(others, default=0)


def has_circle(sides: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Whether some tour of a box closes."""
    around = [wrapping for side, wrapping in zip(sides, wraps, strict=True) if side > 1]
    if prod(sides) <= 2 or (any(around) and (len(around) == 1 or prod(sides) % 2)):
        return True
    return len(around) > 1 and prod(sides) % 2 == 0


def tour(
    sides: Sequence[int], wraps: Sequence[bool], steps: Sequence[float] | None = None
) -> tuple[Coordinates, ...]:
    """Every chip of a box once, each a neighbour of the one before: a circle where there is one.

    Args:
        sides: the lengths of the box's sides.
        wraps: which of them have a link from end to end.
        steps: how long a step along each side is, 1 each if not said; the tour is the shortest of
            those known. Blocks of chips are toured with the sizes of the blocks.
    """
    box = (tuple(sides), tuple(wraps))
    lengths = [_weighed(hops, steps or (1,) * len(sides)) for hops in _hops(*box)]
    return _tours(*box)[lengths.index(min(lengths))]


def tour_length(sides: Sequence[int], wraps: Sequence[bool], steps: Sequence[float]) -> float:
    """How long the tour is, its closing hop included."""
    return min(_weighed(hops, steps) for hops in _hops(tuple(sides), tuple(wraps)))


def _weighed(hops: Coordinates, steps: Sequence[float]) -> float:
    return sum(many * step for many, step in zip(hops, steps, strict=True))


@cache
def _hops(sides: Coordinates, wraps: tuple[bool, ...]) -> tuple[Coordinates, ...]:
    """For each known tour, the number of links that it takes along each side."""
    found = []
    for known in _tours(sides, wraps):
        hops = zip(known, (*known[1:], known[0]), strict=True)
        apart = [separations(a, b, sides, wraps) for a, b in hops]
        found.append(tuple(sum(along) for along in zip(*apart, strict=True)))
    return tuple(found)


def _tours(sides: Coordinates, wraps: tuple[bool, ...]) -> tuple[tuple[Coordinates, ...], ...]:
    """The tours we know, by which side is toured first; circles alone where there are some."""
    long = [number for number, side in enumerate(sides) if side > 1]
    known = []
    for order in permutations(long):
        found = []
        for there in _in_order([sides[n] for n in order], [wraps[n] for n in order]):
            chip = dict(zip(order, there, strict=True))
            found.append(tuple(chip.get(number, 0) for number in range(len(sides))))
        known.append(tuple(found))
    circles = [found for found in known if links(found[-1], found[0], sides, wraps) <= 1]
    return tuple(circles or known)


def _in_order(sides: Sequence[int], wraps: Sequence[bool]) -> list[Coordinates]:
    """A tour whose columns are along the first side and whose rows are a snake of the others.

    The first column is the way back; the rest of each row is a piece of the way out:

        0 ─ 1 ─ 2 ─ 3
        │           │
        B   6 ─ 5 ─ 4
        │   │
        A   7 ─ 8 ─ 9     with an odd number of rows 9 and A must be neighbours around the end
    """
    if len(sides) < 2:
        return list(product(*(range(side) for side in sides)))
    across, down = sides[0], _snake(sides[1:])
    rows = len(down)
    if rows % 2 == 0 or (across % 2 and wraps[0]):
        cells = _there_and_back(rows, across)
    elif across % 2 == 0:
        cells = [(row, column) for column, row in _there_and_back(across, rows)]
    else:
        return _snake(sides)
    return [(column, *down[row]) for row, column in cells]


def _there_and_back(rows: int, columns: int) -> list[tuple[int, int]]:
    out = [
        (row, column)
        for row in range(rows)
        for column in (range(1, columns) if row % 2 == 0 else range(columns - 1, 0, -1))
    ]
    return [(0, 0), *out, *((row, 0) for row in range(rows - 1, 0, -1))]


def _snake(sides: Sequence[int]) -> list[Coordinates]:
    """Row after row, every other one backwards; the first side is the fastest."""
    path: list[Coordinates] = [()]
    for side in sides:
        path = [
            (*chip, number)
            for number in range(side)
            for chip in (path if number % 2 == 0 else reversed(path))
        ]
    return path
