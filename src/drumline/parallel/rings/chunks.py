"""Whole shards that go both ways, half the way round: how a ring is written for TPUs.

On a ring of n devices each shard is needed n - 1 times: by n/2 devices on its right, where it
travels from neighbour to neighbour, and by the others on its left. Both go at once, so a tour is
n/2 hops deep. No shard is cut, and nothing has to be joined again; a product and the sum that it
goes into stand in one statement without a barrier between, so that the compiler adds in the
product's own epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TypeVar

import jax

from drumline.parallel.rings.ring import Arrival, Lane, Ring, apart

Carry = TypeVar("Carry")


def circulate_whole(
    ring: Ring,
    shard: Lane,
    part: jax.Array,
    visit: Callable[[Carry | None, list[Arrival]], Carry],
) -> Carry:
    """Visit this device's own part, then those of its neighbours right and left, then the next."""
    right, left = _both_ways(shard)
    depths = {right: ring.size // 2, left: (ring.size - 1) // 2}
    here = {right: part, left: part}
    carry = visit(None, [Arrival(right, part, ring.upstream(right, 0))])
    for distance in range(1, ring.size // 2 + 1):
        here = {
            lane: ring.hop(lane, sent) for lane, sent in here.items() if depths[lane] >= distance
        }
        for lane, arrived in here.items():
            carry = visit(carry, [Arrival(lane, arrived, ring.upstream(lane, distance))])
    return carry


def accumulate_whole(
    ring: Ring,
    shard: Lane,
    operands: tuple[jax.Array, ...],
    term: Callable[[tuple[jax.Array, ...], Lane, jax.Array], jax.Array],
) -> jax.Array:
    """The sum that this device owns, half of it come from the right and half from the left.

    The lanes take turns. While a sum is on its way to the right, the term of the sum that will go
    left is multiplied: a term is thus added to a sum that has arrived, in one fused operation, and
    every hop still has a product beside it.
    """
    right, left = _both_ways(shard)
    sums: dict[Lane, jax.Array] = {}
    for lane, to_go in _turns(ring, right, left):
        mine = term(operands, lane, ring.upstream(lane, ring.size - to_go))
        sums[lane] = ring.send_sum(lane, sums[lane] + mine if lane in sums else mine)
    own = term(operands, right, ring.upstream(right, 0))
    # The last to set out is on its way while the own term is multiplied, so it is added apart.
    last = lane
    for lane in (right, left):
        if lane != last:
            own = own + sums[lane]
    return apart(own) + sums[last]


def _turns(ring: Ring, right: Lane, left: Lane) -> list[tuple[Lane, int]]:
    """The lanes in turn, each time with the hops that the sum has before it, the farthest first."""
    to_right = [(right, to_go) for to_go in range(ring.size // 2, 0, -1)]
    to_left = [(left, to_go) for to_go in range((ring.size - 1) // 2, 0, -1)]
    pairs = zip_longest(to_right, to_left)
    return [turn for pair in pairs for turn in pair if turn is not None]


def _both_ways(shard: Lane) -> tuple[Lane, Lane]:
    return shard._replace(shift=1), shard._replace(shift=-1)
