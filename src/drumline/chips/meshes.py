"""A mesh laid over the chips of a slice, so that a hop along each of its axes is short.

The last axis takes a box of chips, the one before it a box of such boxes, and so on outwards. Each
axis runs through its box on a tour (`drumline.chips.tours`). The last axis so has hops of one link
always, and the hops of the others are as long as the boxes inside them. For `data=4, model=4` on a
4×4 without wrap-around, chips by their coordinate `(data, model)`:

    00 ─ 01   10 ─ 11        `model` is a circle of one-link hops in each quarter,
    │    │    │    │         `data` a circle of two-link hops through the quarters.
    03 ─ 02   13 ─ 12
                             As four rows, both would be snakes: on those a ring that
    30 ─ 31   20 ─ 21        sends both ways loads each link twice, and the closing
    │    │    │    │         hop is three links.
    33 ─ 32   23 ─ 22

**The rule.** Where every chip sends to both neighbours along an axis, the busiest link carries
about as many pieces as the axis's longest hop has links, and twice as many if its tours are snakes.
Call that the axis's load. Of all ways to share out the sides, the one with the smallest sum of
loads is taken, where an axis counts twice as much as the one before it: rings run over the last
axes. Of equal ones, that with the smaller load of the last axis, then of the one before it, and so
on; then that with the shorter hops, not counting the closing one, as a ring that sends one way is
no slower on a snake; then that with the shorter tours.

Two halves of a side that wraps around are laid mirrored (0 1 | 3 2), which brings them together at
both ends: halves of two are then one link apart, not two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd, prod

from drumline.chips.tours import Coordinates, has_circle, tour, tour_length

Core = tuple[Coordinates, int]
"""A chip, and which of its cores: where a chip is one device to JAX, 0."""


@dataclass(frozen=True)
class _Grid:
    """Equal boxes of chips, side by side: what the axes further in have left."""

    sides: Coordinates
    """How many boxes there are along each side."""
    inside: Coordinates
    """How many chips a box has along each side."""
    wraps: tuple[bool, ...]

    def within(self, extents: Coordinates) -> "_Grid":
        """The grid of boxes of these boxes."""
        return _Grid(
            tuple(side // taken for side, taken in zip(self.sides, extents, strict=True)),
            tuple(many * taken for many, taken in zip(self.inside, extents, strict=True)),
            self.wraps,
        )

    def mirrors(self, side: int) -> bool:
        """Whether the boxes along a side are two halves of a circle."""
        return self.wraps[side] and self.sides[side] == 2


@dataclass(frozen=True)
class AxisShare:
    """The boxes of a grid that one mesh axis runs through."""

    grid: _Grid
    extents: Coordinates

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Along which sides the last box is a neighbour of the first."""
        taken = zip(self.extents, self.grid.sides, self.grid.wraps, strict=True)
        return tuple(around and extent == side for extent, side, around in taken)

    @property
    def steps(self) -> Coordinates:
        """The links of a step along each side, the most where it depends on the chip."""
        # Mirrored, chip n of one half is 2n + 1 links from its partner, or as many from the end.
        return tuple(
            many - 1 + many % 2 if self.grid.mirrors(side) else many
            for side, many in enumerate(self.grid.inside)
        )

    @property
    def longest(self) -> int:
        """The links of the longest hop, but for the closing one of a snake."""
        taken = zip(self.steps, self.extents, strict=True)
        return max((step for step, many in taken if many > 1), default=0)

    @property
    def load(self) -> int:
        """About how many pieces the busiest link carries."""
        return self.longest * (1 if self.closes else 2)

    @property
    def closes(self) -> bool:
        """Whether the tours are circles."""
        return has_circle(self.extents, self.wraps)

    @property
    def length(self) -> float:
        """The links of the tour, its closing hop included."""
        return tour_length(self.extents, self.wraps, self.steps)

    def tour(self) -> tuple[Coordinates, ...]:
        """The boxes in the order of the mesh axis."""
        return tour(self.extents, self.wraps, self.steps)

    def moved(self, chip: Coordinates, box: Coordinates) -> Coordinates:
        """Where a chip of the first box has its like in another."""
        return tuple(
            2 * many - 1 - at if self.grid.mirrors(side) and number else number * many + at
            for side, (at, number, many) in enumerate(zip(chip, box, self.grid.inside, strict=True))
        )


def lay_mesh(
    topology: Sequence[int], wraps: Sequence[bool], sizes: Sequence[int], cores: int = 1
) -> tuple[Core, ...]:
    """The chip and core for each place of a mesh, in the order of its places, last axis fastest.

    Args:
        topology: the sides of the slice.
        wraps: which of them have a link from end to end.
        sizes: the sizes of the mesh axes, outermost first; any that multiply to all devices.
        cores: the devices of each chip. They are next to each other, on the last axis that has
            room for them.

    Raises:
        ValueError: the mesh has more or fewer places than the slice has devices.
    """
    devices = prod(topology) * cores
    if prod(sizes) != devices or min(sizes, default=1) < 1:
        shape, slice_ = ("×".join(map(str, lengths)) or "1" for lengths in (sizes, topology))
        raise ValueError(
            f"mesh {shape}: a slice of {slice_} chips has {devices} devices, and the sizes of the "
            f"mesh must multiply to that"
        )
    in_chip, rest = [1] * len(sizes), cores
    for axis in reversed(range(len(sizes))):
        in_chip[axis] = gcd(sizes[axis], rest)
        rest //= in_chip[axis]
    over_chips = tuple(size // inside for size, inside in zip(sizes, in_chip, strict=True))
    shares = share_out(topology, wraps, over_chips)
    tours = [share.tour() for share in shares]
    places = []
    for place in product(*(range(size) for size in sizes)):
        chip, core = (0,) * len(topology), 0
        for axis in reversed(range(len(sizes))):
            chip = shares[axis].moved(chip, tours[axis][place[axis] // in_chip[axis]])
        for at, inside in zip(place, in_chip, strict=True):
            core = core * inside + at % inside
        places.append((chip, core))
    return tuple(places)


def share_out(
    topology: Sequence[int], wraps: Sequence[bool], sizes: Sequence[int]
) -> tuple[AxisShare, ...]:
    """The boxes that each axis of a mesh over all chips runs through, by the rule above."""
    return _best(_Grid(tuple(topology), (1,) * len(topology), tuple(wraps)), tuple(sizes))


@cache
def _best(chips: _Grid, sizes: tuple[int, ...]) -> tuple[AxisShare, ...]:
    """The share of each axis, by the rule."""
    found: tuple[AxisShare, ...] = ()
    least: list[int] = []
    shortest: list[float] = []
    inwards = [2 ** sum(size > 1 for size in sizes[:axis]) for axis in range(len(sizes))]

    def search(grid: _Grid, loads: list[int], shares: tuple[AxisShare, ...]) -> None:
        nonlocal found, least, shortest
        # The sum of loads first, then each from the last axis on: a list that only grows.
        total = sum(weight * load for weight, load in zip(reversed(inwards), loads, strict=False))
        if least and [total, *loads] > least[: len(loads) + 1]:
            return
        if len(shares) == len(sizes):
            inside_out = shares[::-1]
            lengths = [*(s.longest for s in inside_out), *(s.length for s in inside_out)]
            if [total, *loads] != least or lengths < shortest:
                found, least, shortest = shares, [total, *loads], lengths
            return
        for extents in _boxes(grid.sides, sizes[-1 - len(shares)]):
            share = AxisShare(grid, extents)
            search(grid.within(extents), [*loads, share.load], (share, *shares))

    search(chips, [], ())
    return found


def _boxes(sides: Coordinates, volume: int) -> Iterator[Coordinates]:
    """Every box of so many pieces whose sides divide these, and leave room for the other axes."""
    if not sides:
        if volume == 1:
            yield ()
        return
    for extent in range(1, min(sides[0], volume) + 1):
        if sides[0] % extent == 0 and volume % extent == 0:
            for others in _boxes(sides[1:], volume // extent):
                yield (extent, *others)
