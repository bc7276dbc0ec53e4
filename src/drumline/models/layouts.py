"""Where a model's arrays lie on a mesh: one table says it, and everything else follows.

A model gives the dimensions of its arrays logical names ("embed", "heads", …). A layout maps those
names to mesh axes, and the model, written once for one device's shards, asks the layout's
`Division` for whatever depends on it:

- rows of the batch (and of the sequence) that are divided: each device computes its own, and the
  gradients of weights they share are summed (data parallelism);
- weights whose "embed" dimension is divided: gathered just before use, their gradients scattered
  (FSDP);
- weights whose "heads" or "hidden" dimension is divided: each device multiplies by its own
  columns and rows while the activations travel round a ring (tensor parallelism).

Axes of one device divide nothing. Where no axis is left the model is called as it is, and what XLA
sees is plain `jax.numpy`.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.models.remat import Remat, rematerialised
from drumline.parallel.block.projections import Plain, Projections, Rings
from drumline.parallel.varying import varying_axes

Axes = str | tuple[str, ...] | None
"""Mesh axes that divide a dimension, the first one in the largest pieces; None leaves it whole."""

Layout = Mapping[str, Axes]
"""Mesh axes for each logical axis; a logical axis that is not named stays whole."""

Dims = tuple[str | tuple[str, ...] | None, ...]
"""The logical axis (or axes) of each dimension of an array."""

Params = dict[str, Any]
Weights = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Tree = TypeVar("Tree")
LocalLoss = Callable[["Division", Params, dict[str, jax.Array]], tuple[jax.Array, Metrics]]


def read_layout(
    model: str, given: str | Layout, table: Mapping[str, Layout], logical: Sequence[str]
) -> Layout:
    """The layout that a user named or wrote, checked for what no mesh could mend.

    Args:
        model: whose layout it is, for the refusals.
        given: a name from the table, or a mapping of the user's own.
        table: the model's layouts.
        logical: the model's logical axes.
    """
    if isinstance(given, str):
        if given not in table:
            raise ValueError(
                f"{model}: layout {given!r} is unknown; choose from {_listed(table)}, "
                "or give a mapping from logical axes to mesh axes"
            )
        given = table[given]
    for name in given:
        if name not in logical:
            raise ValueError(
                f"{model}: layout has {name!r}, which is no logical axis; "
                f"there are {_listed(logical)}"
            )
    spare = [axis for axis in axes_of(given, "embed") if axis not in axes_of(given, "batch")]
    if spare:
        raise ValueError(
            f"{model}: layout divides embed over {spare[0]!r} but not the batch; weights are "
            "gathered over axes that hold different examples, so name that axis for both"
        )
    return given


def check_together(model: str, layout: Layout, names: Sequence[str]) -> None:
    """Refuse a layout that gives these logical axes different mesh axes: they share a ring."""
    first, *others = names
    for name in others:
        if axes_of(layout, name) != axes_of(layout, first):
            raise ValueError(
                f"{model}: layout divides {first} over {layout.get(first)!r} and {name} over "
                f"{layout.get(name)!r}; give {_listed(names)} the same mesh axis, or none"
            )


def check_apart(model: str, layout: Layout, one: str, other: str) -> None:
    """Refuse a layout that divides two logical axes over the same mesh axis."""
    for axis in axes_of(layout, one):
        if axis in axes_of(layout, other):
            raise ValueError(
                f"{model}: layout divides both {one} and {other} over {axis!r}; "
                "give them different mesh axes"
            )


def axes_of(layout: Layout, name: str) -> tuple[str, ...]:
    """The mesh axes that a layout gives a logical axis."""
    return _axes(layout.get(name))


def spec(layout: Layout, dims: Dims) -> PartitionSpec:
    """The `PartitionSpec` of an array with these dimensions."""
    return _spec(*(axes or None for axes in _divide(layout, dims)))


def specs(layout: Layout, dims: Any) -> Any:
    """A tree of `Dims` as a tree of `PartitionSpec`s."""
    return jax.tree.map(partial(spec, layout), dims, is_leaf=lambda leaf: isinstance(leaf, tuple))


class OnMesh(ABC):
    """What every model has from its layout alone: the places of its weights and of its batch."""

    @abstractmethod
    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights."""

    @abstractmethod
    def _layout(self) -> Layout:
        """Mesh axes for each logical axis."""

    @abstractmethod
    def _dims(self) -> dict[str, Any]:
        """A tree like the weights with the `Dims` of each."""

    def specs(self) -> Any:
        """A tree like the weights, with the `PartitionSpec` of each."""
        return specs(self._layout(), self._dims())

    def batch_spec(self) -> PartitionSpec:
        """Which mesh axes divide the examples."""
        return spec(self._layout(), ("batch",))

    @abstractmethod
    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Refuse, in one sentence, labels or tokens out of range, where their values are known."""

    def check(self, mesh: Mesh | AbstractMesh) -> None:
        """Refuse, in one sentence, a mesh that this model does not fit."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        Division.on(mesh, type(self).__name__, self._layout()).check_weights(shapes, self._dims())


@dataclass(frozen=True)
class Division:
    """A layout on a mesh, as the code of one device sees it.

    Attributes:
        model: whose layout it is, for the refusals.
        layout: mesh axes for each logical axis, those of one device left out.
        sizes: devices along each axis that is left.
    """

    model: str
    layout: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @staticmethod
    def on(mesh: Mesh | AbstractMesh, model: str, layout: Layout) -> Division:
        """A model's layout on a mesh, which has to have the axes that the layout names."""
        if mesh.empty:
            return Division(model, {}, {})
        for name, axes in layout.items():
            for axis in _axes(axes):
                if axis not in mesh.axis_names:
                    raise ValueError(
                        f"{model}: layout divides {name} over mesh axis {axis!r}, but the mesh has "
                        f"{_listed(mesh.axis_names)}; give it that axis, of one device if need be"
                    )
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        kept = {name: tuple(a for a in _axes(axes) if a in sizes) for name, axes in layout.items()}
        used = {axis for axes in kept.values() for axis in axes}
        return Division(model, kept, {axis: size for axis, size in sizes.items() if axis in used})

    @staticmethod
    def here(model: str, layout: Layout) -> Division:
        """A model's layout on the mesh set with `jax.set_mesh`."""
        return Division.on(jax.sharding.get_abstract_mesh(), model, layout)

    @staticmethod
    def whole(model: str, layout: Layout) -> Division:
        """A model's layout where one device has all of it; refused on a mesh that divides it."""
        here = Division.here(model, layout)
        if here.sizes:
            raise ValueError(
                f"{model}: logits are computed on one device, and this mesh divides the model over "
                f"{_listed(here.sizes)}; call it outside of jax.set_mesh"
            )
        return here

    def axes(self, *names: str) -> tuple[str, ...]:
        """The mesh axes of some logical axes, one behind the other."""
        return tuple(axis for name in names for axis in axes_of(self.layout, name))

    def count(self, *names: str) -> int:
        """Into how many pieces these logical axes are divided together."""
        return prod(self.sizes[axis] for axis in self.axes(*names))

    def check_rows(self, what: str, length: int, name: str) -> None:
        """Refuse a length that the mesh cannot divide as this logical axis is."""
        self._check(what, length, self.axes(name))

    def check_weights(self, params: Params, dims: Any) -> None:
        """Refuse a mesh that cannot divide the weights: arrays, or anything with a shape."""

        def check(path: Any, weight: Any, dims: Dims) -> None:
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            divided = _divide(self.layout, dims)
            for length, name, axes in zip(weight.shape, dims, divided, strict=True):
                self._check(f"{' and '.join(_axes(name))} of {where},", length, axes)

        jax.tree_util.tree_map_with_path(check, params, dims)

    def _check(self, what: str, length: int, axes: tuple[str, ...]) -> None:
        count = prod(self.sizes[axis] for axis in axes)
        if length % count:
            raise ValueError(
                f"{self.model}: {what} {length} cannot be divided between the {count} devices "
                f"of mesh axis {' × '.join(axes)}"
            )

    def run(
        self, local_loss: LocalLoss, params: Params, dims: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """Call a loss that is written for one device's shards on all devices of the mesh.

        Args:
            local_loss: gets this division, the device's shards of the weights and of the batch;
                what it returns is the same on all devices.
            params: the whole weights.
            dims: a tree like `params` with the `Dims` of each.
            batch: the whole batch.
        """
        if not self.sizes:
            return local_loss(self, params, batch)
        self.check_weights(params, dims)
        on_shards = jax.shard_map(
            partial(local_loss, self),
            in_specs=(specs(self.layout, dims), spec(self.layout, ("batch",))),
            out_specs=_spec(),
        )
        return on_shards(params, batch)

    def at_hand(
        self, stored: Tree, dims: Any, dtype: Any, *, rows: Sequence[str] = ("batch", "sequence")
    ) -> Tree:
        """Stored weights as they are multiplied by: the "embed" dimension whole, in `dtype`.

        Weights without an "embed" dimension (norms, biases) stay as they are. All are declared to
        meet rows that differ along the axes of `rows`, while they are still in float32: that is
        the type in which their gradients are summed over the devices.

        Args:
            stored: a tree of this device's shards.
            dims: a tree like it with the `Dims` of each.
            dtype: the type to multiply in.
            rows: the logical axes that divide the rows these weights will meet.
        """

        def prepare(weight: jax.Array, dims: Dims) -> jax.Array:
            weight = _vary(weight, self.axes(*rows))
            embed = [at for at, names in enumerate(dims) if "embed" in _axes(names)]
            if not embed:
                return weight
            over = tuple(a for a in _divide(self.layout, dims)[embed[0]] if a in self.axes("embed"))
            return _gathered(over, embed[0], dtype, weight) if over else weight.astype(dtype)

        prepared: Tree = jax.tree.map(prepare, stored, dims)
        return prepared

    def block(
        self, block: Callable[..., Any], *, remat: Remat, scanned: bool
    ) -> Callable[..., Any]:
        """A layer as it is to be differentiated: with what `remat` says kept for the backward pass.

        Gathered weights are gathered again there.
        """
        return rematerialised(block, remat, scanned=scanned, gathers=bool(self.axes("embed")))

    def projections(self, name: str, wire_dtype: str | None = None) -> Projections:
        """What multiplies by weights that are divided as `name` is: rings, where they are.

        `wire_dtype` is the type in which the rings' sums travel; None is float32.
        """
        over = self.axes(name)
        return Rings(over, wire_dtype=wire_dtype) if over else Plain()

    def own_rows(self, x: Float[Array, "S ..."], name: str, *, axis: int = 0) -> Array:
        """This device's share of a dimension of which every device holds the whole."""
        over = self.axes(name)
        if not over:
            return x
        length = x.shape[axis] // self.count(name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * length, length, axis)


def over_all(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The mean of an array over all devices that hold different ones."""
    over = tuple(sorted(varying_axes(x)))
    return lax.pmean(x, over) if over else x


def sums_over_all(*parts: Float[Array, ""]) -> tuple[Float[Array, ""], ...]:
    """Sums over all devices on which any of these parts differs, the same devices for each."""
    over = tuple(sorted(frozenset().union(*map(varying_axes, parts))))
    if not over:
        return parts
    return tuple(lax.psum(_vary(part, over), over) for part in parts)


def layers(stacked: Weights, count: int) -> list[Weights]:
    """Weights stacked by layer, `[L, ...]` each, as one tree for each layer."""
    # A split, because its gradient is one concatenation: that of indexing is a sum of L arrays.
    parts = {name: lax.split(weight, (1,) * count) for name, weight in stacked.items()}
    return [{name: part[i][0] for name, part in parts.items()} for i in range(count)]


def _axes(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _divide(layout: Layout, dims: Dims) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension; an axis that divides one does not divide a later one."""
    taken: set[str] = set()
    divided = []
    for names in dims:
        wanted = (axis for name in _axes(names) for axis in axes_of(layout, name))
        divided.append(tuple(axis for axis in wanted if axis not in taken))
        taken.update(divided[-1])
    return divided


def _vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


# What travels forward is already in the type to multiply in, which is half the bytes for bfloat16;
# the gradients' sums are in float32, also on the wire.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(over: tuple[str, ...], dim: int, dtype: Any, shard: jax.Array) -> jax.Array:
    return _gather_forward(over, dim, dtype, shard)[0]


def _gather_forward(
    over: tuple[str, ...], dim: int, dtype: Any, shard: jax.Array
) -> tuple[jax.Array, None]:
    return lax.all_gather(shard.astype(dtype), over, axis=dim, tiled=True), None


def _gather_backward(
    over: tuple[str, ...], dim: int, _dtype: Any, _saved: None, g: jax.Array
) -> tuple[jax.Array]:
    wide = g.astype(jnp.float32)
    return (lax.psum_scatter(wide, over, scatter_dimension=dim, tiled=True),)


_gathered.defvjp(_gather_forward, _gather_backward)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)
