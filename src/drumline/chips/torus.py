"""Rings over a box of chips of a torus, and the order of a mesh over a slice.

**Rings.** If the chips of a ring are ordered by index, half of its permutes take two links, which
they share with other permutes. In most boxes all permutes of a ring can take a single link, even
without wrap-around links:

    2×4, by index         2×4, as a ring        3×3, an open path
    0   2   4   6         0 ─ 7 ─ 6 ─ 5         0 ─ 1 ─ 2
    │ ╱ │ ╱ │ ╱ │         │           │                 │
    1   3   5   7         1 ─ 2 ─ 3 ─ 4         5 ─ 4 ─ 3
                                                │
                                                6 ─ 7 ─ 8

Links within the box connect chips whose coordinates have an even sum to chips with an odd sum. So
an odd number of chips has a ring only if an odd dimension wraps around, and a row only if it wraps
around. Other boxes have a ring.

**Meshes.** The last mesh axis takes a box of chips, the axis before it a box of such boxes, and so
on. An axis follows the ring order of its box. A permute along the last axis takes a single link,
and a permute along an outer axis as many links as the inner boxes are long. For `data=4, model=4`
on a 4×4 without wrap-around, with chips labelled `(data, model)`:

    00 ─ 01   10 ─ 11        `model` is a ring of one-link permutes in a quarter,
    │    │    │    │         `data` a ring of two-link permutes through the quarters.
    03 ─ 02   13 ─ 12
                             Axes that are rows of four would be open paths. A
    30 ─ 31   20 ─ 21        bidirectional ring loads the links of an open path
    │    │    │    │         twice, and its closing permute takes three links.
    33 ─ 32   23 ─ 22

**The choice of boxes.** If all chips send to both neighbours along an axis, the number of messages
on the busiest link is about the number of links of the longest permute, and twice that on an open
path. This is the load of the axis. The split of the torus with the smallest weighted sum of loads
is used. The weights double from axis to axis, because rings usually run over the last axes. Ties
are broken by the loads from the last axis outwards; then by the longest permutes without the
closing permute, because a unidirectional ring is no slower on an open path; then by the lengths of
the rings.

The two halves of a dimension that wraps around are mirrored (0 1 | 3 2), so that they meet at both
ends. Halves of two chips are then a single link apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations, product
from math import gcd, prod

from drumline.deprecated import renamed_keywords

Coordinates = tuple[int, ...]
"""The coordinates of a chip in the torus, from 0 on."""
Core = tuple[Coordinates, int]
"""A chip and a core index, which is 0 if JAX shows the chip as a single device."""


# Rings


def links(a: Coordinates, b: Coordinates, topology: Sequence[int], wraps: Sequence[bool]) -> int:
    """Return the number of links on the shortest path between two chips."""
    return sum(_links_per_dim(a, b, topology, wraps))


@renamed_keywords(tour="order")
def closes(order: Sequence[Coordinates], topology: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Return True if the closing permute of an order is no longer than the others.

    A bidirectional ring needs this. On an open path, the messages of the closing permute use all
    other links a second time.
    """
    max_links = max((links(a, b, topology, wraps) for a, b in pairwise(order)), default=0)
    return links(order[-1], order[0], topology, wraps) <= max_links


def has_ring(shape: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Return True if the chips of a box have an order that closes."""
    long_wraps = [wrap for length, wrap in zip(shape, wraps, strict=True) if length > 1]
    if prod(shape) <= 2 or (any(long_wraps) and (len(long_wraps) == 1 or prod(shape) % 2)):
        return True
    return len(long_wraps) > 1 and prod(shape) % 2 == 0


def ring_order(
    sides: Sequence[int], wraps: Sequence[bool], steps: Sequence[float] | None = None
) -> tuple[Coordinates, ...]:
    """Return the chips of a box as a path of neighbours, which is a ring if possible.

    Args:
        sides: the lengths of the box's dimensions.
        wraps: True for dimensions whose ends are linked.
        steps: the costs of a permute along the dimensions, 1 by default. The cheapest candidate is
            returned. To order blocks of chips, pass the lengths of the blocks.
    """
    box = (tuple(sides), tuple(wraps))
    costs = [_cost(permutes, steps or (1,) * len(sides)) for permutes in _permutes_per_dim(*box)]
    return _candidate_orders(*box)[costs.index(min(costs))]


def ring_length(shape: Sequence[int], wraps: Sequence[bool], steps: Sequence[float]) -> float:
    """Return the cost of the ring order with its closing permute."""
    return min(_cost(permutes, steps) for permutes in _permutes_per_dim(tuple(shape), tuple(wraps)))


def _links_per_dim(
    a: Coordinates, b: Coordinates, topology: Sequence[int], wraps: Sequence[bool]
) -> Coordinates:
    distances = (abs(x - y) for x, y in zip(a, b, strict=True))
    return tuple(
        min(distance, length - distance) if wrap else distance
        for distance, length, wrap in zip(distances, topology, wraps, strict=True)
    )


def _cost(permutes: Coordinates, steps: Sequence[float]) -> float:
    return sum(count * step for count, step in zip(permutes, steps, strict=True))


@cache
def _permutes_per_dim(shape: Coordinates, wraps: tuple[bool, ...]) -> tuple[Coordinates, ...]:
    """Count the links of the candidate orders along the dimensions."""
    counts = []
    for order in _candidate_orders(shape, wraps):
        permutes = zip(order, (*order[1:], order[0]), strict=True)
        lengths = [_links_per_dim(a, b, shape, wraps) for a, b in permutes]
        counts.append(tuple(map(sum, zip(*lengths, strict=True))))
    return tuple(counts)


def _candidate_orders(
    shape: Coordinates, wraps: tuple[bool, ...]
) -> tuple[tuple[Coordinates, ...], ...]:
    """Return the chip orders for all dimension orders, or only the rings if some are rings."""
    long_dims = [dim for dim, length in enumerate(shape) if length > 1]
    candidates = []
    for dims in permutations(long_dims):
        order = []
        for cell in _order_of_dims([shape[dim] for dim in dims], [wraps[dim] for dim in dims]):
            chip = dict(zip(dims, cell, strict=True))
            order.append(tuple(chip.get(dim, 0) for dim in range(len(shape))))
        candidates.append(tuple(order))
    rings = [order for order in candidates if links(order[-1], order[0], shape, wraps) <= 1]
    return tuple(rings or candidates)


def _order_of_dims(shape: Sequence[int], wraps: Sequence[bool]) -> list[Coordinates]:
    """Order a grid with the first dimension as columns and a snake through the others as rows.

    The ring returns through the first column:

        0 ─ 1 ─ 2 ─ 3
        │           │
        B   6 ─ 5 ─ 4
        │   │
        A   7 ─ 8 ─ 9     if the number of rows is odd, a wrap-around link connects 9 and A
    """
    if len(shape) < 2:
        return list(product(*(range(length) for length in shape)))
    columns, row_cells = shape[0], _snake(shape[1:])
    rows = len(row_cells)
    if rows % 2 == 0 or (columns % 2 and wraps[0]):
        cells = _out_and_return(rows, columns)
    elif columns % 2 == 0:
        cells = [(row, column) for column, row in _out_and_return(columns, rows)]
    else:
        return _snake(shape)
    return [(column, *row_cells[row]) for row, column in cells]


def _out_and_return(rows: int, columns: int) -> list[tuple[int, int]]:
    outward = [
        (row, column)
        for row in range(rows)
        for column in (range(1, columns) if row % 2 == 0 else range(columns - 1, 0, -1))
    ]
    return [(0, 0), *outward, *((row, 0) for row in range(rows - 1, 0, -1))]


def _snake(shape: Sequence[int]) -> list[Coordinates]:
    """Order cells row by row, every other row reversed; the first dimension changes fastest."""
    path: list[Coordinates] = [()]
    for length in shape:
        path = [
            (*cell, index)
            for index in range(length)
            for cell in (path if index % 2 == 0 else reversed(path))
        ]
    return path


# Meshes


@dataclass(frozen=True)
class _Grid:
    """The torus as a grid of equal boxes of chips."""

    shape: Coordinates
    """The number of boxes along each dimension."""
    box: Coordinates
    """The number of chips of a box along each dimension."""
    wraps: tuple[bool, ...]

    def group(self, shape: Coordinates) -> "_Grid":
        """Return the grid whose boxes are groups of this shape."""
        return _Grid(
            tuple(length // size for length, size in zip(self.shape, shape, strict=True)),
            tuple(length * size for length, size in zip(self.box, shape, strict=True)),
            self.wraps,
        )

    def is_mirrored(self, dim: int) -> bool:
        """Return True if the boxes along a dimension are halves of a ring."""
        return self.wraps[dim] and self.shape[dim] == 2


@dataclass(frozen=True)
class TorusAxis:
    """A mesh axis on the torus, as a path through the boxes of a grid."""

    grid: _Grid
    shape: Coordinates
    """The number of boxes along each dimension."""

    @property
    def wraps(self) -> tuple[bool, ...]:
        """True for dimensions whose end boxes are neighbours."""
        lengths = zip(self.shape, self.grid.shape, self.grid.wraps, strict=True)
        return tuple(wrap and length == full for length, full, wrap in lengths)

    @property
    def links_per_dim(self) -> Coordinates:
        """The links of a permute along the dimensions, the maximum if it depends on the chip."""
        # Chip n of a mirrored half is 2n + 1 links from its partner, counted from the nearer end.
        return tuple(
            length - 1 + length % 2 if self.grid.is_mirrored(dim) else length
            for dim, length in enumerate(self.grid.box)
        )

    @property
    def max_links(self) -> int:
        """The maximum links of a permute, without the closing permute of an open path."""
        lengths = zip(self.links_per_dim, self.shape, strict=True)
        return max((count for count, length in lengths if length > 1), default=0)

    @property
    def load(self) -> int:
        """The approximate number of messages on the busiest link."""
        return self.max_links * (1 if self.is_ring else 2)

    @property
    def is_ring(self) -> bool:
        """True for a ring, False for an open path."""
        return has_ring(self.shape, self.wraps)

    @property
    def ring_length(self) -> float:
        """The links of the ring with its closing permute."""
        return ring_length(self.shape, self.wraps, self.links_per_dim)

    def box_order(self) -> tuple[Coordinates, ...]:
        """Return the boxes along the mesh axis."""
        return ring_order(self.shape, self.wraps, self.links_per_dim)

    def chip_in_box(self, chip: Coordinates, box: Coordinates) -> Coordinates:
        """Return the chip of a box that corresponds to a chip of box 0."""
        return tuple(
            2 * length - 1 - offset
            if self.grid.is_mirrored(dim) and index
            else index * length + offset
            for dim, (offset, index, length) in enumerate(
                zip(chip, box, self.grid.box, strict=True)
            )
        )


def mesh_order(
    topology: Sequence[int], wraps: Sequence[bool], sizes: Sequence[int], cores: int = 1
) -> tuple[Core, ...]:
    """Return the chips and cores of a mesh; the last axis changes fastest.

    Args:
        topology: the lengths of the slice's dimensions.
        wraps: True for dimensions whose ends are linked.
        sizes: the sizes of the mesh axes, outermost first. Their product is the number of devices.
        cores: the number of devices per chip. The cores of a chip are adjacent, on the last axis
            whose size they divide.

    Raises:
        ValueError: the mesh and the slice differ in their number of devices.
    """
    devices = prod(topology) * cores
    if prod(sizes) != devices or min(sizes, default=1) < 1:
        mesh, chips = ("×".join(map(str, lengths)) or "1" for lengths in (sizes, topology))
        raise ValueError(
            f"mesh {mesh}: a slice of {chips} chips has {devices} devices, and the sizes of the "
            f"mesh must multiply to that"
        )
    cores_on_axis, remaining_cores = [1] * len(sizes), cores
    for axis in reversed(range(len(sizes))):
        cores_on_axis[axis] = gcd(sizes[axis], remaining_cores)
        remaining_cores //= cores_on_axis[axis]
    chip_sizes = tuple(size // count for size, count in zip(sizes, cores_on_axis, strict=True))
    axes = split_torus(topology, wraps, chip_sizes)
    orders = [axis.box_order() for axis in axes]
    mesh_cores = []
    for mesh_index in product(*(range(size) for size in sizes)):
        chip, core = (0,) * len(topology), 0
        for axis in reversed(range(len(sizes))):
            box = orders[axis][mesh_index[axis] // cores_on_axis[axis]]
            chip = axes[axis].chip_in_box(chip, box)
        for index, count in zip(mesh_index, cores_on_axis, strict=True):
            core = core * count + index % count
        mesh_cores.append((chip, core))
    return tuple(mesh_cores)


def split_torus(
    topology: Sequence[int], wraps: Sequence[bool], sizes: Sequence[int]
) -> tuple[TorusAxis, ...]:
    """Choose the boxes of the mesh axes, as the module's docstring explains."""
    return _best_split(_Grid(tuple(topology), (1,) * len(topology), tuple(wraps)), tuple(sizes))


@cache
def _best_split(chips: _Grid, sizes: tuple[int, ...]) -> tuple[TorusAxis, ...]:
    best: tuple[TorusAxis, ...] = ()
    best_loads: list[int] = []
    best_lengths: list[float] = []
    weights = [2 ** sum(size > 1 for size in sizes[:axis]) for axis in range(len(sizes))]

    def search(grid: _Grid, loads: list[int], axes: tuple[TorusAxis, ...]) -> None:
        nonlocal best, best_loads, best_lengths
        total = sum(weight * load for weight, load in zip(reversed(weights), loads, strict=False))
        if best_loads and [total, *loads] > best_loads[: len(loads) + 1]:
            return  # further axes only increase the total
        if len(axes) == len(sizes):
            inner_to_outer = axes[::-1]
            lengths = [
                *(axis.max_links for axis in inner_to_outer),
                *(axis.ring_length for axis in inner_to_outer),
            ]
            if [total, *loads] != best_loads or lengths < best_lengths:
                best, best_loads, best_lengths = axes, [total, *loads], lengths
            return
        for shape in _box_shapes(grid.shape, sizes[-1 - len(axes)]):
            axis = TorusAxis(grid, shape)
            search(grid.group(shape), [*loads, axis.load], (axis, *axes))

    search(chips, [], ())
    return best


def _box_shapes(grid_shape: Coordinates, volume: int) -> Iterator[Coordinates]:
    """Yield the box shapes of this volume that divide the grid evenly."""
    if not grid_shape:
        if volume == 1:
            yield ()
        return
    for length in range(1, min(grid_shape[0], volume) + 1):
        if grid_shape[0] % length == 0 and volume % length == 0:
            for inner in _box_shapes(grid_shape[1:], volume // length):
                yield (length, *inner)
