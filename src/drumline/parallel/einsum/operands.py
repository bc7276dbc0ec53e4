"""The operands of an einsum: labelled dimensions, and shardings on a mesh.

The choice of a ring depends only on the shape, the type and the `PartitionSpec` of the operands.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


class UnsupportedSpec(ValueError):
    """The rings do not support this specification. The message is the reason."""


@dataclass(frozen=True)
class LabelledArray:
    """An array of an einsum: a label, a length and mesh axes for each dimension."""

    labels: str
    lengths: tuple[int, ...]
    axes: tuple[Axes, ...]

    def axes_of(self, label: str) -> Axes:
        """Return the mesh axes that shard a dimension, major to minor."""
        return self.axes[self.labels.index(label)]

    def length_of(self, label: str) -> int:
        """Return the global length of a dimension."""
        return self.lengths[self.labels.index(label)]


@dataclass(frozen=True)
class Contraction:
    """An einsum of two operands and its result, on a mesh with a size for each axis.

    Mesh axes of size 1 are left out.
    """

    x: LabelledArray
    w: LabelledArray
    out: LabelledArray
    mesh: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> str:
        """The labels that are in x and in the result only."""
        return "".join(n for n in self.x.labels if n in self.out.labels and n not in self.w.labels)

    @property
    def columns(self) -> str:
        """The labels that are in w and in the result only."""
        return "".join(n for n in self.w.labels if n in self.out.labels and n not in self.x.labels)

    @property
    def contracted(self) -> str:
        """The labels that are in both operands and not in the result."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n not in self.out.labels)

    @property
    def batched(self) -> str:
        """The labels that are in both operands and in the result."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n in self.out.labels)

    @property
    def summed_alone(self) -> str:
        """The labels that are in one operand only and not in the result."""
        return "".join(
            n
            for n in self.x.labels + self.w.labels
            if n not in self.out.labels and (n in self.x.labels) != (n in self.w.labels)
        )

    def swapped(self) -> Contraction:
        """Return the contraction with its operands swapped."""
        return Contraction(self.w, self.x, self.out, self.mesh)

    def devices(self, axes: Axes) -> int:
        """Return the number of devices along the axes."""
        return prod(size for axis, size in self.mesh if axis in axes)


def read_labels(spec: str, x_dims: int, w_dims: int) -> tuple[str, str, str]:
    """Return the labels of the operands and of the result, with `...` expanded."""
    text = spec.replace(" ", "")
    operands, arrow, out = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2:
        raise UnsupportedSpec(f"{spec!r} has {len(terms)} operands, not two")
    if not arrow:
        raise UnsupportedSpec(f"{spec!r} does not name the result after '->'")
    x, w = terms
    if "..." in w:
        raise UnsupportedSpec(f"{spec!r} has '...' in its second operand")
    if "..." in x:
        unused = [letter for letter in ascii_letters if letter not in text]
        written = "".join(unused[: max(x_dims - len(x) + 3, 0)])
        x, out = x.replace("...", written), out.replace("...", written)
    for term, dims in ((x, x_dims), (w, w_dims)):
        if not term.isalpha() or len(term) != dims:
            raise UnsupportedSpec(
                f"{spec!r} does not fit operands of {x_dims} and {w_dims} dimensions"
            )
    for term in (x, w, out):
        if len(set(term)) != len(term):
            raise UnsupportedSpec(f"{spec!r} repeats a letter within one array")
    if set(out) - set(x + w):
        raise UnsupportedSpec(f"{spec!r} has letters in its result that no operand has")
    return x, w, out


def axes_per_dim(spec: PartitionSpec, dims: int) -> tuple[Axes, ...]:
    """Return the mesh axes of each dimension, also of those that the spec omits."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries) + ((),) * (dims - len(entries))


def drop_single_axes(axes: tuple[Axes, ...], mesh: Mapping[str, int]) -> tuple[Axes, ...]:
    """Remove the mesh axes of size 1."""
    return tuple(
        tuple(axis for axis in entry_elements if mesh[axis] > 1) for entry_elements in axes
    )


def item_bytes(dtype: jnp.dtype) -> int:
    """Return the bytes of one element."""
    return int(jnp.dtype(dtype).itemsize)


AnyMesh = Mesh | AbstractMesh
Sharding = NamedSharding | PartitionSpec
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class EinsumShardings:
    """The mesh of an einsum, and the specs of its operands and of its result."""

    mesh: AnyMesh
    specs: tuple[PartitionSpec | None, PartitionSpec | None]
    out_spec: PartitionSpec

    @classmethod
    def find(
        cls,
        caller: str,
        x: Any,
        weights: tuple[Any, ...],
        out_sharding: Sharding,
        mesh: Mesh | None,
        explicit: tuple[Sharding | None, Sharding | None],
    ) -> EinsumShardings:
        """Derive the mesh and the specs from the arguments of `caller` and from the arrays."""
        describe = {
            "out_sharding": out_sharding,
            "x_sharding": explicit[0],
            "w_sharding": explicit[1],
        }
        for name, sharding in describe.items():
            _check_type(caller, name, sharding, optional=name != "out_sharding")
        route = mesh or _mesh_of(out_sharding, *explicit, x, *weights)
        if route is None:
            raise ValueError(
                f"{caller}: no mesh is known; set one with jax.set_mesh, pass mesh=, "
                "or give out_sharding as a NamedSharding"
            )
        for name, sharding in describe.items():
            _check_axes(caller, name, sharding, route)
        own_spec = _spec_of(caller, "x", x, explicit[0], route)
        others = [_spec_of(caller, "w", w, explicit[1], route) for w in weights]
        known_spec = zip(weights, others, strict=True)
        if (
            len({None if spec is None else axes_per_dim(spec, w.ndim) for w, spec in known_spec})
            > 1
        ):
            raise ValueError(
                f"{caller}: the weights are sharded as {' and '.join(map(str, others))}; several "
                "in one call have to be sharded alike"
            )
        return cls(route, (own_spec, others[0]), _spec(out_sharding))

    def has(self, kind: AxisType) -> bool:
        """Return True if the mesh has axes of a type."""
        return kind in self.mesh.axis_types


def _check_type(caller: str, name: str, sharding: object, *, optional: bool) -> None:
    if isinstance(sharding, Sharding) or (optional and sharding is None):
        return
    raise ValueError(
        f"{caller}: {name} is {sharding!r}; give a PartitionSpec, as P('X', None), "
        "where P() is an array that is whole on every device, or a NamedSharding"
    )


def _check_axes(caller: str, name: str, sharding: Sharding | None, mesh: AnyMesh) -> None:
    """Raise ValueError for axes that the mesh does not have."""
    for entry_elements in () if sharding is None else _spec(sharding).partitions:
        for axis in entry_elements if isinstance(entry_elements, tuple) else (entry_elements,):
            if isinstance(axis, str) and axis not in mesh.axis_names:
                raise ValueError(
                    f"{caller}: {name} names axis {axis!r}, but the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )


def _spec(sharding: Sharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _mesh_of(*candidates: Any) -> AnyMesh | None:
    """Return the first mesh of a sharding or an array, or else the current mesh."""
    for candidate in candidates:
        sharding = candidate
        if isinstance(candidate, jax.ShapeDtypeStruct | jax.Array):
            sharding = _own_sharding(candidate)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    current = jax.sharding.get_abstract_mesh()
    return None if current.empty else current


def _own_sharding(operand: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Return the sharding of an array, or of its type while tracing."""
    if isinstance(operand, jax.core.Tracer):
        return jax.typeof(operand).sharding
    return operand.sharding


def _spec_of(
    caller: str, name: str, operand: Any, explicit: Sharding | None, mesh: AnyMesh
) -> PartitionSpec | None:
    """Return the spec of an operand, or None if a traced one on Auto axes has none."""
    if AxisType.Auto in mesh.axis_types:
        if explicit is not None:
            return _spec(explicit)
        if isinstance(operand, jax.core.Tracer):
            return None
    own_spec = _own_sharding(operand)
    # An array without a mesh is the same wherever it is used.
    spec = own_spec.spec if isinstance(own_spec, NamedSharding) else WHOLE
    if explicit is not None:
        dims = operand.ndim
        if axes_per_dim(_spec(explicit), dims) != axes_per_dim(spec, dims):
            raise ValueError(
                f"{caller}: {name}_sharding is {_spec(explicit)}, but {name} has {spec}"
            )
    return spec
