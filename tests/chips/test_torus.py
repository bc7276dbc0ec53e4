"""Ring orders of boxes of chips, and meshes on slices."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

import pytest

from drumline.chips import Slice, closes, links, mesh_order, ring_order, slice_of, slices
from drumline.chips.torus import Coordinates, Core, has_ring, ring_length

Wraps = tuple[bool, ...]
SMALL = {
    (tpu_slice.topology, tpu_slice.wraps): tpu_slice
    for tpu_slice in slices()
    if tpu_slice.chips <= 64
}


@pytest.mark.parametrize(
    ("a", "b", "topology", "wraps", "count"),
    [
        ((0, 0), (0, 0), (4, 4), (False, False), 0),
        ((0, 0), (3, 3), (4, 4), (False, False), 6),
        ((0, 0), (3, 3), (4, 4), (True, True), 2),
        ((0, 0), (3, 3), (4, 4), (False, True), 4),
        ((0, 1), (8, 1), (16, 16), (True, True), 8),
        ((2, 1), (14, 1), (16, 16), (True, True), 4),
        ((1, 2, 3), (0, 2, 0), (2, 4, 4), (False, False, False), 4),
    ],
)
def test_links_counts_the_shortest_path(
    a: Coordinates, b: Coordinates, topology: Coordinates, wraps: Wraps, count: int
) -> None:
    assert links(a, b, topology, wraps) == links(b, a, topology, wraps) == count


@pytest.mark.parametrize("tpu_slice", SMALL.values(), ids=lambda tpu_slice: tpu_slice.name)
def test_a_ring_over_a_whole_slice_has_permutes_of_one_link(tpu_slice: Slice) -> None:
    order = ring_order(tpu_slice.topology, tpu_slice.wraps)
    assert sorted(order) == sorted(product(*map(range, tpu_slice.topology)))
    neighbours = zip(order, (*order[1:], order[0]), strict=True)
    distances = {links(a, b, tpu_slice.topology, tpu_slice.wraps) for a, b in neighbours}
    assert distances == ({1} if tpu_slice.chips > 1 else {0})


def test_every_box_has_a_ring_or_an_open_path() -> None:
    for shape, wraps in product(product(range(1, 5), repeat=3), product((False, True), repeat=3)):
        order = ring_order(shape, wraps)
        assert sorted(order) == sorted(product(*map(range, shape)))
        assert all(links(a, b, shape, wraps) == 1 for a, b in pairwise(order)), (shape, wraps)
        assert closes(order, shape, wraps) == has_ring(shape, wraps), (shape, wraps)


@pytest.mark.parametrize(
    ("shape", "wraps", "is_ring"),
    [
        ((1, 1), (False, False), True),
        ((2, 1), (False, False), True),
        ((4, 1), (False, False), False),
        ((4, 1), (True, False), True),
        ((5,), (True,), True),
        ((2, 4), (False, False), True),
        ((3, 4), (False, False), True),
        ((3, 3), (False, False), False),
        ((3, 5), (False, True), True),
        ((3, 3, 3), (False, False, False), False),
        ((3, 3, 3), (True, False, False), True),
        ((3, 3, 2), (False, False, False), True),
    ],
)
def test_a_ring_is_found_if_one_exists(shape: Coordinates, wraps: Wraps, is_ring: bool) -> None:
    assert closes(ring_order(shape, wraps), shape, wraps) == has_ring(shape, wraps) == is_ring


def test_only_the_closing_permute_of_an_open_path_is_long() -> None:
    path = ring_order((3, 3), (False, False))
    assert path == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (0, 2), (1, 2), (2, 2))
    assert links(path[-1], path[0], (3, 3), (False, False)) == 4


def test_the_ring_uses_few_expensive_permutes() -> None:
    """A 4×4 grid of boxes of 1×4 chips: a permute along the second dimension costs four links."""
    shape, wraps, steps = (4, 4), (False, False), (1, 4)
    order = ring_order(shape, wraps, steps)
    neighbours = zip(order, (*order[1:], order[0]), strict=True)
    second_axis_steps = [abs(a[1] - b[1]) for a, b in neighbours]
    assert sum(second_axis_steps) == 6, "out and back once"
    assert ring_length(shape, wraps, steps) == 4 * sum(second_axis_steps) + prod(shape) - sum(
        second_axis_steps
    )
    # The ring turns with the grid.
    assert ring_length(shape, wraps, (4, 1)) == ring_length(shape, wraps, steps)


def factorisations(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (count,)
        return
    for first in range(1, count + 1):
        if count % first == 0:
            for inner in factorisations(count // first, axes - 1):
                yield (first, *inner)


def lines(mesh: Sequence[Core], sizes: Sequence[int], axis: int) -> Iterator[list[Core]]:
    """Yield the devices along an axis, for each position on the other axes."""
    ranges = [range(size) if index != axis else (0,) for index, size in enumerate(sizes)]
    stride = prod(sizes[axis + 1 :])
    for position in product(*ranges):
        first = 0
        for index, size in zip(position, sizes, strict=True):
            first = first * size + index
        yield [mesh[first + stride * index] for index in range(sizes[axis])]


def permute_lengths(tpu_slice: Slice, sizes: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Return the maximum links of a permute, of a line and of its closing permute on an axis."""
    longest = length = closing = 0
    mesh = mesh_order(tpu_slice.topology, tpu_slice.wraps, sizes)
    for line in lines(mesh, sizes, axis):
        chips = [chip for chip, _ in line]
        distances = [links(a, b, tpu_slice.topology, tpu_slice.wraps) for a, b in pairwise(chips)]
        longest = max(longest, *distances, 0)
        length = max(length, sum(distances))
        closing = max(closing, links(chips[-1], chips[0], tpu_slice.topology, tpu_slice.wraps))
    return longest, length, closing


@pytest.mark.parametrize("tpu_slice", SMALL.values(), ids=lambda tpu_slice: tpu_slice.name)
def test_every_mesh_fits_every_slice_with_one_link_permutes_on_its_last_axis(
    tpu_slice: Slice,
) -> None:
    all_cores = sorted((chip, 0) for chip in product(*map(range, tpu_slice.topology)))
    for axes in (1, 2, 3):
        for sizes in factorisations(tpu_slice.chips, axes):
            assert sorted(mesh_order(tpu_slice.topology, tpu_slice.wraps, sizes)) == all_cores
            innermost = max((axis for axis in range(axes) if sizes[axis] > 1), default=0)
            for axis in range(axes):
                longest, _, _ = permute_lengths(tpu_slice, sizes, axis)
                box = prod(sizes[axis + 1 :])
                # No dimension of a box is longer than its chips or than the slice.
                assert longest <= min(box, max(tpu_slice.topology) // 2 or 1), (sizes, axis)
                assert longest == 1 or axis != innermost or sizes[axis] == 1, (sizes, axis)


# Links of the longest permute, of the open line and of its closing permute; first and last axis.
EXPECTED: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, int, int], ...]] = {
    ("v5litepod-8", (1, 8)): ((0, 0, 0), (1, 7, 1)),
    ("v5litepod-8", (2, 4)): ((2, 2, 2), (1, 3, 1)),
    ("v5litepod-8", (4, 2)): ((1, 3, 3), (1, 1, 1)),
    ("v5litepod-16", (2, 8)): ((2, 2, 2), (1, 7, 1)),
    ("v5litepod-16", (4, 4)): ((2, 6, 2), (1, 3, 1)),
    ("v5litepod-16", (8, 2)): ((2, 8, 2), (1, 1, 1)),
    ("v6e-64", (2, 32)): ((4, 4, 4), (1, 31, 1)),
    ("v6e-64", (4, 16)): ((2, 6, 6), (1, 15, 1)),
    ("v6e-64", (8, 8)): ((4, 16, 4), (1, 7, 1)),
    ("v6e-64", (16, 4)): ((2, 30, 2), (1, 3, 1)),
    ("v6e-128", (16, 8)): ((1, 15, 1), (1, 7, 7)),
    ("v6e-256", (16, 16)): ((1, 15, 1), (1, 15, 1)),
    ("v6e-256", (32, 8)): ((4, 72, 4), (1, 7, 1)),
    ("v5p-32", (4, 4)): ((1, 3, 3), (1, 3, 1)),
    ("v5p-32", (8, 2)): ((1, 7, 1), (1, 1, 1)),
    ("v4-384", (64, 3)): ((3, 75, 1), (1, 2, 2)),
}


@pytest.mark.parametrize(("name", "sizes"), EXPECTED, ids=str)
def test_permutes_are_no_longer_than_recorded(name: str, sizes: tuple[int, ...]) -> None:
    tpu_slice = slice_of(name)
    first, last = (permute_lengths(tpu_slice, sizes, axis) for axis in (0, len(sizes) - 1))
    assert (first, last) == EXPECTED[name, sizes]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_on_a_cube_with_wrap_around_every_permute_takes_one_link(axes: int) -> None:
    cube = slice_of("v5p-128")
    for sizes in factorisations(cube.chips, axes):
        for axis, size in enumerate(sizes):
            longest, _, closing = permute_lengths(cube, sizes, axis)
            assert (longest, closing) == ((1, 1) if size > 1 else (0, 0)), (sizes, axis)


def test_the_figure_of_the_module() -> None:
    mesh = mesh_order((4, 4), (False, False), (4, 4))
    position = {chip: index for index, (chip, _) in enumerate(mesh)}
    rows = [
        "".join(f" {position[x, y] // 4}{position[x, y] % 4}" for x in range(4)) for y in range(4)
    ]
    assert rows == [" 00 01 10 11", " 03 02 13 12", " 30 31 20 21", " 33 32 23 22"]


def test_axes_of_size_one_do_not_change_the_order() -> None:
    order_without_unit_axes = mesh_order((8, 8), (False, False), (4, 4, 4))
    assert mesh_order((8, 8), (False, False), (1, 4, 1, 4, 4, 1)) == order_without_unit_axes
    # They do not count as an axis for the weights of the loads either.
    ring = mesh_order((8, 16), (False, True), (16, 8))
    assert mesh_order((8, 16), (False, True), (16, 1, 8)) == ring


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 4), (2, 2, 2), (8, 1)])
def test_the_cores_of_a_chip_are_adjacent(sizes: tuple[int, ...]) -> None:
    mesh = mesh_order((2, 2), (False, False), sizes, cores=2)
    assert sorted(mesh) == sorted(product(product(range(2), range(2)), range(2)))
    last = max(axis for axis in range(len(sizes)) if sizes[axis] > 1)
    for line in lines(mesh, sizes, last):
        for (chip, core), (other, next_core) in zip(line[::2], line[1::2], strict=True):
            assert (chip, core, next_core) == (other, 0, 1)
        chips = [chip for chip, _ in line]
        distances = [links(a, b, (2, 2), (False, False)) for a, b in pairwise(chips)]
        assert set(distances[1::2]) <= {1}
        assert closes(chips, (2, 2), (False, False))


def test_cores_are_on_the_last_axis_whose_size_they_divide() -> None:
    """Two cores per chip on 4×4×12 chips, and a last axis of 3."""
    mesh = mesh_order((4, 4, 12), (True,) * 3, (128, 3), cores=2)
    assert len(set(mesh)) == 384
    assert {core for _, core in mesh} == {0, 1}
    for line in lines(mesh, (128, 3), 1):
        assert len({core for _, core in line}) == 1


@pytest.mark.parametrize("sizes", [(), (4,), (16,), (3, 3), (-2, -4), (0, 8)])
def test_a_mesh_of_another_size_is_an_error_of_one_line(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a slice of 2×4 chips has 8 devices") as caught:
        mesh_order((2, 4), (False, False), sizes)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pod_accepts_up_to_four_axes_of_any_size() -> None:
    pod = slice_of("v5p-12288")
    for sizes in [(3072, 2), (6, 16, 8, 8), (3, 32, 4, 16)]:
        assert len(set(mesh_order(pod.topology, pod.wraps, sizes))) == pod.chips
