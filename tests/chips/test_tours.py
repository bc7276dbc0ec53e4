"""Tours of boxes of chips: every hop a link, a circle wherever there can be one."""

from itertools import pairwise, product
from math import prod

import pytest

from drumline.chips import Slice, closes, links, slices, tour
from drumline.chips.tours import Coordinates, has_circle, tour_length

Wraps = tuple[bool, ...]
SMALL = {(one.topology, one.wraps): one for one in slices() if one.chips <= 64}


@pytest.mark.parametrize(
    ("a", "b", "topology", "wraps", "apart"),
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
def test_links_are_counted_the_shorter_way(
    a: Coordinates, b: Coordinates, topology: Coordinates, wraps: Wraps, apart: int
) -> None:
    assert links(a, b, topology, wraps) == links(b, a, topology, wraps) == apart


@pytest.mark.parametrize("one", SMALL.values(), ids=lambda one: one.name)
def test_a_ring_over_a_whole_slice_has_hops_of_one_link(one: Slice) -> None:
    found = tour(one.topology, one.wraps)
    assert sorted(found) == sorted(product(*map(range, one.topology)))
    around = zip(found, (*found[1:], found[0]), strict=True)
    apart = {links(a, b, one.topology, one.wraps) for a, b in around}
    assert apart == ({1} if one.chips > 1 else {0})


def test_every_box_has_a_circle_or_a_snake() -> None:
    for sides, wraps in product(product(range(1, 5), repeat=3), product((False, True), repeat=3)):
        found = tour(sides, wraps)
        assert sorted(found) == sorted(product(*map(range, sides)))
        assert all(links(a, b, sides, wraps) == 1 for a, b in pairwise(found)), (sides, wraps)
        assert closes(found, sides, wraps) == has_circle(sides, wraps), (sides, wraps)


@pytest.mark.parametrize(
    ("sides", "wraps", "circle"),
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
def test_where_a_circle_exists(sides: Coordinates, wraps: Wraps, circle: bool) -> None:
    assert closes(tour(sides, wraps), sides, wraps) == has_circle(sides, wraps) == circle


def test_of_a_snake_the_closing_hop_alone_is_long() -> None:
    snake = tour((3, 3), (False, False))
    assert snake == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (0, 2), (1, 2), (2, 2))
    assert links(snake[-1], snake[0], (3, 3), (False, False)) == 4


def test_long_steps_are_few() -> None:
    """Boxes of 1×4 chips, 4×4 of them: few hops along the side where each costs four links."""
    sides, wraps, steps = (4, 4), (False, False), (1, 4)
    found = tour(sides, wraps, steps)
    around = list(zip(found, (*found[1:], found[0]), strict=True))
    along = [abs(a[1] - b[1]) for a, b in around]
    assert sum(along) == 6, "there and back, no more"
    assert tour_length(sides, wraps, steps) == 4 * sum(along) + prod(sides) - sum(along)
    # Turned by a quarter, the tour is too.
    assert tour_length(sides, wraps, (4, 1)) == tour_length(sides, wraps, steps)
