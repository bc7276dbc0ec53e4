"""`einsum`: multiply sharded arrays on the ring that their shardings call for.

`labels` reads the specification, `choice` decides, and here the operands' shardings
are found out and the chosen ring runs inside `jax.shard_map`. Whatever no ring fits goes to
`jnp.einsum`, so that this is never less than it; `explain_einsum` says which and why.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, assert_never, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from drumline.parallel.einsum.choice import Explanation, Route, Types, explain, fallback
from drumline.parallel.einsum.labels import (
    Labelled,
    NotTwoOperands,
    Product,
    read_labels,
    spread,
    without_single,
)
from drumline.parallel.rings.allreduce import matmul_allreduce
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.products import result_dtype, sum_dtype
from drumline.parallel.rings.ring import Direction, Loop, check_choice
from drumline.parallel.rings.scatter import matmul_reducescatter
from drumline.parallel.varying import same_everywhere, varying_axes

AnyMesh = Mesh | AbstractMesh
Placement = NamedSharding | PartitionSpec
_WHOLE = PartitionSpec()


def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    *,
    out_sharding: Placement,
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Placement | None = None,
    w_sharding: Placement | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """`jnp.einsum(spec, x, w, out_sharding=…)` with its communication hidden where a ring fits.

    On a mesh of Explicit axes the operands' types say how they are sharded, also inside
    `jax.jit`. On Auto axes, arrays with a value say it too; a traced one does not, and needs
    `x_sharding` and `w_sharding`. Differentiable. On a ring, sums are in float32 and cast once;
    where none fits, this is `jnp.einsum` and sums as it does.

    Args:
        spec: two operands and a result, as `"bsd,df->bsf"`, `"bshk,hkd->bsd"` or
            `"...d,df->...f"`.
        x: the first operand.
        w: the second operand.
        out_sharding: the result's sharding, which decides between gather, scatter and all-reduce.
        direction: `"both"` sends halves both ways round the ring, `"one"` everything one way.
        mesh: the mesh, where its axes are Auto and no argument carries it.
        x_sharding: how x is sharded, for traced arrays on Auto axes.
        w_sharding: how w is sharded, likewise.
        loop: `"unrolled"`, `"rolled"`, or `"auto"`, as in the ring functions.
        precision: passed on to each multiplication.
    """
    check_choice("einsum", "direction", direction, get_args(Direction))
    check_choice("einsum", "loop", loop, get_args(Loop))
    place = _Place.find("einsum", x, w, out_sharding, mesh, (x_sharding, w_sharding))
    explanation = _explain(spec, x, w, place, direction)
    if explanation.route is None:
        return _plain(spec, x, w, place, precision)
    work = _Work(
        _product(spec, x, w, place),
        explanation.route,
        place,
        (("direction", direction), ("loop", loop), ("precision", precision)),
    )
    return cast(jax.Array, _on_devices(work, x, w))


def explain_einsum(
    spec: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
    *,
    out_sharding: Placement,
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Placement | None = None,
    w_sharding: Placement | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
) -> Explanation:
    """What `einsum` would do with the same arguments, and the bytes that it would send.

    It computes nothing, and takes `jax.ShapeDtypeStruct`s with shardings as well as arrays.
    """
    del precision
    check_choice("explain_einsum", "direction", direction, get_args(Direction))
    check_choice("explain_einsum", "loop", loop, get_args(Loop))
    place = _Place.find("explain_einsum", x, w, out_sharding, mesh, (x_sharding, w_sharding))
    return _explain(spec, x, w, place, direction)


@dataclass(frozen=True)
class _Place:
    """Where a product happens: the mesh, and the specs of operands and result on it."""

    mesh: AnyMesh
    specs: tuple[PartitionSpec | None, PartitionSpec | None]
    out_spec: PartitionSpec

    @classmethod
    def find(
        cls,
        caller: str,
        x: Any,
        w: Any,
        out_sharding: Placement,
        mesh: Mesh | None,
        given: tuple[Placement | None, Placement | None],
    ) -> _Place:
        told = {"out_sharding": out_sharding, "x_sharding": given[0], "w_sharding": given[1]}
        for name, sharding in told.items():
            _check_kind(caller, name, sharding, optional=name != "out_sharding")
        found = mesh or _mesh_of(out_sharding, *given, x, w)
        if found is None:
            raise ValueError(
                f"{caller}: no mesh is known; set one with jax.set_mesh, pass mesh=, "
                "or give out_sharding as a NamedSharding"
            )
        for name, sharding in told.items():
            _check_axes(caller, name, sharding, found)
        specs = tuple(
            _spec_of(caller, name, operand, placed, found)
            for name, operand, placed in (("x", x, given[0]), ("w", w, given[1]))
        )
        return cls(found, (specs[0], specs[1]), _bare(out_sharding))

    def has(self, kind: AxisType) -> bool:
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
    spec = own.spec if isinstance(own, NamedSharding) else _WHOLE
    if given is not None:
        dims = operand.ndim
        if spread(_bare(given), dims) != spread(spec, dims):
            raise ValueError(f"{caller}: {name}_sharding is {_bare(given)}, but {name} has {spec}")
    return spec


def _explain(spec: str, x: Any, w: Any, place: _Place, direction: Direction) -> Explanation:
    if place.has(AxisType.Manual):
        return fallback("inside shard_map; call the ring functions themselves there", direction)
    for name, known in zip("xw", place.specs, strict=True):
        if known is None:
            reason = f"the sharding of {name} is not known here; pass {name}_sharding="
            return fallback(reason, direction)
    everything = (*place.specs, place.out_spec)
    if any(getattr(s, "unreduced", None) or getattr(s, "reduced", None) for s in everything):
        return fallback("a sum is kept unreduced", direction)
    if any(PartitionSpec.UNCONSTRAINED in s for s in everything if s is not None):
        return fallback("a dimension's sharding is left unconstrained", direction)
    try:
        product = _product(spec, x, w, place)
    except NotTwoOperands as refusal:
        return fallback(str(refusal), direction)
    types = Types(x.dtype, w.dtype, sum_dtype(x, w), result_dtype(x, w))
    return explain(product, types, direction)


def _product(spec: str, x: Any, w: Any, place: _Place) -> Product:
    names = read_labels(spec, x.ndim, w.ndim)
    lengths = dict(zip(names[0] + names[1], (*x.shape, *w.shape), strict=True))
    mesh = dict(place.mesh.shape)

    def labelled(labels: str, known: PartitionSpec | None) -> Labelled:
        if known is not None and len(known) > len(labels):
            raise ValueError(
                f"einsum: the sharding {known} has {len(known)} entries, but {labels!r} of "
                f"{spec!r} has {len(labels)} dimensions"
            )
        axes = without_single(spread(known or _WHOLE, len(labels)), mesh)
        return Labelled(labels, tuple(lengths[n] for n in labels), axes)

    x_spec, w_spec = place.specs
    return Product(
        labelled(names[0], x_spec),
        labelled(names[1], w_spec),
        labelled(names[2], place.out_spec),
        tuple(mesh.items()),
    )


def _plain(
    spec: str, x: jax.Array, w: jax.Array, place: _Place, precision: lax.PrecisionLike
) -> jax.Array:
    wanted = NamedSharding(place.mesh, place.out_spec)
    if not place.has(AxisType.Auto):
        return jnp.einsum(spec, x, w, precision=precision, out_sharding=wanted)
    out = jnp.einsum(spec, x, w, precision=precision)
    constrained = lax.with_sharding_constraint(out, wanted)
    return cast(jax.Array, constrained)


@dataclass(frozen=True)
class _Work:
    """All about a ring but its arrays. Equal work is compiled once, also outside `jax.jit`."""

    product: Product
    route: Route
    place: _Place
    options: tuple[tuple[str, Any], ...]


@partial(jax.jit, static_argnums=0, inline=True)
def _on_devices(work: _Work, x: jax.Array, w: jax.Array) -> jax.Array:
    place = work.place
    ring = partial(_on_ring, work)
    return jax.shard_map(ring, mesh=place.mesh, in_specs=place.specs, out_specs=place.out_spec)(
        x, w
    )


def _on_ring(work: _Work, x: jax.Array, w: jax.Array) -> jax.Array:
    """One device's part: to matrices, round the ring, and back to the result's dimensions."""
    product, route = work.product, work.route
    if route.swapped:
        product, x, w = product.swapped(), w, x
    # The label that moves stands where the ring functions look for it: last of the rows, or
    # first among the contracted ones or the columns, whose blocks are then whole.
    rows = _last(product.rows, route.label)
    columns = _first(product.columns, route.label)
    contracted = _first(product.contracted, route.contracted or "")
    result = product.out
    local = [result.length_of(n) // product.devices(result.axes_of(n)) for n in rows + columns]
    row_lengths = [x.shape[product.x.labels.index(n)] for n in rows]
    a = _arranged(x, product.x.labels, rows + contracted)
    a = a.reshape(*row_lengths, prod(a.shape[len(rows) :]))
    b = _arranged(w, product.w.labels, contracted + columns)
    b = b.reshape(prod(b.shape[: len(contracted)]), prod(b.shape[len(contracted) :]))
    out = _multiply(route, a, b, dict(work.options))
    out = out.reshape(local)
    out = _arranged(out, rows + columns, result.labels)
    # Axes of one device may stand in an operand's spec and not in the result's.
    named = {axis for axes in spread(work.place.out_spec, out.ndim) for axis in axes}
    single = tuple(sorted(varying_axes(out) - named))
    return same_everywhere(single, out) if single else out


def _multiply(route: Route, a: jax.Array, b: jax.Array, options: dict[str, Any]) -> jax.Array:
    match route.movement:
        case "gather contraction":
            return allgather_matmul(a, b, axis_name=route.axis_name, **options)
        case "gather rows":
            return allgather_matmul(a, b, axis_name=route.axis_name, gathered="rows", **options)
        case "scatter columns":
            return matmul_reducescatter(a, b, axis_name=route.axis_name, **options)
        case "scatter rows":
            return matmul_reducescatter(
                a, b, axis_name=route.axis_name, scattered="rows", **options
            )
        case "allreduce":
            return matmul_allreduce(a, b, axis_name=route.axis_name, **options)
        case _:
            assert_never(route.movement)


def _arranged(array: jax.Array, labels: str, wanted: str) -> jax.Array:
    return array.transpose([labels.index(n) for n in wanted])


def _first(labels: str, label: str) -> str:
    return label + labels.replace(label, "") if label and label in labels else labels


def _last(labels: str, label: str) -> str:
    return labels.replace(label, "") + label if label and label in labels else labels
