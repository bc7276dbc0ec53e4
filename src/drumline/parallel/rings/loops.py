"""Two movements of arrays around a ring, overlapped with matmuls.

- `circulate` gathers. The shards move around the ring, and a device works on each shard that
  arrives. No device holds the full array.
- `accumulate` reduces and scatters. Partial sums move around the ring, each device adds its term,
  and every sum ends on its owner.

A permute is always issued before a matmul that does not depend on it, so a compiler with
asynchronous permutes overlaps them.

`direction="both"` has one implementation for GPUs and CPUs and another for TPUs:

- **Halves move around the full ring** on GPUs and CPUs. The data is split into two lanes with
  opposite directions. Each lane sends `(n-1)/n·V/2` of the V bytes of the full array. All steps are
  alike, so they fit in a loop. Barriers separate the matmuls, because GPU compilers would merge
  them and leave most permutes without a matmul to overlap with.
- **Full shards move around half of the ring** on TPUs. Each shard moves to n/2 devices on its right
  and to the others on its left at the same time, so a gather takes n/2 permutes. The steps are
  unrolled. No shard is split, and without barriers the compiler can add a sum in the epilogue of
  its matmul.
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
    """Visit the local part, then the parts of the neighbours, in order of distance."""
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
    """Return the sum that this device owns. Its terms arrive from the left and from the right.

    The lanes alternate: while a sum moves right, the device computes the term of the next sum that
    moves left. Every permute therefore overlaps with a matmul, and a term is added to a sum that
    has already arrived, in a fused operation.
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
    """Return alternating lanes with their remaining numbers of permutes, in decreasing order."""
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
    """Send a part per lane around the ring, with `size - 1` permutes.

    Each of the `size` steps calls `visit(carry, arrivals)` with the parts that have arrived. The
    first step has the local parts and no carry, so its result is the initial carry. A loop off the
    TPU starts with a carry of zeros instead, because a separate first step would make the program
    larger and no faster.
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
    """Return a function that visits the arrivals in sequence, so every permute has a matmul."""

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
    """Send sums around the ring, and return the complete sums of this device, one per lane.

    A device adds `term(operands, lane, owner)` to every sum. A sum starts on the device after its
    owner and reaches its owner after `size - 1` permutes.
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
