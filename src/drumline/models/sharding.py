"""Sharding of models: layouts, and the operations that depend on them.

A model names the dimensions of its arrays by logical axes ("embed", "heads", …). A layout maps the
logical axes to mesh axes. The code of a model works on the shards of a device, and
`ModelSharding` provides the operations that depend on the layout:

- Data parallelism shards the "batch" (and "sequence") dimensions. A device computes its own rows,
  and the gradients of shared weights are summed.
- FSDP shards the "embed" dimension of weights. They are gathered before use, and their gradients
  are scattered.
- Tensor parallelism shards the "heads" and "hidden" dimensions of weights. A device multiplies by
  its own columns or rows, while the activations move around a ring.

Mesh axes of size 1 are ignored. Without other mesh axes, the model runs outside of `shard_map`.
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.models.remat import Remat, rematerialize
from drumline.parallel.axes import varying_axes
from drumline.parallel.block.layers import LocalProjections, Projections, ShardedProjections
from drumline.parallel.einsum.costs import Implementation

MeshAxes = str | tuple[str, ...] | None
"""The mesh axes that shard a dimension, major to minor; None for an unsharded dimension."""

Layout = Mapping[str, MeshAxes]
"""The mesh axes of each logical axis. Logical axes that are not listed are not sharded."""

LogicalAxes = tuple[str | tuple[str, ...] | None, ...]
"""The logical axis (or axes) of every dimension of an array."""

Params = dict[str, Any]
Weights = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Tree = TypeVar("Tree")
Batch = dict[str, jax.Array]
Output = TypeVar("Output")
LocalFunction = Callable[["ModelSharding", Params, Batch], Output]


def resolve_layout(
    model: str, layout: str | Layout, table: Mapping[str, Layout], logical: Sequence[str]
) -> Layout:
    """Return the mapping of a layout. Raise ValueError if it is invalid.

    Args:
        model: the name of the model, for messages.
        layout: a name from `table`, or a mapping.
        table: the layouts by name.
        logical: the logical axes.
    """
    if isinstance(layout, str):
        if layout not in table:
            raise ValueError(
                f"{model}: layout {layout!r} is unknown; choose from {_join(table)}, "
                "or give a mapping from logical axes to mesh axes"
            )
        layout = table[layout]
    for name in layout:
        if name not in logical:
            raise ValueError(
                f"{model}: layout has {name!r}, which is not a logical axis; "
                f"the logical axes are {_join(logical)}"
            )
    unmatched = [axis for axis in axes_of(layout, "embed") if axis not in axes_of(layout, "batch")]
    if unmatched:
        raise ValueError(
            f"{model}: layout shards embed over {unmatched[0]!r} but not the batch; weights are "
            "gathered over axes that hold different examples, so name that axis for both"
        )
    return layout


def check_same_axes(model: str, layout: Layout, names: Sequence[str]) -> None:
    """Raise ValueError unless these logical axes, which share a ring, have equal mesh axes."""
    first, *others = names
    for name in others:
        if axes_of(layout, name) != axes_of(layout, first):
            raise ValueError(
                f"{model}: layout shards {first} over {layout.get(first)!r} and {name} over "
                f"{layout.get(name)!r}; give {_join(names)} the same mesh axis, or none"
            )


def check_disjoint_axes(model: str, layout: Layout, first: str, second: str) -> None:
    """Raise ValueError if two logical axes share a mesh axis."""
    for axis in axes_of(layout, first):
        if axis in axes_of(layout, second):
            raise ValueError(
                f"{model}: layout shards both {first} and {second} over {axis!r}; "
                "give them different mesh axes"
            )


def axes_of(layout: Layout, name: str) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis."""
    return _as_tuple(layout.get(name))


def spec_of(layout: Layout, axes: LogicalAxes) -> PartitionSpec:
    """Return the `PartitionSpec` of an array with these logical axes."""
    return _spec(*(mesh_axes or None for mesh_axes in _mesh_axes(layout, axes)))


def specs_of(layout: Layout, axes: Any) -> Any:
    """Map a tree of `LogicalAxes` to a tree of `PartitionSpec`s."""
    return jax.tree.map(
        partial(spec_of, layout), axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


class ShardedModel(ABC):
    """A model that is sharded by its layout."""

    compiler_options: ClassVar[Mapping[str, Mapping[str, bool]]] = {
        "gpu": {"xla_gpu_enable_triton_gemm": False}
    }
    """The default compiler options of a training step by platform. With cuBLAS only, a 1.3B decoder
    trains 5 % faster on an H200 than with the matmuls that XLA's autotuning picks, and compiles in
    half the time (benchmarks/train_h200.py)."""

    @abstractmethod
    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights."""

    @abstractmethod
    def _layout(self) -> Layout:
        """Return the mesh axes of each logical axis."""

    @abstractmethod
    def _logical_axes(self) -> dict[str, Any]:
        """Return a tree like the weights, with their `LogicalAxes`."""

    def specs(self) -> Any:
        """Return a tree like the weights, with their `PartitionSpec`s."""
        return specs_of(self._layout(), self._logical_axes())

    def batch_spec(self) -> PartitionSpec:
        """Return the `PartitionSpec` of a batch."""
        return spec_of(self._layout(), ("batch",))

    @abstractmethod
    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError if labels or tokens are out of range. Skip traced values."""

    def check(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model does not fit the mesh."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        sharding = ModelSharding.on_mesh(mesh, type(self).__name__, self._layout())
        sharding.check_weights(shapes, self._logical_axes())


@dataclass(frozen=True)
class ModelSharding:
    """The layout of a model on a mesh, and the operations of a device that depend on it.

    Attributes:
        model: the name of the model, for messages.
        layout: the mesh axes of the logical axes, without mesh axes of size 1.
        sizes: the sizes of the mesh axes in use.
    """

    model: str
    layout: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @staticmethod
    def on_mesh(mesh: Mesh | AbstractMesh, model: str, layout: Layout) -> ModelSharding:
        """Apply a layout to a mesh. Raise ValueError if the mesh lacks an axis of the layout."""
        if mesh.empty:
            return ModelSharding(model, {}, {})
        for name, axes in layout.items():
            for axis in _as_tuple(axes):
                if axis not in mesh.axis_names:
                    raise ValueError(
                        f"{model}: layout shards {name} over mesh axis {axis!r}, but the mesh has "
                        f"{_join(mesh.axis_names)}; add that axis to the mesh, with size 1 if need "
                        "be"
                    )
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        kept = {
            name: tuple(axis for axis in _as_tuple(axes) if axis in sizes)
            for name, axes in layout.items()
        }
        used = {axis for axes in kept.values() for axis in axes}
        return ModelSharding(
            model, kept, {axis: size for axis, size in sizes.items() if axis in used}
        )

    @staticmethod
    def on_current_mesh(model: str, layout: Layout) -> ModelSharding:
        """Apply a layout to the mesh set with `jax.set_mesh`."""
        return ModelSharding.on_mesh(jax.sharding.get_abstract_mesh(), model, layout)

    @staticmethod
    def on_one_device(model: str, layout: Layout) -> ModelSharding:
        """Return the sharding on one device. Raise ValueError if the mesh shards the model."""
        sharding = ModelSharding.on_current_mesh(model, layout)
        if sharding.sizes:
            raise ValueError(
                f"{model}: logits are computed on one device, and this mesh shards the model over "
                f"{_join(sharding.sizes)}; call it outside of jax.set_mesh"
            )
        return sharding

    def axes(self, *names: str) -> tuple[str, ...]:
        """Return the mesh axes of some logical axes."""
        return tuple(axis for name in names for axis in axes_of(self.layout, name))

    def shards(self, *names: str) -> int:
        """Return the number of shards of some logical axes."""
        return prod(self.sizes[axis] for axis in self.axes(*names))

    def check_rows(self, label: str, length: int, name: str) -> None:
        """Raise ValueError if the mesh axes of a logical axis do not divide a length."""
        self._check(label, length, self.axes(name))

    def check_weights(self, params: Params, axes: Any) -> None:
        """Raise ValueError if the mesh does not divide a weight."""

        def check(path: Any, weight: Any, axes: LogicalAxes) -> None:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            for length, logical, mesh_axes in zip(
                weight.shape, axes, _mesh_axes(self.layout, axes), strict=True
            ):
                self._check(f"{' and '.join(_as_tuple(logical))} of {name},", length, mesh_axes)

        jax.tree_util.tree_map_with_path(check, params, axes)

    def _check(self, label: str, length: int, axes: tuple[str, ...]) -> None:
        count = prod(self.sizes[axis] for axis in axes)
        if length % count:
            raise ValueError(
                f"{self.model}: {label} {length} cannot be divided between the {count} devices "
                f"of mesh axis {' × '.join(axes)}"
            )

    def run(self, local: LocalFunction[Output], params: Params, axes: Any, batch: Batch) -> Output:
        """Run `local`, which computes metrics, on all devices of the mesh.

        Args:
            local: a function of this sharding and the local shards of weights and batch. It
                must return equal values on all devices.
            params: the full weights.
            axes: a tree like `params`, with the `LogicalAxes` of every weight.
            batch: the full batch.
        """
        if not self.sizes:
            return local(self, params, batch)
        self.check_weights(params, axes)
        sharded: Callable[..., Output] = jax.shard_map(
            partial(local, self),
            in_specs=(specs_of(self.layout, axes), spec_of(self.layout, ("batch",))),
            out_specs=_spec(),
        )
        return sharded(params, batch)

    def gathered(
        self, stored: Tree, axes: Any, dtype: Any, *, rows: Sequence[str] = ("batch", "sequence")
    ) -> Tree:
        """Return weights for matmuls: cast to `dtype`, with the "embed" dimension gathered.

        Weights without an "embed" dimension (norms, biases) are not cast. All weights are marked as
        varying over the mesh axes of `rows` before the cast, so their gradients are summed over
        these axes in float32.

        Args:
            stored: a tree of this device's shards.
            axes: a tree like `stored`, with the `LogicalAxes` of every weight.
            dtype: the type of the matmuls.
            rows: the logical axes that shard the rows of the activations.
        """

        def gather(weight: jax.Array, axes: LogicalAxes) -> jax.Array:
            # NumPy arrays, such as weights from a file, have other methods.
            weight = _vary(jnp.asarray(weight), self.axes(*rows))
            embed = [dim for dim, names in enumerate(axes) if "embed" in _as_tuple(names)]
            if not embed:
                return weight
            mesh_axes = _mesh_axes(self.layout, axes)[embed[0]]
            mesh_axes = tuple(axis for axis in mesh_axes if axis in self.axes("embed"))
            return (
                _gather(mesh_axes, embed[0], dtype, weight) if mesh_axes else weight.astype(dtype)
            )

        weights: Tree = jax.tree.map(gather, stored, axes)
        return weights

    def rematerialize(
        self, block: Callable[..., Any], *, remat: Remat, scanned: bool
    ) -> Callable[..., Any]:
        """Apply a rematerialization policy to a layer, which also gathers its weights again."""
        return rematerialize(block, remat, scanned=scanned, gathers=bool(self.axes("embed")))

    def projections(
        self, name: str, wire_dtype: str | None = None, implementation: Implementation = "auto"
    ) -> Projections:
        """Return the matmuls for weights that are sharded by a logical axis.

        `wire_dtype` is the type in which sums are sent, and `implementation` that of the matmuls
        (`ShardedProjections`).
        """
        mesh_axes = self.axes(name)
        return (
            ShardedProjections(mesh_axes, implementation, wire_dtype=wire_dtype)
            if mesh_axes
            else LocalProjections()
        )

    def local_rows(self, x: Float[Array, "S ..."], name: str, *, axis: int = 0) -> Array:
        """Return this device's shard of an unsharded dimension."""
        mesh_axes = self.axes(name)
        if not mesh_axes:
            return x
        length = x.shape[axis] // self.shards(name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(mesh_axes) * length, length, axis)


def mean_over_devices(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return the mean of an array over the mesh axes that it varies over."""
    mesh_axes = tuple(sorted(varying_axes(x)))
    return lax.pmean(x, mesh_axes) if mesh_axes else x


def sum_over_devices(*values: Float[Array, ""]) -> tuple[Float[Array, ""], ...]:
    """Sum the values over the mesh axes that any of them varies over."""
    mesh_axes = tuple(sorted(frozenset().union(*map(varying_axes, values))))
    if not mesh_axes:
        return values
    return tuple(lax.psum(_vary(value, mesh_axes), mesh_axes) for value in values)


def unstack_layers(stacked: Weights, count: int) -> list[Weights]:
    """Split weights with a leading layer dimension into the weights of each layer."""
    # The gradient of a split is a concatenation. That of indexing would be a sum of L arrays.
    parts = {name: lax.split(weight, (1,) * count) for name, weight in stacked.items()}
    return [{name: part[i][0] for name, part in parts.items()} for i in range(count)]


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _mesh_axes(layout: Layout, axes: LogicalAxes) -> list[tuple[str, ...]]:
    """Return the mesh axes of every dimension. The first that names a mesh axis gets it."""
    used: set[str] = set()
    mesh_axes = []
    for names in axes:
        named = (axis for name in _as_tuple(names) for axis in axes_of(layout, name))
        mesh_axes.append(tuple(axis for axis in named if axis not in used))
        used.update(mesh_axes[-1])
    return mesh_axes


def _vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


# The forward pass gathers weights in the type of the matmuls. The backward pass sums gradients in
# float32.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh_axes: tuple[str, ...], dim: int, dtype: Any, shard: jax.Array) -> jax.Array:
    return _gather_forward(mesh_axes, dim, dtype, shard)[0]


def _gather_forward(
    mesh_axes: tuple[str, ...], dim: int, dtype: Any, shard: jax.Array
) -> tuple[jax.Array, None]:
    return lax.all_gather(shard.astype(dtype), mesh_axes, axis=dim, tiled=True), None


def _gather_backward(
    mesh_axes: tuple[str, ...], dim: int, _dtype: Any, _saved: None, g: jax.Array
) -> tuple[jax.Array]:
    g32 = g.astype(jnp.float32)
    return (lax.psum_scatter(g32, mesh_axes, scatter_dimension=dim, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _join(names: Any) -> str:
    return ", ".join(map(str, names))


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)
