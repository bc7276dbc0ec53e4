"""Rings: how arrays travel between the devices of a mesh axis while each device multiplies.

Two movements carry every function of `drumline.parallel`. In `circulate` the devices' shards go
round the ring and each device works on what passes by (a gather that never holds the whole
array). In `accumulate` sums go round, each device adds its term, and every sum ends on the device
it belongs to (a scatter of sums). In both, a transfer is issued before the multiplication that
does not need it, so that a compiler with asynchronous permutes runs the two at once.

`direction="both"` uses both directions of every link, in one of two forms:

- **Halves, all the way round** (here): what travels is cut into two lanes that go opposite ways,
  so `(n-1)/n·V/2` of the V bytes in the full array go each way. Every step is like the others,
  which a loop needs. Barriers keep the multiplications apart: merged into one, as the compilers of
  GPUs like to, they would leave all but one transfer with nothing to travel beside.
- **Whole, half the way round** (in `chunks`): half the steps, each of them written out, no halves
  to join and no barriers, which would only keep the TPU's compiler from fusing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
from jax import lax

from drumline.parallel.rings.chunks import accumulate_whole, circulate_whole
from drumline.parallel.rings.ring import Arrival, Lane, Ring, apart
from drumline.parallel.varying import zeros

Carry = TypeVar("Carry")


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
