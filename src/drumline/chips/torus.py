"""Orders of the chips of a torus: a ring over a box of chips, and a mesh over a whole slice.

**Rings.** A collective on a ring passes data from each chip to the next and from the last to the
first. If the chips are ordered by index, every other permute takes two links and shares them with
others. Nearly always there is a ring in which each permute takes one link, even without wrap-around
links:

    2×4, by index         2×4, as a ring        3×3, an open path
    0   2   4   6         0 ─ 7 ─ 6 ─ 5         0 ─ 1 ─ 2
    │ ╱ │ ╱ │ ╱ │         │           │                 │
    1   3   5   7         1 ─ 2 ─ 3 ─ 4         5 ─ 4 ─ 3
                                                │
                                                6 ─ 7 ─ 8

The sum of a chip's coordinates is even or odd, and every link within the box connects an even chip
to an odd one. So an odd number of chips forms a ring only if an odd dimension wraps around, and a
single row only if that row wraps around. All other boxes have a ring.

**Meshes.** The last mesh axis takes a box of chips, the axis before it a box of such boxes, and so
on outwards. Each axis runs through its box in ring order. So a permute along the last axis always
takes one link, and a permute along another axis takes as many links as the boxes inside it are
long. For `data=4, model=4` on a 4×4 without wrap-around, with chips labelled `(data, model)`:

    00 ─ 01   10 ─ 11        `model` is a ring of one-link permutes in each quarter,
    │    │    │    │         `data` a ring of two-link permutes through the quarters.
    03 ─ 02   13 ─ 12
                             If both axes were rows of four, both would be open paths.
    30 ─ 31   20 ─ 21        A bidirectional ring loads each link of an open path
    │    │    │    │         twice, and its closing permute takes three links.
    33 ─ 32   23 ─ 22

**The choice of boxes.** If every chip sends to both neighbours along an axis, the busiest link
carries about as many messages as the axis's longest permute has links, and twice as many if the
axis is an open path. Call this the load of the axis. Of all ways to split the torus, take the one
with the smallest weighted sum of loads. Each axis weighs twice as much as the one before it,
because rings usually run over the last axes. Break ties by the smaller load of the last axis, then
of the one before it, and so on; then by the shorter permutes without the closing one, because a
unidirectional ring is no slower on an open path; then by the shorter rings.

The two halves of a dimension that wraps around are mirrored (0 1 | 3 2). This brings them together
at both ends, so halves of two chips are one link apart instead of two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations, product
from math import gcd, prod

from drumline.deprecated import renamed_keywords

Coordinates = tuple[int, ...]
"""The position of a chip in the torus: one index for each dimension, from 0 on."""
Core = tuple[Coordinates, int]
"""A chip, and the index of one of its cores; 0 if JAX shows the chip as one device."""


# Rings


def links(a: Coordinates, b: Coordinates, topology: Sequence[int], wraps: Sequence[bool]) -> int:
    """Return the number of links on the shortest path between two chips."""
    return sum(_links_per_dim(a, b, topology, wraps))


@renamed_keywords(tour="order")
def closes(order: Sequence[Coordinates], topology: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Return True if an order of chips is a ring: the closing permute is no longer than the others.

    A bidirectional ring needs this. On an open path, the messages from the last chip to the first
    use all other links a second time.
    """
    longest = max((links(a, b, topology, wraps) for a, b in pairwise(order)), default=0)
    return links(order[-1], order[0], topology, wraps) <= longest


def has_ring(shape: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Return True if the chips of a box have an order that closes."""
    long_wraps = [wrap for length, wrap in zip(shape, wraps, strict=True) if length > 1]
    if prod(shape) <= 2 or (any(long_wraps) and (len(long_wraps) == 1 or prod(shape) % 2)):
        return True
    return len(long_wraps) > 1 and prod(shape) % 2 == 0


def ring_order(
    sides: Sequence[int], wraps: Sequence[bool], steps: Sequence[float] | None = None
) -> tuple[Coordinates, ...]:
    """Return every chip of a box once, each a neighbour of the previous one; a ring if possible.

    Args:
        sides: the lengths of the box's dimensions.
        wraps: True for each dimension whose ends are linked.
        steps: the cost of a permute along each dimension, 1 by default. The order returned is the
            cheapest of the candidates. To order blocks of chips, pass the lengths of the blocks.
    """
    box = (tuple(sides), tuple(wraps))
    costs = [_cost(permutes, steps or (1,) * len(sides)) for permutes in _permutes_per_dim(*box)]
    return _candidate_orders(*box)[costs.index(min(costs))]


def ring_length(shape: Sequence[int], wraps: Sequence[bool], steps: Sequence[float]) -> float:
    """Return the cost of the ring order, its closing permute included."""
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
    """Count the links of each candidate order along each dimension."""
    counts = []
    for order in _candidate_orders(shape, wraps):
        permutes = zip(order, (*order[1:], order[0]), strict=True)
        lengths = [_links_per_dim(a, b, shape, wraps) for a, b in permutes]
        counts.append(tuple(sum(along) for along in zip(*lengths, strict=True)))
    return tuple(counts)


def _candidate_orders(
    shape: Coordinates, wraps: tuple[bool, ...]
) -> tuple[tuple[Coordinates, ...], ...]:
    """Return an order for each order of the dimensions; only the rings if there are any."""
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
    """Order a grid whose columns are the first dimension and whose rows snake through the others.

    The ring goes out through the rest of each row and returns through the first column:

        0 ─ 1 ─ 2 ─ 3
        │           │
        B   6 ─ 5 ─ 4
        │   │
        A   7 ─ 8 ─ 9     with an odd number of rows, 9 and A must be linked by wrap-around
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
    """A grid of equal boxes of chips that the inner mesh axes leave to the outer ones."""

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
        """Return True if the boxes along a dimension are the two halves of a ring."""
        return self.wraps[dim] and self.shape[dim] == 2


@dataclass(frozen=True)
class TorusAxis:
    """A mesh axis on the torus: the boxes of a grid that it runs through."""

    grid: _Grid
    shape: Coordinates
    """The number of boxes along each dimension."""

    @property
    def wraps(self) -> tuple[bool, ...]:
        """True for each dimension where the last box is a neighbour of the first."""
        lengths = zip(self.shape, self.grid.shape, self.grid.wraps, strict=True)
        return tuple(wrap and length == full for length, full, wrap in lengths)

    @property
    def links_per_dim(self) -> Coordinates:
        """The links of a permute along each dimension, the maximum if it depends on the chip."""
        # Chip n of a mirrored half is 2n + 1 links from its partner, or as many from the end.
        return tuple(
            length - 1 + length % 2 if self.grid.is_mirrored(dim) else length
            for dim, length in enumerate(self.grid.box)
        )

    @property
    def max_links(self) -> int:
        """The links of the longest permute, without the closing permute of an open path."""
        lengths = zip(self.links_per_dim, self.shape, strict=True)
        return max((count for count, length in lengths if length > 1), default=0)

    @property
    def load(self) -> int:
        """The approximate number of messages on the busiest link."""
        return self.max_links * (1 if self.is_ring else 2)

    @property
    def is_ring(self) -> bool:
        """True if the axis is a ring and not an open path."""
        return has_ring(self.shape, self.wraps)

    @property
    def ring_length(self) -> float:
        """The links of the whole ring, its closing permute included."""
        return ring_length(self.shape, self.wraps, self.links_per_dim)

    def box_order(self) -> tuple[Coordinates, ...]:
        """Return the boxes in the order of the mesh axis."""
        return ring_order(self.shape, self.wraps, self.links_per_dim)

    def chip_in_box(self, chip: Coordinates, box: Coordinates) -> Coordinates:
        """Return the chip of a box that corresponds to a chip of the first box."""
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
    """Return the chip and core at each position of a mesh; the last axis changes fastest.

    Args:
        topology: the lengths of the slice's dimensions.
        wraps: True for each dimension whose ends are linked.
        sizes: the sizes of the mesh axes, outermost first. Their product is the number of devices.
        cores: the number of devices per chip. The cores of a chip are adjacent, on the last axis
            whose size they divide.

    Raises:
        ValueError: the mesh has more or fewer positions than the slice has devices.
    """
    devices = prod(topology) * cores
    if prod(sizes) != devices or min(sizes, default=1) < 1:
        mesh, chips = ("×".join(map(str, lengths)) or "1" for lengths in (sizes, topology))
        raise ValueError(
            f"mesh {mesh}: a slice of {chips} chips has {devices} devices, and the sizes of the "
            f"mesh must multiply to that"
        )
    cores_on_axis, cores_left = [1] * len(sizes), cores
    for axis in reversed(range(len(sizes))):
        cores_on_axis[axis] = gcd(sizes[axis], cores_left)
        cores_left //= cores_on_axis[axis]
    chip_sizes = tuple(size // count for size, count in zip(sizes, cores_on_axis, strict=True))
    axes = split_torus(topology, wraps, chip_sizes)
    orders = [axis.box_order() for axis in axes]
    mesh_cores = []
    for position in product(*(range(size) for size in sizes)):
        chip, core = (0,) * len(topology), 0
        for axis in reversed(range(len(sizes))):
            box = orders[axis][position[axis] // cores_on_axis[axis]]
            chip = axes[axis].chip_in_box(chip, box)
        for index, count in zip(position, cores_on_axis, strict=True):
            core = core * count + index % count
        mesh_cores.append((chip, core))
    return tuple(mesh_cores)


def split_torus(
    topology: Sequence[int], wraps: Sequence[bool], sizes: Sequence[int]
) -> tuple[TorusAxis, ...]:
    """Choose the boxes of each axis of a mesh over all chips. The module explains the choice."""
    return _best_split(_Grid(tuple(topology), (1,) * len(topology), tuple(wraps)), tuple(sizes))


@cache
def _best_split(chips: _Grid, sizes: tuple[int, ...]) -> tuple[TorusAxis, ...]:
    best: tuple[TorusAxis, ...] = ()
    best_loads: list[int] = []
    best_lengths: list[float] = []
    weights = [2 ** sum(size > 1 for size in sizes[:axis]) for axis in range(len(sizes))]

    def search(grid: _Grid, loads: list[int], axes: tuple[TorusAxis, ...]) -> None:
        nonlocal best, best_loads, best_lengths
        # The key is the weighted sum, then the loads from the last axis on. It only grows.
        total = sum(weight * load for weight, load in zip(reversed(weights), loads, strict=False))
        if best_loads and [total, *loads] > best_loads[: len(loads) + 1]:
            return
        if len(axes) == len(sizes):
            inner_first = axes[::-1]
            lengths = [
                *(axis.max_links for axis in inner_first),
                *(axis.ring_length for axis in inner_first),
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
    """Yield every box shape of this volume that divides the grid evenly."""
    if not grid_shape:
        if volume == 1:
            yield ()
        return
    for length in range(1, min(grid_shape[0], volume) + 1):
        if grid_shape[0] % length == 0 and volume % length == 0:
            for inner in _box_shapes(grid_shape[1:], volume // length):
                yield (length, *inner)
