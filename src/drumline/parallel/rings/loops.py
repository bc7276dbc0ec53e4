"""X"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import jax
from jax import lax

from drumline.parallel.axes import zeros
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


def circulate(
    ring: Ring,
    lanes: Sequence[Lane],
    parts: Sequence[jax.Array],
    visit: Callable[[Carry | None, list[Arrival]], Carry],
) -> Carry:
    """Send each device's parts once round the ring, one part per lane.

    `visit(carry, arrivals)` is called for each of the `size` steps with what is here then, first
    with the device's own parts and no carry: it begins with the first product, so that nothing has
    to be filled with zeros. Only a loop off the TPU begins with zeros: with its first step outside,
    it would be larger and no faster. The parts make `size - 1` hops.
    """

    def arrivals(parts: Sequence[jax.Array], step: int | jax.Array) -> list[Arrival]:
        return [
            Arrival(lane, part, ring.upstream(lane, step))
            for lane, part in zip(lanes, parts, strict=True)
        ]

    def advance(
        step: int | jax.Array, state: tuple[Carry | None, tuple[jax.Array, ...]]
    ) -> tuple[Carry, tuple[jax.Array, ...]]:
        carry, here = state
        coming = tuple(ring.hop(lane, part) for lane, part in zip(lanes, here, strict=True))
        return visit(carry, arrivals(here, step)), coming

    if ring.whole:
        return circulate_whole(ring, lanes[0], parts[0], visit)
    if ring.size == 1:
        return visit(None, arrivals(parts, 0))
    if ring.rolled and ring.target == "other":
        kinds = jax.eval_shape(lambda: visit(None, arrivals(parts, 0)))
        nothing = jax.tree.map(lambda kind: zeros(kind.shape, kind.dtype, parts[0]), kinds)
        carry, last = lax.fori_loop(0, ring.size - 1, advance, (nothing, tuple(parts)))
        return visit(carry, arrivals(last, ring.size - 1))
    state = advance(0, (None, tuple(parts)))
    if ring.rolled:
        state = lax.fori_loop(1, ring.size - 1, advance, state)
    else:
        for step in range(1, ring.size - 1):
            state = advance(step, ring.finished(state))
        state = ring.finished(state)
    carry, last = state
    return visit(carry, arrivals(last, ring.size - 1))


def in_turn(
    ring: Ring,
    visit: Callable[[Carry | None, Arrival], Carry],
) -> Callable[[Carry | None, list[Arrival]], Carry]:
    """A visit to one arrival after the other, so that each lane's hop has a product beside it."""

    def visit_all(carry: Carry | None, arrivals: list[Arrival]) -> Carry:
        first, *others = arrivals
        done = visit(carry, first)
        for lane, part, source in others:
            done, part = ring.finished((done, part))
            done = visit(done, Arrival(lane, part, source))
        return done

    return visit_all


def accumulate(
    ring: Ring,
    lanes: Sequence[Lane],
    operands: tuple[jax.Array, ...],
    term: Callable[[tuple[jax.Array, ...], Lane, jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
    """Send sums round the ring; each device adds `term(operands, lane, owner)` to what passes.

    A sum sets out from the device after its owner and ends, complete, on its owner: `size - 1`
    hops. Returns this device's sums, one per lane.
    """

    def terms(operands: tuple[jax.Array, ...], step: int | jax.Array) -> tuple[jax.Array, ...]:
        found = []
        for lane in lanes:
            mine = term(operands, lane, ring.upstream(lane, step + 1))
            # Finished before it is added: fused with the addition, it would await the arrival.
            mine, operands = apart((mine, operands))
            found.append(mine)
        return tuple(found)

    def advance(
        operands: tuple[jax.Array, ...], step: int | jax.Array, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        coming = [ring.send_sum(lane, part) for lane, part in zip(lanes, sums, strict=True)]
        return tuple(sum_ + mine for sum_, mine in zip(coming, terms(operands, step), strict=True))

    if ring.whole:
        return (accumulate_whole(ring, lanes[0], operands, term),)
    sums = terms(operands, 0)
    if ring.rolled:
        sums = lax.fori_loop(1, ring.size, partial(advance, operands), sums)
    else:
        for step in range(1, ring.size):
            sums, operands = ring.finished((sums, operands))
            sums = advance(operands, step, sums)
    return sums
