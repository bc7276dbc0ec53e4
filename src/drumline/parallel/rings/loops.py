"""Rings: how arrays travel between the devices of a mesh axis while each device multiplies.

Two movements carry every function of `drumline.parallel`. In `circulate` the devices' shards go
round the ring and each device works on what passes by (a gather that never holds the whole
array). In `accumulate` sums go round, each device adds its term, and every sum ends on the device
it belongs to (a scatter of sums). In both, a transfer is issued before the multiplication that
does not need it, so that a compiler with asynchronous permutes runs the two at once. Barriers
keep the multiplications apart: merged into one, as compilers like to, they would leave all but
one transfer with nothing to travel beside.

What travels is cut into lanes. With `direction="both"` there are two lanes of half the size that
go opposite ways, which uses both directions of every link: with V bytes in the full array and n
devices, `(n-1)/n·V/2` bytes go each way instead of `(n-1)/n·V` one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName, Order, devices_along

Direction = Literal["both", "one"]
Loop = Literal["auto", "unrolled", "rolled"]
Carry = TypeVar("Carry")
State = TypeVar("State")

# Two devices have one hop between them, and nothing to roll. A longer ring is a loop: each step's
# buffers serve the next, its program does not grow with the axis (at eight devices it compiles in
# about half the time), and the transfer of a step still stands beside its multiplication.
LONGEST_UNROLLED = 2


class Lane(NamedTuple):
    """One part of what travels: `size` rows from `start`, sent `shift` (+1, -1) devices on."""

    shift: int
    start: int
    size: int


class Arrival(NamedTuple):
    """A part that is on this device now, and the index of the device it set out from."""

    lane: Lane
    part: jax.Array
    source: jax.Array


@dataclass(frozen=True)
class Ring:
    """The devices of one mesh axis in a circle, and how to send and multiply on it.

    Over several axes the circle goes through their devices as `lax.axis_index` numbers them.
    """

    axis_name: AxisName
    size: int
    direction: Direction
    loop: Loop
    precision: lax.PrecisionLike
    order: Order | None = None
    """Of several axes on their mesh; None for one axis, which has but one order."""

    @property
    def rolled(self) -> bool:
        """Whether the steps become one loop in the program instead of being written out."""
        return self.loop == "rolled" or (self.loop == "auto" and self.size > LONGEST_UNROLLED)

    def lanes(self, rows: int) -> tuple[Lane, ...]:
        """The lanes of a shard of so many rows. A single row cannot be cut and goes one way."""
        if self.direction == "one" or rows < 2:
            return (Lane(1, 0, rows),)
        middle = (rows + 1) // 2
        return Lane(1, 0, middle), Lane(-1, middle, rows - middle)

    def hop(self, lane: Lane, part: jax.Array) -> jax.Array:
        """Send a part to the next device of its lane."""
        path = [(here, (here + lane.shift) % self.size) for here in range(self.size)]
        axes = self.axis_name
        if self.order is not None:
            axes, path = self.order.axes, self.order.path(path)
        sent: jax.Array = lax.ppermute(part, axes, path)  # type: ignore[no-untyped-call]
        return sent

    def upstream(self, lane: Lane, steps: int | jax.Array) -> jax.Array:
        """Index of the device `steps` (0 to size) hops before this one on the lane."""
        # Unsigned: slices that start here need no code for negative indices.
        here = lax.axis_index(self.axis_name).astype(jnp.uint32)
        back = jnp.asarray(self.size - steps if lane.shift == 1 else steps, jnp.uint32)
        return lax.rem(here + back, jnp.uint32(self.size))


def ring_over(
    caller: str, axis_name: AxisName, direction: str, loop: str, precision: lax.PrecisionLike
) -> Ring:
    """The ring of a mesh axis, its options checked on behalf of the function `caller`."""
    check_choice(caller, "direction", direction, get_args(Direction))
    check_choice(caller, "loop", loop, get_args(Loop))
    size = devices_along(caller, axis_name)
    order = None if isinstance(axis_name, str) else Order.of(caller, axis_name)
    return Ring(axis_name, size, cast(Direction, direction), cast(Loop, loop), precision, order)


def check_choice(caller: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices, in one sentence."""
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{caller}: {name} must be {expected}, not {value!r}")


def circulate(
    ring: Ring,
    lanes: Sequence[Lane],
    parts: Sequence[jax.Array],
    visit: Callable[[Carry, list[Arrival]], Carry],
    carry: Carry,
) -> Carry:
    """Send each device's parts once round the ring, one part per lane.

    `visit(carry, arrivals)` is called for each of the `size` steps with what is here then, first
    with the device's own parts. The parts make `size - 1` hops.
    """

    def arrivals(parts: Sequence[jax.Array], step: int | jax.Array) -> list[Arrival]:
        return [
            Arrival(lane, part, ring.upstream(lane, step))
            for lane, part in zip(lanes, parts, strict=True)
        ]

    def advance(
        step: int | jax.Array, state: tuple[Carry, tuple[jax.Array, ...]]
    ) -> tuple[Carry, tuple[jax.Array, ...]]:
        carry, here = state
        coming = tuple(ring.hop(lane, part) for lane, part in zip(lanes, here, strict=True))
        return visit(carry, arrivals(here, step)), coming

    state = carry, tuple(parts)
    if ring.rolled:
        state = lax.fori_loop(0, ring.size - 1, advance, state)
    else:
        for step in range(ring.size - 1):
            state = _finished(advance(step, state))
    carry, last = state
    return visit(carry, arrivals(last, ring.size - 1))


def in_turn(
    visit: Callable[[Carry, Arrival], Carry],
) -> Callable[[Carry, list[Arrival]], Carry]:
    """A visit to one arrival after the other, so that each lane's hop has a product beside it."""

    def visit_all(carry: Carry, arrivals: list[Arrival]) -> Carry:
        first, *others = arrivals
        carry = visit(carry, first)
        for lane, part, source in others:
            carry, part = _finished((carry, part))
            carry = visit(carry, Arrival(lane, part, source))
        return carry

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
            mine, operands = _finished((mine, operands))
            found.append(mine)
        return tuple(found)

    def advance(
        operands: tuple[jax.Array, ...], step: int | jax.Array, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        coming = [ring.hop(lane, part) for lane, part in zip(lanes, sums, strict=True)]
        return tuple(sum_ + mine for sum_, mine in zip(coming, terms(operands, step), strict=True))

    sums = terms(operands, 0)
    if ring.rolled:
        sums = lax.fori_loop(1, ring.size, partial(advance, operands), sums)
    else:
        for step in range(1, ring.size):
            sums, operands = _finished((sums, operands))
            sums = advance(operands, step, sums)
    return sums


def _finished(state: State) -> State:
    """The state, complete: nothing that uses a part of it begins before all of it is there."""
    return cast(State, lax.optimization_barrier(state))  # type: ignore[no-untyped-call]
