"""Where a product happens: the mesh, and how operands and result lie on it, as far as is known."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from drumline.parallel.einsum.labels import spread

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
