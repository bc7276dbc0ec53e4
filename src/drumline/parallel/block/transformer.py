"""`TransformerBlock`: attention and feed-forward, tensor parallel, with every projection on a ring.

Between the projections the activations are sharded by sequence, `[B_X, S_Y, D]`, so that norms
and residuals need no communication and no device holds activations twice. Four rings carry the
block: queries, keys and values gather the sequence while they multiply, the output projection
scatters it again, and so do the two sides of the feed-forward part.

    x[B_X, S_Y, D] → norm → gather · W_qkv → attention over own heads → · W_o scatter → + x
                   → norm → gather · W_in  → activation               → · W_out scatter → + x
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.parallel.block import steps
from drumline.parallel.block.attention import Kernel, attend
from drumline.parallel.block.norms import rms_norm
from drumline.parallel.block.projections import Plain, Projections, Rings
from drumline.parallel.block.shape import BlockShape
from drumline.parallel.block.steps import Activation
from drumline.parallel.block.weights import (
    Weight,
    attention_weights,
    begin,
    feedforward_weights,
)
from drumline.parallel.rings.ring import Direction, Loop


@dataclass(frozen=True)
class BlockAxes:
    """Which mesh axis divides what; changing the strategy is changing this.

    Attributes:
        batch: the axis (or axes) of the batch, None for none.
        model: the axis of the ring: the sequence between the projections, heads and hidden
            features within them.
    """

    batch: str | tuple[str, ...] | None = "X"
    model: str = "Y"


class TransformerBlock(eqx.Module):
    """A pre-norm Transformer block on rings.

    With `overlap=False` the same weights go through plain `jit` shardings, where XLA places
    all-gathers and reductions around the same multiplications.
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
        """Draw the weights, each with variance 1/(the length it is summed over).

        Args:
            shape: the sizes.
            key: for the weights.
            axes: the mesh axes, `BlockAxes()` if None.
            overlap: whether the projections go through rings.
            direction: of the rings, `"both"` or `"one"`.
            loop: of the rings, `"unrolled"`, `"rolled"` or `"auto"`.
            activation: the feed-forward part's non-linearity, element by element.
            kernel: of attention, as `drumline.parallel.block.attention` lists them.
            precision: of the projections' multiplications.
            wire_dtype: in which the rings' sums travel; None is float32.
            dtype: of the weights, and of the activations to call the block with.
        """
        keys = iter(jax.random.split(key, 7))

        def draw(weight: Weight) -> jax.Array:
            scale = jnp.asarray(weight.summed**-0.5, dtype)
            return jax.random.normal(next(keys), weight.dims, dtype) * scale

        self.gate = None  # unless there is one among the weights
        for name, weight in begin(_weights(shape), draw, dtype).items():
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
        """One block further.

        Args:
            x: activations, the batch over `axes.batch` and the sequence over `axes.model`.
            mesh: the mesh; the one set with `jax.set_mesh` if None.
            overlap: this time otherwise than the block's field says.

        Returns:
            Activations of the same shape and sharding.
        """
        on = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        self._check(x, on)
        on_rings = self.overlap if overlap is None else overlap
        return self._on_rings(x, on) if on_rings else self._on_plain_jit(x, on)

    def specs(self) -> TransformerBlock:
        """This block with a `PartitionSpec` in place of each weight."""
        weights = _weights(self.shape)

        def spec(path: tuple[GetAttrKey], _weight: jax.Array) -> PartitionSpec:
            axes = weights[path[-1].name].axes
            divided = [at for at, axis in enumerate(axes) if axis in ("heads", "hidden")]
            return _spec(*[None] * divided[0], self.axes.model) if divided else _spec()

        return cast(TransformerBlock, jax.tree_util.tree_map_with_path(spec, self))

    def placed(self, mesh: Mesh) -> TransformerBlock:
        """This block with its weights on the devices of a mesh."""
        shardings = jax.tree.map(partial(NamedSharding, mesh), self.specs())
        return cast(TransformerBlock, jax.device_put(self, shardings))

    def _on_rings(self, x: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
        rings = Rings(self.axes.model, self.direction, self.loop, self.precision, self.wire_dtype)
        place = _spec(self.axes.batch, self.axes.model)

        def forward(block: TransformerBlock, x: jax.Array) -> jax.Array:
            return block._forward(x, rings)

        on_devices = jax.shard_map(
            forward, mesh=mesh, in_specs=(self.specs(), place), out_specs=place
        )
        return on_devices(self, x)

    def _on_plain_jit(self, x: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
        project = _Constrained(mesh, self.axes, Plain(self.precision))
        place = _spec(self.axes.batch, self.axes.model)

        def forward(block: TransformerBlock, x: jax.Array) -> jax.Array:
            return block._forward(project.constrain(x, place), project)

        if not project.explicit:
            return forward(self, x)
        placed = NamedSharding(mesh, place)
        return cast(jax.Array, jax.sharding.auto_axes(forward, out_sharding=placed)(self, x))

    def _forward(self, x: jax.Array, project: Projections) -> jax.Array:
        """The block, but for how its projections move the sequence apart and together."""
        shape = self.shape
        leaves = jax.tree_util.tree_leaves_with_path(self)
        w = {path[-1].name: weight for path, weight in leaves}
        norm = partial(rms_norm, epsilon=shape.epsilon)
        mix = partial(
            attend, causal=shape.causal, kernel=self.kernel, rotary_base=shape.rotary_base
        )
        x = steps.attention(x, w, project, norm=norm, attend=mix)
        return steps.feedforward(x, w, project, norm=norm, activation=self.activation)

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
        divided = {
            "kv_heads": (self.shape.kv_heads, self.axes.model, devices),
            "hidden": (self.shape.hidden, self.axes.model, devices),
            "sequence length": (x.shape[1], self.axes.model, devices),
            "batch": (x.shape[0], batch, prod(mesh.shape[axis] for axis in batch_axes)),
        }
        for name, (length, over, count) in divided.items():
            if length % count:
                raise ValueError(
                    f"TransformerBlock: {name} {length} cannot be divided between "
                    f"the {count} devices of axis {over!r}"
                )


@dataclass(frozen=True)
class _Constrained:
    """Plain products that say how their results lie on a mesh; XLA moves what has to move."""

    mesh: Mesh | AbstractMesh
    axes: BlockAxes
    plain: Plain

    @property
    def explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def constrain(self, x: jax.Array, place: PartitionSpec) -> jax.Array:
        wanted = place if self.explicit else NamedSharding(self.mesh, place)
        return cast(jax.Array, lax.with_sharding_constraint(x, wanted))

    def spread_out(self, x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
        place = _spec(self.axes.batch, None, self.axes.model)
        each = (out for w in weights for out in self.plain.spread_out(x, [w]))
        return [self.constrain(out, place) for out in each]

    def bring_back(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self.constrain(self.plain.bring_back(x, w), _spec(self.axes.batch, self.axes.model))


def _weights(shape: BlockShape) -> dict[str, Weight]:
    return {**attention_weights(shape), **feedforward_weights(shape)}


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)
