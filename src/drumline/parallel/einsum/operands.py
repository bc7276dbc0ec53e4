"""X"""

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


class NotTwoOperands(ValueError):
    """The specification is one that the rings cannot read; the message says why."""


@dataclass(frozen=True)
class Labelled:
    """One array of an einsum: a letter, a length and mesh axes for each dimension."""

    labels: str
    lengths: tuple[int, ...]
    axes: tuple[Axes, ...]

    def axes_of(self, label: str) -> Axes:
        """The mesh axes a dimension is divided over, the slowest first; () if it is whole."""
        return self.axes[self.labels.index(label)]

    def length_of(self, label: str) -> int:
        """The length of a dimension over all devices."""
        return self.lengths[self.labels.index(label)]


@dataclass(frozen=True)
class Product:
    """An einsum of two operands with its result, on a mesh of so many devices along each axis.

    Axes of a single device divide nothing and are left out.
    """

    x: Labelled
    w: Labelled
    out: Labelled
    mesh: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> str:
        """Labels that x alone hands to the result."""
        return "".join(n for n in self.x.labels if n in self.out.labels and n not in self.w.labels)

    @property
    def columns(self) -> str:
        """Labels that w alone hands to the result."""
        return "".join(n for n in self.w.labels if n in self.out.labels and n not in self.x.labels)

    @property
    def contracted(self) -> str:
        """Labels of both operands that the result no longer has."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n not in self.out.labels)

    @property
    def batched(self) -> str:
        """Labels of both operands and the result."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n in self.out.labels)

    @property
    def summed_alone(self) -> str:
        """Labels of one operand that the result no longer has."""
        return "".join(
            n
            for n in self.x.labels + self.w.labels
            if n not in self.out.labels and (n in self.x.labels) != (n in self.w.labels)
        )

    def swapped(self) -> Product:
        """The same product with the operands in each other's place."""
        return Product(self.w, self.x, self.out, self.mesh)

    def devices(self, axes: Axes) -> int:
        """How many devices some mesh axes have together."""
        return prod(size for axis, size in self.mesh if axis in axes)


def read_labels(spec: str, x_dims: int, w_dims: int) -> tuple[str, str, str]:
    """The letters of x, w and the result, with `...` of x written out.

    Raises:
        NotTwoOperands: there is something else between the commas and the arrow.
    """
    text = spec.replace(" ", "")
    operands, arrow, out = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2:
        raise NotTwoOperands(f"{spec!r} has {len(terms)} operands, not two")
    if not arrow:
        raise NotTwoOperands(f"{spec!r} does not name the result after '->'")
    x, w = terms
    if "..." in w:
        raise NotTwoOperands(f"{spec!r} has '...' in its second operand")
    if "..." in x:
        unused = [letter for letter in ascii_letters if letter not in text]
        written = "".join(unused[: max(x_dims - len(x) + 3, 0)])
        x, out = x.replace("...", written), out.replace("...", written)
    for term, dims in ((x, x_dims), (w, w_dims)):
        if not term.isalpha() or len(term) != dims:
            raise NotTwoOperands(
                f"{spec!r} does not fit operands of {x_dims} and {w_dims} dimensions"
            )
    for term in (x, w, out):
        if len(set(term)) != len(term):
            raise NotTwoOperands(f"{spec!r} repeats a letter within one array")
    if set(out) - set(x + w):
        raise NotTwoOperands(f"{spec!r} has letters in its result that no operand has")
    return x, w, out


def spread(spec: PartitionSpec, dims: int) -> tuple[Axes, ...]:
    """The mesh axes of each of `dims` dimensions, also of those the spec leaves out."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries) + ((),) * (dims - len(entries))


def without_single(axes: tuple[Axes, ...], mesh: Mapping[str, int]) -> tuple[Axes, ...]:
    """The same without the mesh axes that have one device."""
    return tuple(tuple(axis for axis in entry if mesh[axis] > 1) for entry in axes)


def item_bytes(dtype: jnp.dtype) -> int:
    """Bytes of one element."""
    return int(jnp.dtype(dtype).itemsize)


AnyMesh = Mesh | AbstractMesh
Placement = NamedSharding | PartitionSpec
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Placing:
    """Where a product happens: the mesh, and the specs of operands and result on it."""

    mesh: AnyMesh
    specs: tuple[PartitionSpec | None, PartitionSpec | None]
    out_spec: PartitionSpec

    @classmethod
    def find(
        cls,
        caller: str,
        x: Any,
        weights: tuple[Any, ...],
        out_sharding: Placement,
        mesh: Mesh | None,
        given: tuple[Placement | None, Placement | None],
    ) -> Placing:
        """Find it out on behalf of `caller`, from what is told and what the arrays say."""
        told = {"out_sharding": out_sharding, "x_sharding": given[0], "w_sharding": given[1]}
        for name, sharding in told.items():
            _check_kind(caller, name, sharding, optional=name != "out_sharding")
        found = mesh or _mesh_of(out_sharding, *given, x, *weights)
        if found is None:
            raise ValueError(
                f"{caller}: no mesh is known; set one with jax.set_mesh, pass mesh=, "
                "or give out_sharding as a NamedSharding"
            )
        for name, sharding in told.items():
            _check_axes(caller, name, sharding, found)
        own = _spec_of(caller, "x", x, given[0], found)
        others = [_spec_of(caller, "w", w, given[1], found) for w in weights]
        known = zip(weights, others, strict=True)
        if len({None if spec is None else spread(spec, w.ndim) for w, spec in known}) > 1:
            raise ValueError(
                f"{caller}: the weights are sharded as {' and '.join(map(str, others))}; several "
                "in one call have to be sharded alike"
            )
        return cls(found, (own, others[0]), _bare(out_sharding))

    def has(self, kind: AxisType) -> bool:
        """Whether the mesh has axes of a kind."""
        return kind in self.mesh.axis_types


def _check_kind(caller: str, name: str, sharding: object, *, optional: bool) -> None:
    if isinstance(sharding, Placement) or (optional and sharding is None):
        return
    raise ValueError(
        f"{caller}: {name} is {sharding!r}; give a PartitionSpec, as P('X', None), "
        "where P() is an array that is whole on every device, or a NamedSharding"
    )


def _check_axes(caller: str, name: str, sharding: Placement | None, mesh: AnyMesh) -> None:
    """Refuse axes that the mesh does not have."""
    for entry in () if sharding is None else _bare(sharding).partitions:
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(axis, str) and axis not in mesh.axis_names:
                raise ValueError(
                    f"{caller}: {name} names axis {axis!r}, but the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )


def _bare(sharding: Placement) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _mesh_of(*candidates: Any) -> AnyMesh | None:
    """The first mesh that a sharding or an array brings along, else the one that is set."""
    for candidate in candidates:
        sharding = candidate
        if isinstance(candidate, jax.ShapeDtypeStruct | jax.Array):
            sharding = _own_sharding(candidate)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    current = jax.sharding.get_abstract_mesh()
    return None if current.empty else current


def _own_sharding(operand: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """The sharding as the array has it; while tracing, as its type has it."""
    if isinstance(operand, jax.core.Tracer):
        return jax.typeof(operand).sharding
    return operand.sharding


def _spec_of(
    caller: str, name: str, operand: Any, given: Placement | None, mesh: AnyMesh
) -> PartitionSpec | None:
    """How an operand is sharded, None for a traced one on Auto axes that nothing is said about."""
    if AxisType.Auto in mesh.axis_types:
        if given is not None:
            return _bare(given)
        if isinstance(operand, jax.core.Tracer):
            return None
    own = _own_sharding(operand)
    # An array without a mesh is the same wherever it is used.
    spec = own.spec if isinstance(own, NamedSharding) else WHOLE
    if given is not None:
        dims = operand.ndim
        if spread(_bare(given), dims) != spread(spec, dims):
            raise ValueError(f"{caller}: {name}_sharding is {_bare(given)}, but {name} has {spec}")
    return spec
