"""A tensor-parallel Transformer block and its feed-forward part, with collective matmuls on rings.

Between the projections the activations are sharded by sequence, `[B_X, S_Y, D]`, so norms and
residuals need no communication. A block has four rings: the column-parallel projections gather the
sequence while they multiply, and the row-parallel projections scatter their sums.

    x[B_X, S_Y, D] → norm → gather · W_qkv → attention over own heads → · W_o scatter → + x
                   → norm → gather · W_in  → activation               → · W_out scatter → + x
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, cast, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.parallel.axes import AxisName
from drumline.parallel.block.attention import Kernel, attend
from drumline.parallel.block.layers import (
    Activation,
    LocalProjections,
    Projections,
    ShardedProjections,
    attention_layer,
    feedforward_layer,
    rms_norm,
)
from drumline.parallel.block.weights import (
    BlockShape,
    Weight,
    attention_weights,
    feedforward_weights,
    init,
)
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.ring import Direction, Loop, check_choice
from drumline.parallel.rings.scatter import matmul_reducescatter

ShardedDimension = Literal["columns", "rows"]


def feedforward(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    axis_name: AxisName,
    activation: Callable[[jax.Array], jax.Array],
    layout: ShardedDimension = "columns",
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Compute `activation(x · w_in) · w_out` with overlapped communication in `jax.shard_map`.

    The activations are sharded over `axis_name` (Y below) before and after. The first matmul
    gathers them, the second scatters its sums.

    - `layout="columns"`: `In[..., D_Y] · W_in[D, F_Y] · W_out[F_Y, D] → Out[..., D_Y]`. The
      features of the activations are sharded.
    - `layout="rows"`: `In[..., S_Y, D] · W_in[D, F_Y] · W_out[F_Y, D] → Out[..., S_Y, D]`. The
      sequence is sharded, as in sequence parallelism.

    The hidden activations `[..., F_Y]` are saved for the gradient. Wrap the call in
    `jax.checkpoint` to recompute them instead.

    Args:
        x: this device's shard of the activations, with any number of leading dimensions.
        w_in: this device's columns of the first weights.
        w_out: this device's rows of the second weights.
        axis_name: the mesh axis (or axes) of the ring.
        activation: the non-linearity, a function of the local hidden columns.
        layout: the sharded dimension of the activations.
        direction: the directions of the permutes, `"both"` or `"one"`.
        loop: `"rolled"` for a loop, `"unrolled"` for straight-line code. `"auto"` rolls rings of
            more than two devices (on TPUs, sixteen) to save memory and compile time.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which sums are sent; None is the type of the sums, float32.
    """
    check_choice("feedforward", "layout", layout, get_args(ShardedDimension))
    hidden = allgather_matmul(
        x,
        w_in,
        axis_name=axis_name,
        gathered="contraction" if layout == "columns" else "rows",
        direction=direction,
        loop=loop,
        precision=precision,
        wire_dtype=wire_dtype,
    )
    return matmul_reducescatter(
        activation(hidden),
        w_out,
        axis_name=axis_name,
        scattered=layout,
        direction=direction,
        loop=loop,
        precision=precision,
        wire_dtype=wire_dtype,
    )


@dataclass(frozen=True)
class BlockAxes:
    """The mesh axes of a `TransformerBlock`.

    Attributes:
        batch: the axis (or axes) that shards the batch, or None.
        model: the axis of the ring. It shards the sequence between the projections, and heads and
            hidden features inside them.
    """

    batch: str | tuple[str, ...] | None = "X"
    model: str = "Y"


class TransformerBlock(eqx.Module):
    """A pre-norm Transformer block with collective matmuls.

    With `overlap=False` the same weights run under plain `jit` shardings, where XLA inserts
    all-gathers and reduce-scatters around the same matmuls.
    """

    attention_norm: Float[Array, " D"]
    query: Float[Array, "D N H"]
    key: Float[Array, "D K H"]
    value: Float[Array, "D K H"]
    output: Float[Array, "N H D"]
    feedforward_norm: Float[Array, " D"]
    gate: Float[Array, "D F"] | None
    up: Float[Array, "D F"]
    down: Float[Array, "F D"]

    shape: BlockShape = eqx.field(static=True)
    axes: BlockAxes = eqx.field(static=True)
    overlap: bool = eqx.field(static=True)
    direction: Direction = eqx.field(static=True)
    loop: Loop = eqx.field(static=True)
    activation: Activation = eqx.field(static=True)
    kernel: Kernel = eqx.field(static=True)
    precision: lax.PrecisionLike = eqx.field(static=True)
    wire_dtype: DTypeLike | None = eqx.field(static=True)

    def __init__(
        self,
        shape: BlockShape,
        *,
        key: PRNGKeyArray,
        axes: BlockAxes | None = None,
        overlap: bool = True,
        direction: Direction = "both",
        loop: Loop = "auto",
        activation: Activation = jax.nn.silu,
        kernel: Kernel = "xla",
        precision: lax.PrecisionLike = None,
        wire_dtype: DTypeLike | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """Draw the weights with variance 1/fan-in.

        Args:
            shape: the sizes.
            key: the random key of the weights.
            axes: the mesh axes; None is `BlockAxes()`.
            overlap: True for collective matmuls, False for plain `jit` shardings.
            direction: the direction of the rings, `"both"` or `"one"`.
            loop: the loop of the rings, `"unrolled"`, `"rolled"` or `"auto"`.
            activation: the elementwise non-linearity of the feed-forward layer.
            kernel: the attention kernel; `drumline.parallel.block.attention` lists them.
            precision: the precision of the projections.
            wire_dtype: the type in which rings send sums; None is float32.
            dtype: the type of the weights, and of the activations to call the block with.
        """
        keys = iter(jax.random.split(key, 7))

        def draw(weight: Weight) -> jax.Array:
            scale = jnp.asarray(weight.fan_in**-0.5, dtype)
            return jax.random.normal(next(keys), weight.dims, dtype) * scale

        self.gate = None  # replaced below if the block is gated
        for name, weight in init(_weights(shape), draw, dtype).items():
            setattr(self, name, weight)
        self.shape = shape
        self.axes = BlockAxes() if axes is None else axes
        self.overlap = overlap
        self.direction = direction
        self.loop = loop
        self.activation = activation
        self.kernel = kernel
        self.precision = precision
        self.wire_dtype = wire_dtype

    def __call__(
        self,
        x: Float[Array, "B S D"],
        *,
        mesh: Mesh | None = None,
        overlap: bool | None = None,
    ) -> Float[Array, "B S D"]:
        """Apply the block.

        Args:
            x: activations, the batch sharded over `axes.batch`, the sequence over `axes.model`.
            mesh: the mesh; None is the mesh set with `jax.set_mesh`.
            overlap: replaces the block's own `overlap` if not None.

        Returns:
            Activations of the same shape and sharding.
        """
        mesh_ = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        self._check(x, mesh_)
        use_rings = self.overlap if overlap is None else overlap
        return self._call_on_rings(x, mesh_) if use_rings else self._call_with_jit(x, mesh_)

    def specs(self) -> TransformerBlock:
        """Return this block with `PartitionSpec`s in place of its weights."""
        weights = _weights(self.shape)

        def spec(path: tuple[GetAttrKey], _weight: jax.Array) -> PartitionSpec:
            axes = weights[path[-1].name].axes
            sharded = [dim for dim, axis in enumerate(axes) if axis in ("heads", "hidden")]
            return _spec(*[None] * sharded[0], self.axes.model) if sharded else _spec()

        return cast(TransformerBlock, jax.tree_util.tree_map_with_path(spec, self))

    def placed(self, mesh: Mesh) -> TransformerBlock:
        """Return this block with its weights on the devices of a mesh."""
        shardings = jax.tree.map(partial(NamedSharding, mesh), self.specs())
        return cast(TransformerBlock, jax.device_put(self, shardings))

    def _call_on_rings(self, x: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
        project = ShardedProjections(
            self.axes.model, "ring", self.direction, self.loop, self.precision, self.wire_dtype
        )
        x_spec = _spec(self.axes.batch, self.axes.model)

        def forward(block: TransformerBlock, x: jax.Array) -> jax.Array:
            return block._forward(x, project)

        sharded_forward = jax.shard_map(
            forward, mesh=mesh, in_specs=(self.specs(), x_spec), out_specs=x_spec
        )
        return sharded_forward(self, x)

    def _call_with_jit(self, x: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
        project = _ConstrainedProjections(mesh, self.axes, LocalProjections(self.precision))
        x_spec = _spec(self.axes.batch, self.axes.model)

        def forward(block: TransformerBlock, x: jax.Array) -> jax.Array:
            return block._forward(project.constrain(x, x_spec), project)

        if not project.explicit:
            return forward(self, x)
        sharding = NamedSharding(mesh, x_spec)
        return cast(jax.Array, jax.sharding.auto_axes(forward, out_sharding=sharding)(self, x))

    def _forward(self, x: jax.Array, project: Projections) -> jax.Array:
        shape = self.shape
        leaves = jax.tree_util.tree_leaves_with_path(self)
        w = {path[-1].name: weight for path, weight in leaves}
        norm = partial(rms_norm, epsilon=shape.epsilon)
        attention = partial(
            attend, causal=shape.causal, kernel=self.kernel, rotary_base=shape.rotary_base
        )
        x = attention_layer(x, w, project, norm=norm, attend=attention)
        return feedforward_layer(x, w, project, norm=norm, activation=self.activation)

    def _check(self, x: jax.Array, mesh: Mesh | AbstractMesh) -> None:
        batch = self.axes.batch
        batch_axes = () if batch is None else (batch,) if isinstance(batch, str) else batch
        for axis in (*batch_axes, self.axes.model):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"TransformerBlock: axis {axis!r} is not among the mesh's "
                    f"{tuple(mesh.axis_names)}; set a mesh with jax.set_mesh, or change axes="
                )
        if x.ndim != 3 or x.shape[2] != self.shape.width:
            raise ValueError(
                f"TransformerBlock: x must be [batch, sequence, {self.shape.width}], not {x.shape}"
            )
        devices = mesh.shape[self.axes.model]
        sharded = {
            "kv_heads": (self.shape.kv_heads, self.axes.model, devices),
            "hidden": (self.shape.hidden, self.axes.model, devices),
            "sequence length": (x.shape[1], self.axes.model, devices),
            "batch": (x.shape[0], batch, prod(mesh.shape[axis] for axis in batch_axes)),
        }
        for name, (length, axes, count) in sharded.items():
            if length % count:
                raise ValueError(
                    f"TransformerBlock: {name} {length} cannot be divided between "
                    f"the {count} devices of axis {axes!r}"
                )


@dataclass(frozen=True)
class _ConstrainedProjections:
    """Plain matmuls with sharding constraints on their results. XLA adds the communication."""

    mesh: Mesh | AbstractMesh
    axes: BlockAxes
    local: LocalProjections

    @property
    def explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        sharding = spec if self.explicit else NamedSharding(self.mesh, spec)
        return cast(jax.Array, lax.with_sharding_constraint(x, sharding))

    def column_parallel(self, x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
        spec = _spec(self.axes.batch, None, self.axes.model)
        outs = (out for w in weights for out in self.local.column_parallel(x, [w]))
        return [self.constrain(out, spec) for out in outs]

    def row_parallel(self, x: jax.Array, w: jax.Array) -> jax.Array:
        out = self.local.row_parallel(x, w)
        return self.constrain(out, _spec(self.axes.batch, self.axes.model))


def _weights(shape: BlockShape) -> dict[str, Weight]:
    return {**attention_weights(shape), **feedforward_weights(shape)}


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)
