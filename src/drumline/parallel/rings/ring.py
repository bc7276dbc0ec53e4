"""The ring that a mesh axis makes: its devices in a circle, who sends what to whom.

Nothing is multiplied here. `loops` and `chunks` move arrays round a ring, in the two forms that
`direction="both"` has, and each form is written for the platforms whose compilers like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, Order, devices_along
from drumline.parallel.target import Target, target_here

Direction = Literal["both", "one"]
Loop = Literal["auto", "unrolled", "rolled"]
State = TypeVar("State")

# Two devices have one hop between them, and nothing to roll. A longer ring is a loop: each step's
# buffers serve the next, its program does not grow with the axis (at eight devices it compiles in
# about half the time), and the transfer of a step still stands beside its multiplication.
LONGEST_UNROLLED = 2
# The TPU's compiler copies what a loop carries in every step, and adds sums within the product only
# outside of loops: there, rings are written out until the program becomes unwieldy.
LONGEST_UNROLLED_ON_TPU = 16


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
    wire_dtype: jnp.dtype | None = None
    """The type in which sums travel; None for that in which they are added."""
    target: Target = "other"
    """What the steps are written for."""

    @property
    def rolled(self) -> bool:
        """Whether the steps become one loop in the program instead of being written out."""
        longest = LONGEST_UNROLLED_ON_TPU if self.target == "tpu" else LONGEST_UNROLLED
        return self.loop == "rolled" or (self.loop == "auto" and self.size > longest)

    @property
    def whole(self) -> bool:
        """Whether whole shards go both ways, half round, instead of halves all the way."""
        written_out = self.target == "tpu" and not self.rolled
        return written_out and self.direction == "both" and self.size > 2

    def lanes(self, rows: int) -> tuple[Lane, ...]:
        """The lanes of a shard of so many rows.

        Between two devices there is one link, and a single row cannot be cut: these go one way.
        """
        if self.direction == "one" or self.whole or self.size == 2 or rows < 2:
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

    def send_sum(self, lane: Lane, part: jax.Array) -> jax.Array:
        """Send a sum to the next device of its lane, in the type that sums travel in."""
        return self.hop(lane, part.astype(self.wire_dtype or part.dtype)).astype(part.dtype)

    def finished(self, state: State) -> State:
        """The state, complete: nothing that uses a part of it begins before all of it is there.

        For the TPU's compiler nothing is held back: it neither merges the products of a ring nor,
        behind a barrier, fuses a sum or a cast with its product.
        """
        if self.target == "tpu" and not self.rolled:
            return state
        return apart(state)

    def upstream(self, lane: Lane, steps: int | jax.Array) -> jax.Array:
        """Index of the device `steps` (0 to size) hops before this one on the lane."""
        # Unsigned: slices that start here need no code for negative indices.
        here = lax.axis_index(self.axis_name).astype(jnp.uint32)
        back = jnp.asarray(self.size - steps if lane.shift == 1 else steps, jnp.uint32)
        return lax.rem(here + back, jnp.uint32(self.size))


def ring_over(
    caller: str,
    axis_name: AxisName,
    direction: str,
    loop: str,
    precision: lax.PrecisionLike,
    wire_dtype: DTypeLike | None = None,
) -> Ring:
    """The ring of a mesh axis, its options checked on behalf of the function `caller`."""
    check_choice(caller, "direction", direction, get_args(Direction))
    check_choice(caller, "loop", loop, get_args(Loop))
    size = devices_along(caller, axis_name)
    order = None if isinstance(axis_name, str) else Order.of(caller, axis_name)
    wire = check_wire_dtype(caller, wire_dtype)
    way, steps = cast(Direction, direction), cast(Loop, loop)
    return Ring(axis_name, size, way, steps, precision, order, wire, target_here())


def check_wire_dtype(caller: str, wire_dtype: DTypeLike | None) -> jnp.dtype | None:
    """The type in which sums are to travel, refused in one sentence if it is none."""
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
    """Refuse a value that is none of the choices, in one sentence."""
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{caller}: {name} must be {expected}, not {value!r}")


def apart(state: State) -> State:
    """The state behind a barrier, on every platform."""
    return cast(State, lax.optimization_barrier(state))  # type: ignore[no-untyped-call]
