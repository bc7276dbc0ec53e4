"""The layers of a Transformer block, shared by the models, `TransformerBlock` and `MoEBlock`.

    x → norm → · W_qkv → attention over heads → · W_o   → + x        attention_layer
      → norm → · W_in  → activation           → · W_out → + x        feedforward_layer
      → norm → router, experts                          → + x        expert_layer, instead of it

A block passes its weights by name, its norm, its attention, its activation, and the `Projections`
that multiply by the weights. Some weights are optional: a `gate` makes the feed-forward layer
gated, a `*_shift` adds an offset to the norm, and biases (`query_bias`, `up_bias` and so on, all or
none) are added after the projections.

Every intermediate result has a tap, with the name of its weight or `mixed` (the output of
attention), `activation`, `attention` and `feedforward` (the residual sums).
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.einsum.costs import (
    CostMovement,
    Implementation,
    ProjectionPlan,
    RingCost,
    choose_implementation,
)
from drumline.parallel.grouped.blocks import accumulator
from drumline.parallel.rings.blocking import (
    BlockingCollective,
    gather_then_multiply,
    multiply_then_scatter,
)
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.ring import Direction, Loop
from drumline.parallel.rings.scatter import matmul_reducescatter
from drumline.parallel.taps import tap
from drumline.parallel.target import current_tpu
from drumline.parallel.typed import pmean

BlockWeights = Mapping[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]
Norm = Callable[..., jax.Array]
"""A function of rows, a scale, and a shift if the block has one."""
Extra = TypeVar("Extra")

PROJECTION = "projection"
"""The name (`checkpoint_name`) of the results of sharded projections, which remat policies save.
Policies do not see the matmuls inside of functions with their own gradient."""
EPSILON = 1e-6
"""The default added to the mean square or the variance in the norms."""


# Layers


class Attention(Protocol):
    """A function that mixes the values of a sequence, separately per head."""

    def __call__(
        self,
        query: Float[Array, "B S N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
    ) -> Float[Array, "B S N H"]:
        """Return the mixed values."""
        ...


def attention_layer(
    x: Float[Array, "*rows D"],
    w: BlockWeights,
    project: Projections,
    *,
    norm: Norm,
    attend: Attention,
    sequences: tuple[int, ...] | None = None,
) -> Float[Array, "*rows D"]:
    """Apply the first layer of the block.

    Args:
        x: tokens, `[B, S, D]`, or `[B·S, D]` if `sequences` is given.
        w: the weights by name.
        project: multiplies by the weights.
        norm: normalizes x before the projections.
        attend: mixes the values.
        sequences: `(B, S)` if x has one row per token.
    """
    normed = _apply_norm(norm, x, w, "attention", sequences)
    query, key, value = _column_parallel(project, normed, w, ("query", "key", "value"))
    mixed = tap("mixed", attend(query, key, value))
    return tap("attention", x + _row_parallel(project, mixed, w, "output", x.shape))


def feedforward_layer(
    x: Float[Array, "*rows D"],
    w: BlockWeights,
    project: Projections,
    *,
    norm: Norm,
    activation: Activation,
    sequences: tuple[int, ...] | None = None,
) -> Float[Array, "*rows D"]:
    """Apply the second layer of the block, which has no interaction between tokens."""
    normed = _apply_norm(norm, x, w, "feedforward", sequences)
    if "gate" in w:
        gate, up = _column_parallel(project, normed, w, ("gate", "up"))
        hidden = tap("activation", activation(gate)) * up
    else:
        (up,) = _column_parallel(project, normed, w, ("up",))
        hidden = tap("activation", activation(up))
    return tap("feedforward", x + _row_parallel(project, hidden, w, "down", x.shape))


def expert_layer(
    x: Float[Array, "*rows D"],
    w: BlockWeights,
    experts: Callable[[Float[Array, "*rows D"]], tuple[Float[Array, "*rows D"], Extra]],
    *,
    norm: Norm,
) -> tuple[Float[Array, "*rows D"], Extra]:
    """Apply a mixture of experts as the second layer. Return its extra result as well."""
    out, extra = experts(_apply_norm(norm, x, w, "feedforward"))
    return tap("feedforward", x + tap("experts", out)), extra


def _apply_norm(
    norm: Norm, x: jax.Array, w: BlockWeights, layer: str, sequences: tuple[int, ...] | None = None
) -> jax.Array:
    names = (f"{layer}_norm", f"{layer}_shift")
    normed = tap(names[0], norm(x, *(w[name] for name in names if name in w)))
    return normed if sequences is None else normed.reshape(*sequences, -1)


def _column_parallel(
    project: Projections, x: jax.Array, w: BlockWeights, names: Sequence[str]
) -> list[jax.Array]:
    weights = [w[name] for name in names]
    if f"{names[0]}_bias" not in w:
        outs = project.column_parallel(x, weights)
        return [tap(name, out) for name, out in zip(names, outs, strict=True)]
    # With flat weights the result is a matrix, and cuBLAS adds the bias in the matmul's epilogue.
    flat = [weight.reshape(weight.shape[0], -1) for weight in weights]
    biases = [w[f"{name}_bias"].reshape(-1) for name in names]
    outs = project.column_parallel(x, flat)
    sums = (out + bias.astype(out.dtype) for out, bias in zip(outs, biases, strict=True))
    return [
        tap(name, out.reshape(*out.shape[:-1], *w[name].shape[1:]))
        for name, out in zip(names, sums, strict=True)
    ]


def _row_parallel(
    project: Projections, x: jax.Array, w: BlockWeights, name: str, shape: tuple[int, ...]
) -> jax.Array:
    weight = w[name]
    if f"{name}_bias" not in w:
        return tap(name, project.row_parallel(x, weight).reshape(shape))
    x = x.reshape(*x.shape[: x.ndim - weight.ndim + 1], -1)
    out = project.row_parallel(x, weight.reshape(-1, weight.shape[-1])).reshape(shape)
    return tap(name, out + w[f"{name}_bias"].astype(out.dtype))


# Projections


class Projections(Protocol):
    """Matmuls with the weights of a layer, which are sharded by heads or by hidden features."""

    def column_parallel(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """Multiply tokens by several weights. The results have heads or hidden features."""
        ...

    def row_parallel(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """Contract heads or hidden features, all dimensions of the weight but the last."""
        ...


@dataclass(frozen=True)
class LocalProjections:
    """Plain matmuls, for unsharded weights or if XLA inserts the communication.

    Attributes:
        precision: the precision of the matmuls, as for `jnp.matmul`.
    """

    precision: lax.PrecisionLike = None

    def column_parallel(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """Multiply x by the weights."""
        return [jnp.tensordot(x, w, 1, precision=self.precision) for w in weights]

    def row_parallel(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """Contract all dimensions of the weight but the last."""
        return jnp.tensordot(x, w, w.ndim - 1, precision=self.precision)


@dataclass(frozen=True)
class ShardedProjections:
    """Matmuls with sharded weights inside `jax.shard_map`: on rings, or after blocking collectives.

    The sequence is sharded over the axis before and after. A column-parallel matmul gathers the
    sequence, and a row-parallel matmul scatters its sums.

    Attributes:
        axis_name: the mesh axis (or axes) that shards the weights and the sequence.
        implementation: `"ring"`, `"xla"` (blocking collectives), or `"auto"`. On a TPU, `"auto"`
            chooses per matmul by the cost model (`drumline.parallel.einsum.costs`). Elsewhere it
            is a ring.
        direction: the directions of the permutes, `"both"` or `"one"`.
        loop: `"rolled"`, `"unrolled"` or `"auto"`.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which sums are sent. None is the type of the sums, float32; on a
            TPU, the type of the result if that is faster.
    """

    axis_name: AxisName
    implementation: Implementation = "auto"
    direction: Direction = "both"
    loop: Loop = "auto"
    precision: lax.PrecisionLike = None
    wire_dtype: DTypeLike | None = None

    def column_parallel(
        self, x: Float[Array, "*B S D"], weights: Sequence[Float[Array, "D ..."]]
    ) -> list[Float[Array, "*B S ..."]]:
        """Gather x once and multiply it by the weights."""
        matrices = tuple(w.reshape(w.shape[0], -1) for w in weights)
        columns = sum(w.shape[1] for w in matrices)
        plan = self._plan("gather rows", x, columns, x.size)
        outs: Sequence[jax.Array]
        if plan.implementation == "xla":
            outs = gather_then_multiply(self._collective(plan), x, matrices)
        else:
            outs = allgather_matmul(
                x,
                matrices,
                axis_name=self.axis_name,
                gathered="rows",
                direction=self.direction,
                loop=self.loop,
                precision=self.precision,
                wire_dtype=plan.wire_dtype,
            )
        return [
            checkpoint_name(out.reshape(*out.shape[:-1], *w.shape[1:]), PROJECTION)
            for out, w in zip(outs, weights, strict=True)
        ]

    def row_parallel(
        self, x: Float[Array, "*B S ..."], w: Float[Array, "... D"]
    ) -> Float[Array, "*B S D"]:
        """Contract all dimensions of the weight but the last, and scatter the sequence."""
        x, w = x.reshape(*x.shape[: x.ndim - w.ndim + 1], -1), w.reshape(-1, w.shape[-1])
        devices = devices_along("row_parallel", self.axis_name)
        rows = x.size // w.shape[0]
        plan = self._plan("scatter", x, w.shape[1], rows * w.shape[1] // devices)
        if plan.implementation == "xla":
            out = multiply_then_scatter(self._collective(plan), x, w)
        else:
            out = matmul_reducescatter(
                x,
                w,
                axis_name=self.axis_name,
                scattered="rows",
                direction=self.direction,
                loop=self.loop,
                precision=self.precision,
                wire_dtype=plan.wire_dtype,
            )
        named: jax.Array = checkpoint_name(out, PROJECTION)
        return named

    def _plan(
        self, movement: CostMovement, x: jax.Array, columns: int, shard: int
    ) -> ProjectionPlan:
        """Choose the implementation of a matmul of x with weights that have some columns."""
        devices = devices_along("projections", self.axis_name)
        depth = x.shape[-1]
        rows = x.size // depth * (devices if movement == "gather rows" else 1)
        cost = RingCost(
            movement,
            devices,
            2.0 * rows * depth * columns,
            shard,
            depth * columns,
            x.dtype.itemsize,
            self.direction == "one",
        )
        return choose_implementation(
            cost, self.implementation, self.wire_dtype, x.dtype, current_tpu()
        )

    def _collective(self, plan: ProjectionPlan) -> BlockingCollective:
        return BlockingCollective(self.axis_name, plan.wire_dtype, self.precision)


# Norms


def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float = EPSILON,
    axis_name: AxisName | None = None,
) -> Float[Array, "*rows D"]:
    """Scale rows to a mean square of one, in float32 or wider, and multiply by the weight.

    `axis_name` is the mesh axis that shards the rows' features, inside `jax.shard_map`.
    """
    dtype = accumulator(x.dtype)
    wide = x.astype(dtype)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if axis_name is not None:
        mean_square = pmean(mean_square, axis_name)
    return (wide * lax.rsqrt(mean_square + epsilon) * weight.astype(dtype)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    shift: Float[Array, " D"],
    *,
    epsilon: float = EPSILON,
) -> Float[Array, "*rows D"]:
    """Normalize rows to mean zero and variance one in float32, then scale and shift them.

    The variance is the mean of squares minus the square of the mean, which reads a row only once
    but is inexact if the mean is much larger than the deviation. The rows are therefore shifted by
    their first element, which is at most √D standard deviations from the mean. This bounds the
    relative error by D·2⁻²⁴. The shift cancels in the result, so it needs no gradient.
    """
    wide = x.astype(jnp.float32)
    shifted = wide - lax.stop_gradient(wide[..., :1])
    mean = jnp.mean(shifted, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(shifted), axis=-1, keepdims=True) - jnp.square(mean)
    centred = shifted - mean
    variance = jnp.maximum(variance, 0.0)
    return (centred * lax.rsqrt(variance + epsilon) * scale + shift).astype(x.dtype)
