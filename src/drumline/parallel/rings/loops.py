"""Two movements of arrays around a ring, overlapped with matmuls.

Every function of `drumline.parallel` uses one of them. In `circulate` the shards of the devices
move around the ring, and each device works on the shard that has arrived (a gather without the full
array). In `accumulate` partial sums move around the ring, each device adds its term, and every sum
ends on its owner (a reduce-scatter). In both, a permute is issued before a matmul that does not
need it, so a compiler with asynchronous permutes overlaps the two.

`direction="both"` uses both directions of every link, in one of two forms:

- **Halves, all the way around**, for GPUs and CPUs. The data is split into two lanes with opposite
  directions, so `(n-1)/n·V/2` of the V bytes of the full array go each way. All steps are alike,
  which a loop needs. Barriers keep the matmuls apart: GPU compilers would merge them into one and
  leave all permutes but one without a matmul to overlap with.
- **Whole shards, half way around**, for TPUs. On a ring of n devices each shard is needed by n/2
  devices on its right and by the others on its left. Both directions start at once, so a gather
  takes n/2 permutes. All steps are written out. No shard is split or joined, and no barrier keeps
  the compiler from adding a sum in the epilogue of its matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import jax
from jax import lax

from drumline.parallel.axes import zeros
from drumline.parallel.rings.ring import Arrival, Lane, Ring, barrier

Carry = TypeVar("Carry")


def circulate_full_shards(
    ring: Ring,
    shard: Lane,
    part: jax.Array,
    visit: Callable[[Carry | None, list[Arrival]], Carry],
) -> Carry:
    """Visit this device's own part, then those of both neighbours, then the next ones."""
    right, left = _bidirectional_lanes(shard)
    depths = {right: ring.size // 2, left: (ring.size - 1) // 2}
    current = {right: part, left: part}
    carry = visit(None, [Arrival(right, part, ring.upstream(right, 0))])
    for distance in range(1, ring.size // 2 + 1):
        current = {
            lane: ring.permute(lane, sent)
            for lane, sent in current.items()
            if depths[lane] >= distance
        }
        for lane, arrived in current.items():
            carry = visit(carry, [Arrival(lane, arrived, ring.upstream(lane, distance))])
    return carry


def accumulate_full_shards(
    ring: Ring,
    shard: Lane,
    operands: tuple[jax.Array, ...],
    term: Callable[[tuple[jax.Array, ...], Lane, jax.Array], jax.Array],
) -> jax.Array:
    """Return the sum that this device owns; half of it comes from the right, half from the left.

    The lanes alternate. While a sum moves right, the term of the sum that moves left next is
    computed. So a term is added to a sum that has already arrived, in one fused operation, and
    every permute overlaps with a matmul.
    """
    right, left = _bidirectional_lanes(shard)
    sums: dict[Lane, jax.Array] = {}
    for lane, permutes_left in _lane_order(ring, right, left):
        local_term = term(operands, lane, ring.upstream(lane, ring.size - permutes_left))
        sums[lane] = ring.permute_sum(lane, sums[lane] + local_term if lane in sums else local_term)
    local_sum = term(operands, right, ring.upstream(right, 0))
    # The last sum is in flight while the local term is computed, so it is added separately.
    last = lane
    for lane in (right, left):
        if lane != last:
            local_sum = local_sum + sums[lane]
    return barrier(local_sum) + sums[last]


def _lane_order(ring: Ring, right: Lane, left: Lane) -> list[tuple[Lane, int]]:
    """Return the lanes in turn, each with the number of permutes left, in decreasing order."""
    to_right = [(right, permutes_left) for permutes_left in range(ring.size // 2, 0, -1)]
    to_left = [(left, permutes_left) for permutes_left in range((ring.size - 1) // 2, 0, -1)]
    pairs = zip_longest(to_right, to_left)
    return [turn for pair in pairs for turn in pair if turn is not None]


def _bidirectional_lanes(shard: Lane) -> tuple[Lane, Lane]:
    return shard._replace(shift=1), shard._replace(shift=-1)


def circulate(
    ring: Ring,
    lanes: Sequence[Lane],
    parts: Sequence[jax.Array],
    visit: Callable[[Carry | None, list[Arrival]], Carry],
) -> Carry:
    """Send each device's parts once around the ring, one part per lane, with `size - 1` permutes.

    `visit(carry, arrivals)` is called in each of the `size` steps with the parts that have arrived,
    first with the device's own parts and without a carry. So the carry starts as the first result
    and needs no zeros. Only a loop off the TPU starts with zeros, because with the first step
    outside of it the program would be larger and no faster.
    """

    def arrivals(parts: Sequence[jax.Array], step: int | jax.Array) -> list[Arrival]:
        return [
            Arrival(lane, part, ring.upstream(lane, step))
            for lane, part in zip(lanes, parts, strict=True)
        ]

    def advance(
        step: int | jax.Array, state: tuple[Carry | None, tuple[jax.Array, ...]]
    ) -> tuple[Carry, tuple[jax.Array, ...]]:
        carry, current = state
        incoming = tuple(
            ring.permute(lane, part) for lane, part in zip(lanes, current, strict=True)
        )
        return visit(carry, arrivals(current, step)), incoming

    if ring.full_shards:
        return circulate_full_shards(ring, lanes[0], parts[0], visit)
    if ring.size == 1:
        return visit(None, arrivals(parts, 0))
    if ring.rolled and ring.target == "other":
        carry_types = jax.eval_shape(lambda: visit(None, arrivals(parts, 0)))
        zeros_carry = jax.tree.map(
            lambda carry_type: zeros(carry_type.shape, carry_type.dtype, parts[0]), carry_types
        )
        carry, last = lax.fori_loop(0, ring.size - 1, advance, (zeros_carry, tuple(parts)))
        return visit(carry, arrivals(last, ring.size - 1))
    state = advance(0, (None, tuple(parts)))
    if ring.rolled:
        state = lax.fori_loop(1, ring.size - 1, advance, state)
    else:
        for step in range(1, ring.size - 1):
            state = advance(step, ring.step_barrier(state))
        state = ring.step_barrier(state)
    carry, last = state
    return visit(carry, arrivals(last, ring.size - 1))


def visit_in_turn(
    ring: Ring,
    visit: Callable[[Carry | None, Arrival], Carry],
) -> Callable[[Carry | None, list[Arrival]], Carry]:
    """Return a visit to one arrival at a time, so that each lane's permute has a matmul."""

    def visit_all(carry: Carry | None, arrivals: list[Arrival]) -> Carry:
        first, *others = arrivals
        done = visit(carry, first)
        for lane, part, source in others:
            done, part = ring.step_barrier((done, part))
            done = visit(done, Arrival(lane, part, source))
        return done

    return visit_all


def accumulate(
    ring: Ring,
    lanes: Sequence[Lane],
    operands: tuple[jax.Array, ...],
    term: Callable[[tuple[jax.Array, ...], Lane, jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
    """Send sums around the ring. Each device adds `term(operands, lane, owner)` to each sum.

    A sum starts on the device after its owner and ends on its owner after `size - 1` permutes.
    Return this device's complete sums, one per lane.
    """

    def terms(operands: tuple[jax.Array, ...], step: int | jax.Array) -> tuple[jax.Array, ...]:
        results = []
        for lane in lanes:
            local_term = term(operands, lane, ring.upstream(lane, step + 1))
            # Without the barrier, the matmul would be fused with the addition and wait for the sum.
            local_term, operands = barrier((local_term, operands))
            results.append(local_term)
        return tuple(results)

    def advance(
        operands: tuple[jax.Array, ...], step: int | jax.Array, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        incoming = [ring.permute_sum(lane, part) for lane, part in zip(lanes, sums, strict=True)]
        return tuple(
            sum_ + local_term
            for sum_, local_term in zip(incoming, terms(operands, step), strict=True)
        )

    if ring.full_shards:
        return (accumulate_full_shards(ring, lanes[0], operands, term),)
    sums = terms(operands, 0)
    if ring.rolled:
        sums = lax.fori_loop(1, ring.size, partial(advance, operands), sums)
    else:
        for step in range(1, ring.size):
            sums, operands = ring.step_barrier((sums, operands))
            sums = advance(operands, step, sums)
    return sums
