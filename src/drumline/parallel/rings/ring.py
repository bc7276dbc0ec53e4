"""The ring of a mesh axis: its devices in a cycle, and the permutes between them.

`loops` moves arrays around a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, AxisOrder, devices_along
from drumline.parallel.target import Target, current_target

Direction = Literal["both", "one"]
Loop = Literal["auto", "unrolled", "rolled"]
State = TypeVar("State")

# A ring of two devices has a single permute. For larger rings a loop is better: the steps share
# buffers, the size of the program does not depend on the axis (with eight devices it compiles in
# about half the time), and permutes still overlap with matmuls.
LONGEST_UNROLLED = 2
# The TPU's compiler copies the carry of a loop in every step, and fuses sums with matmuls only
# outside of loops. Rings for TPUs are therefore unrolled until the program becomes too large.
LONGEST_UNROLLED_ON_TPU = 16


class Lane(NamedTuple):
    """A part of the data: `size` rows from `start`, sent `shift` (+1 or -1) devices on."""

    shift: int
    start: int
    size: int


class Arrival(NamedTuple):
    """A part that has arrived on this device, and the index of the device that sent it first."""

    lane: Lane
    part: jax.Array
    source: jax.Array


@dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis in a cycle, and the options of its permutes and matmuls.

    A ring over several axes follows the order of `lax.axis_index`.
    """

    axis_name: AxisName
    size: int
    direction: Direction
    loop: Loop
    precision: lax.PrecisionLike
    order: AxisOrder | None = None
    """The order of several axes on their mesh; None for a single axis."""
    wire_dtype: jnp.dtype | None = None
    """The type in which sums are sent; None is the type in which they are added."""
    target: Target = "other"
    """The compiler that the steps are written for."""

    @property
    def rolled(self) -> bool:
        """True if the steps are a loop."""
        longest = LONGEST_UNROLLED_ON_TPU if self.target == "tpu" else LONGEST_UNROLLED
        return self.loop == "rolled" or (self.loop == "auto" and self.size > longest)

    @property
    def full_shards(self) -> bool:
        """True if full shards move around half of the ring in each direction."""
        written_out = self.target == "tpu" and not self.rolled
        return written_out and self.direction == "both" and self.size > 2

    def lanes(self, rows: int) -> tuple[Lane, ...]:
        """Return the lanes of a shard with this many rows.

        Two devices have only one link, and a single row cannot be split, so these use one lane.
        """
        if self.direction == "one" or self.full_shards or self.size == 2 or rows < 2:
            return (Lane(1, 0, rows),)
        middle = (rows + 1) // 2
        return Lane(1, 0, middle), Lane(-1, middle, rows - middle)

    def permute(self, lane: Lane, part: jax.Array) -> jax.Array:
        """Send a part to the next device of its lane."""
        path = [(index, (index + lane.shift) % self.size) for index in range(self.size)]
        axes = self.axis_name
        if self.order is not None:
            axes, path = self.order.axes, self.order.path(path)
        sent: jax.Array = lax.ppermute(part, axes, path)  # type: ignore[no-untyped-call]
        return sent

    def permute_sum(self, lane: Lane, part: jax.Array) -> jax.Array:
        """Send a sum to the next device of its lane, in the type for sending sums."""
        return self.permute(lane, part.astype(self.wire_dtype or part.dtype)).astype(part.dtype)

    def step_barrier(self, state: State) -> State:
        """Return the state behind a barrier, so that GPU compilers do not merge the steps.

        The TPU's compiler does not merge matmuls, and a barrier would prevent the fusion of sums
        and casts with their matmuls, so it gets none.
        """
        if self.target == "tpu" and not self.rolled:
            return state
        return barrier(state)

    def upstream(self, lane: Lane, steps: int | jax.Array) -> jax.Array:
        """Return the index of the device `steps` (0 to size) permutes before this one."""
        # Unsigned, so slices from this index need no code for negative indices.
        index = lax.axis_index(self.axis_name).astype(jnp.uint32)
        offset = jnp.asarray(self.size - steps if lane.shift == 1 else steps, jnp.uint32)
        return lax.rem(index + offset, jnp.uint32(self.size))


def ring_over(
    caller: str,
    axis_name: AxisName,
    direction: str,
    loop: str,
    precision: lax.PrecisionLike,
    wire_dtype: DTypeLike | None = None,
) -> Ring:
    """Return the ring of a mesh axis. Check its options on behalf of the function `caller`."""
    check_choice(caller, "direction", direction, get_args(Direction))
    check_choice(caller, "loop", loop, get_args(Loop))
    size = devices_along(caller, axis_name)
    order = None if isinstance(axis_name, str) else AxisOrder.of(caller, axis_name)
    wire = check_wire_dtype(caller, wire_dtype)
    checked_direction, checked_loop = cast(Direction, direction), cast(Loop, loop)
    return Ring(
        axis_name, size, checked_direction, checked_loop, precision, order, wire, current_target()
    )


def check_wire_dtype(caller: str, wire_dtype: DTypeLike | None) -> jnp.dtype | None:
    """Return the type in which sums are sent. Raise ValueError if it is not floating-point."""
    if wire_dtype is None:
        return None
    try:
        wire = jnp.dtype(wire_dtype)
    except TypeError:
        wire = None
    if wire is None or not jnp.issubdtype(wire, jnp.floating):
        raise ValueError(
            f"{caller}: wire_dtype must be a floating-point type, as jnp.bfloat16, "
            f"not {wire_dtype!r}"
        )
    return wire


def check_choice(caller: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError if a value is not one of the choices."""
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{caller}: {name} must be {expected}, not {value!r}")


def barrier(state: State) -> State:
    """Return the state behind an optimization barrier, on every platform."""
    return cast(State, lax.optimization_barrier(state))  # type: ignore[no-untyped-call]
