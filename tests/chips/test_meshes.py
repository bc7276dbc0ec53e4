"""Meshes on slices: which chips are neighbours along each axis, and how far apart."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

import pytest

from drumline.chips import Slice, closes, lay_mesh, links, slice_of, slices
from drumline.chips.meshes import Core

SMALL = {(one.topology, one.wraps): one for one in slices() if one.chips <= 64}


def factorisations(number: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in factorisations(number // first, axes - 1):
                yield (first, *others)


def lines(places: Sequence[Core], sizes: Sequence[int], axis: int) -> Iterator[list[Core]]:
    """The devices along an axis, for each place on the other axes."""
    others = [range(size) if number != axis else (0,) for number, size in enumerate(sizes)]
    stride = prod(sizes[axis + 1 :])
    for start in product(*others):
        first = 0
        for at, size in zip(start, sizes, strict=True):
            first = first * size + at
        yield [places[first + stride * at] for at in range(sizes[axis])]


def hops(one: Slice, sizes: Sequence[int], axis: int, cores: int = 1) -> tuple[int, int, int]:
    """The longest hop of an axis, the links of a line, those of its closing hop: the worst line."""
    longest = length = closing = 0
    places = lay_mesh(one.topology, one.wraps, sizes, cores)
    for line in lines(places, sizes, axis):
        chips = [chip for chip, _ in line]
        apart = [links(a, b, one.topology, one.wraps) for a, b in pairwise(chips)]
        longest = max(longest, *apart, 0)
        length = max(length, sum(apart))
        closing = max(closing, links(chips[-1], chips[0], one.topology, one.wraps))
    return longest, length, closing


@pytest.mark.parametrize("one", SMALL.values(), ids=lambda one: one.name)
def test_every_mesh_lies_on_every_slice_with_one_link_hops_on_its_last_axis(one: Slice) -> None:
    everything = sorted((chip, 0) for chip in product(*map(range, one.topology)))
    for axes in (1, 2, 3):
        for sizes in factorisations(one.chips, axes):
            assert sorted(lay_mesh(one.topology, one.wraps, sizes)) == everything
            last = max((axis for axis in range(axes) if sizes[axis] > 1), default=0)
            for axis in range(axes):
                longest, _, _ = hops(one, sizes, axis)
                inside = prod(sizes[axis + 1 :])
                # A box has no side longer than its chips, nor than the slice's.
                assert longest <= min(inside, max(one.topology) // 2 or 1), (sizes, axis)
                assert longest == 1 or axis != last or sizes[axis] == 1, (sizes, axis)


# Longest hop, links without and of the closing hop: of the first axis, then of the last.
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
def test_hops_are_as_short_as_they_were_found_to_be(name: str, sizes: tuple[int, ...]) -> None:
    one = slice_of(name)
    found = hops(one, sizes, 0), hops(one, sizes, len(sizes) - 1)
    assert found == EXPECTED[name, sizes]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_on_a_cube_that_wraps_around_every_hop_of_every_axis_is_one_link(axes: int) -> None:
    cube = slice_of("v5p-128")
    for sizes in factorisations(cube.chips, axes):
        for axis, size in enumerate(sizes):
            longest, _, closing = hops(cube, sizes, axis)
            assert (longest, closing) == ((1, 1) if size > 1 else (0, 0)), (sizes, axis)


def test_a_picture_of_quarters() -> None:
    """That in the doc comment."""
    at = {chip: place for place, (chip, _) in enumerate(lay_mesh((4, 4), (False, False), (4, 4)))}
    drawn = [
        "".join(f" {divmod(at[x, y], 4)[0]}{at[x, y] % 4}" for x in range(4)) for y in range(4)
    ]
    assert drawn == [" 00 01 10 11", " 03 02 13 12", " 30 31 20 21", " 33 32 23 22"]


def test_axes_of_one_change_nothing() -> None:
    bare = lay_mesh((8, 8), (False, False), (4, 4, 4))
    assert lay_mesh((8, 8), (False, False), (1, 4, 1, 4, 4, 1)) == bare
    # Nor do they count as an axis between two, where that would change the choice.
    ring = lay_mesh((8, 16), (False, True), (16, 8))
    assert lay_mesh((8, 16), (False, True), (16, 1, 8)) == ring


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 4), (2, 2, 2), (8, 1)])
def test_cores_of_a_chip_are_next_to_each_other(sizes: tuple[int, ...]) -> None:
    places = lay_mesh((2, 2), (False, False), sizes, cores=2)
    assert sorted(places) == sorted(product(product(range(2), range(2)), range(2)))
    last = max(axis for axis in range(len(sizes)) if sizes[axis] > 1)
    for line in lines(places, sizes, last):
        for (chip, core), (other, next_core) in zip(line[::2], line[1::2], strict=True):
            assert (chip, core, next_core) == (other, 0, 1)
        chips = [chip for chip, _ in line]
        apart = [links(a, b, (2, 2), (False, False)) for a, b in pairwise(chips)]
        assert set(apart[1::2]) <= {1}
        assert closes(chips, (2, 2), (False, False))


def test_cores_lie_on_an_axis_that_has_room_for_them() -> None:
    """Two cores on 4×4×12 chips, and a last axis of 3."""
    places = lay_mesh((4, 4, 12), (True,) * 3, (128, 3), cores=2)
    assert len(set(places)) == 384
    assert {core for _, core in places} == {0, 1}
    for line in lines(places, (128, 3), 1):
        assert len({core for _, core in line}) == 1


@pytest.mark.parametrize("sizes", [(), (4,), (16,), (3, 3), (-2, -4), (0, 8)])
def test_a_mesh_of_another_number_is_refused_in_a_sentence(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a slice of 2×4 chips has 8 devices") as refused:
        lay_mesh((2, 4), (False, False), sizes)
    assert len(str(refused.value).splitlines()) == 1


def test_a_pod_takes_any_four_axes() -> None:
    pod = slice_of("v5p-12288")
    for sizes in [(3072, 2), (6, 16, 8, 8), (3, 32, 4, 16)]:
        assert len(set(lay_mesh(pod.topology, pod.wraps, sizes))) == pod.chips
