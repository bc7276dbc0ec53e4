"""How the projections of a block are multiplied: plainly, or on rings that move the rows as well.

A block is written once, in `drumline.parallel.block.steps`, and says only which weights its rows
meet. Whoever calls it passes what multiplies: `Plain` where a device has all it needs, or where XLA
is to place the communication, and `Rings` where weights are divided between devices.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from drumline.parallel.axes import AxisName
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.ring import Direction, Loop
from drumline.parallel.rings.scatter import matmul_reducescatter


class Projections(Protocol):
    """Multiplies by the weights of one part of a block: heads, or hidden features."""

    def spread_out(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """From tokens to heads or features: x times each of some weights."""
        ...

    def bring_back(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """From heads or features to tokens: summed over all dimensions of w but the last."""
        ...


@dataclass(frozen=True)
class Plain:
    """Products of what is there, and nothing else.

    Attributes:
        precision: of each multiplication, as `jnp.matmul` takes it.
    """

    precision: lax.PrecisionLike = None

    def spread_out(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """As `Projections` has it."""
        return [jnp.tensordot(x, w, 1, precision=self.precision) for w in weights]

    def bring_back(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """As `Projections` has it."""
        return jnp.tensordot(x, w, w.ndim - 1, precision=self.precision)


@dataclass(frozen=True)
class Rings:
    """Products inside `jax.shard_map` whose transfers are hidden behind the multiplication.

    Weights that spread out have their columns divided over the axis, weights that bring back their
    rows, and the sequence is divided over it before and after: the first gather it while they
    multiply, the second scatter it again.

    Attributes:
        axis_name: the mesh axis (or axes) of the ring.
        direction: `"both"` uses both directions of the ring's links, `"one"` sends everything one
            way.
        loop: `"rolled"`, `"unrolled"` or `"auto"`.
        precision: of each multiplication, as `jnp.matmul` takes it.
        wire_dtype: the type in which sums travel; None is that in which they are added, float32.
    """

    axis_name: AxisName
    direction: Direction = "both"
    loop: Loop = "auto"
    precision: lax.PrecisionLike = None
    wire_dtype: DTypeLike | None = None

    def spread_out(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """As `Projections` has it; one tour of x serves all weights."""
        parts = allgather_matmul(
            x,
            [w.reshape(w.shape[0], -1) for w in weights],
            axis_name=self.axis_name,
            gathered="rows",
            direction=self.direction,
            loop=self.loop,
            precision=self.precision,
            wire_dtype=self.wire_dtype,
        )
        return [
            part.reshape(*part.shape[:-1], *w.shape[1:])
            for part, w in zip(parts, weights, strict=True)
        ]

    def bring_back(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """As `Projections` has it; the result is scattered."""
        return matmul_reducescatter(
            x.reshape(*x.shape[: x.ndim - w.ndim + 1], -1),
            w.reshape(-1, w.shape[-1]),
            axis_name=self.axis_name,
            scattered="rows",
            direction=self.direction,
            loop=self.loop,
            precision=self.precision,
            wire_dtype=self.wire_dtype,
        )
