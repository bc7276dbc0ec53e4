"""`einsum`: multiply sharded arrays on the ring that their shardings call for.

`labels` reads the specification, `places` finds out how the operands lie, `choice` decides, and
here the chosen ring runs inside `jax.shard_map`. Whatever no ring fits goes to
`jnp.einsum`, so that this is never less than it; `explain_einsum` says which and why.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, assert_never, cast, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from drumline.parallel.axes import same_everywhere, varying_axes
from drumline.parallel.einsum.choice import Explanation, Manner, Route, Types, explain, fallback
from drumline.parallel.einsum.operands import (
    WHOLE,
    Labelled,
    NotTwoOperands,
    Placement,
    Placing,
    Product,
    read_labels,
    spread,
    without_single,
)
from drumline.parallel.rings.allreduce import matmul_allreduce
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.local import sum_dtype
from drumline.parallel.rings.ring import Direction, Loop, check_choice, check_wire_dtype
from drumline.parallel.rings.scatter import matmul_reducescatter
from drumline.parallel.target import Target, chip_here, target_here


@overload
def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    *,
    out_sharding: Placement,
    direction: Direction = ...,
    mesh: Mesh | None = ...,
    x_sharding: Placement | None = ...,
    w_sharding: Placement | None = ...,
    loop: Loop = ...,
    precision: lax.PrecisionLike = ...,
    wire_dtype: DTypeLike | None = ...,
) -> jax.Array: ...
@overload
def einsum(
    spec: str,
    x: jax.Array,
    w: Sequence[jax.Array],
    *,
    out_sharding: Placement,
    direction: Direction = ...,
    mesh: Mesh | None = ...,
    x_sharding: Placement | None = ...,
    w_sharding: Placement | None = ...,
    loop: Loop = ...,
    precision: lax.PrecisionLike = ...,
    wire_dtype: DTypeLike | None = ...,
) -> tuple[jax.Array, ...]: ...
def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    out_sharding: Placement,
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Placement | None = None,
    w_sharding: Placement | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """`jnp.einsum(spec, x, w, out_sharding=…)` with its communication hidden where a ring fits.

    On a mesh of Explicit axes the operands' types say how they are sharded, also inside
    `jax.jit`. On Auto axes, such as `drumline.train.fit` has, arrays with a value say it too; a
    traced one does not, and needs `x_sharding` and `w_sharding`: without them XLA chooses, and the
    log says so. Differentiable. On a ring, sums are in float32 and cast once; where none fits,
    or on a TPU none pays, this is `jnp.einsum` and sums as it does.

    Args:
        spec: two operands and a result, as `"bsd,df->bsf"`, `"bshk,hkd->bsd"` or
            `"...d,df->...f"`.
        x: the first operand.
        w: the second operand; or several that are sharded alike, for as many results: one tour of
            x serves them all where x is gathered.
        out_sharding: the result's sharding, which decides between gather, scatter and all-reduce.
        direction: `"both"` uses both directions of the ring's links, `"one"` sends everything one
            way.
        mesh: the mesh, where its axes are Auto and no argument carries it.
        x_sharding: how x is sharded, for traced arrays on Auto axes.
        w_sharding: how w is sharded, likewise.
        loop: `"unrolled"`, `"rolled"`, or `"auto"`, as in the ring functions.
        precision: passed on to each multiplication.
        wire_dtype: the type in which sums travel on a ring. None is float32, and on a TPU the
            result's type, in which `jnp.einsum` adds, where float32 would not hide. On a TPU it is
            for a ring alone: where even so none pays, `jnp.einsum` adds as it does.
    """
    check_choice("einsum", "direction", direction, get_args(Direction))
    check_choice("einsum", "loop", loop, get_args(Loop))
    weights = _several("einsum", w)
    place = Placing.find("einsum", x, weights, out_sharding, mesh, (x_sharding, w_sharding))
    asked = Manner(direction, loop, check_wire_dtype("einsum", wire_dtype))
    options = (("direction", direction), ("loop", loop), ("precision", precision))
    outs: list[jax.Array] = []
    for some, explanation in _tours(spec, x, weights, place, asked):
        if explanation.route is None:
            if None in place.specs:
                _say_once(f"einsum: {spec!r} is left to XLA, without a ring: {explanation.reason}")
            outs += [_plain(spec, x, one, place, precision) for one in some]
            continue
        work = _Work(
            tuple(_product(spec, x, one, place) for one in some),
            explanation.route,
            place,
            (*options, ("wire_dtype", explanation.wire_dtype)),
            target_here(place.mesh),
        )
        outs += _on_devices(work, x, some)
    return tuple(outs) if isinstance(w, list | tuple) else outs[0]


def _tours(
    spec: str, x: Any, weights: tuple[Any, ...], place: Placing, asked: Manner
) -> list[tuple[tuple[Any, ...], Explanation]]:
    """The weights that are multiplied together, each time with what is done: all, or one by one.

    One tour serves all of them where x is what travels.
    """
    together = _explain(spec, x, weights, place, asked)
    if together.route is not None and together.route.gathers_x:
        return [(weights, together)]
    if len(weights) == 1:
        return [(weights, together)]
    return [((one,), _explain(spec, x, (one,), place, asked)) for one in weights]


def explain_einsum(
    spec: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct | Sequence[jax.Array | jax.ShapeDtypeStruct],
    *,
    out_sharding: Placement,
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Placement | None = None,
    w_sharding: Placement | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> Explanation:
    """What `einsum` would do with the same arguments, and the bytes that it would send.

    It computes nothing, and takes `jax.ShapeDtypeStruct`s with shardings as well as arrays.
    """
    del precision
    check_choice("explain_einsum", "direction", direction, get_args(Direction))
    check_choice("explain_einsum", "loop", loop, get_args(Loop))
    weights = _several("explain_einsum", w)
    given = (x_sharding, w_sharding)
    place = Placing.find("explain_einsum", x, weights, out_sharding, mesh, given)
    asked = Manner(direction, loop, check_wire_dtype("explain_einsum", wire_dtype))
    tours = [explanation for _, explanation in _tours(spec, x, weights, place, asked)]
    if len(tours) == 1:
        return tours[0]
    sent: dict[str, int] = {}
    for explanation in tours:
        for axis, count in explanation.bytes_per_axis.items():
            sent[axis] = sent.get(axis, 0) + count
    reasons = list(dict.fromkeys(explanation.reason for explanation in tours))
    reason = f"each of {len(tours)} weights by itself: {'; '.join(reasons)}"
    return replace(tours[0], reason=reason, bytes_per_axis=sent)


@cache
def _say_once(sentence: str) -> None:
    """In the log, which Python prints where nobody has set one up."""
    logging.getLogger("drumline.parallel").warning(sentence)


def _several(caller: str, w: Any) -> tuple[Any, ...]:
    """One weight or several, as a tuple."""
    weights = tuple(w) if isinstance(w, list | tuple) else (w,)
    if not weights:
        raise ValueError(f"{caller}: w is an empty sequence; give one array or more")
    return weights


def _explain(
    spec: str, x: Any, weights: tuple[Any, ...], place: Placing, asked: Manner
) -> Explanation:
    direction = asked.direction
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
        products = [_product(spec, x, one, place) for one in weights]
    except NotTwoOperands as refusal:
        return fallback(str(refusal), direction)
    result = jnp.result_type(x, *weights)
    types = Types(x.dtype, jnp.result_type(*weights), sum_dtype(x, *weights), result)
    sizes = [prod(product.w.lengths) for product in products]
    manner = replace(
        asked,
        target=target_here(place.mesh),
        chip=chip_here(place.mesh),
        weights=sum(sizes) / max(sizes[0], 1),
    )
    return explain(products[0], types, manner)


def _product(spec: str, x: Any, w: Any, place: Placing) -> Product:
    names = read_labels(spec, x.ndim, w.ndim)
    lengths = dict(zip(names[0] + names[1], (*x.shape, *w.shape), strict=True))
    mesh = dict(place.mesh.shape)

    def labelled(labels: str, known: PartitionSpec | None) -> Labelled:
        if known is not None and len(known) > len(labels):
            raise ValueError(
                f"einsum: the sharding {known} has {len(known)} entries, but {labels!r} of "
                f"{spec!r} has {len(labels)} dimensions"
            )
        axes = without_single(spread(known or WHOLE, len(labels)), mesh)
        return Labelled(labels, tuple(lengths[n] for n in labels), axes)

    x_spec, w_spec = place.specs
    return Product(
        labelled(names[0], x_spec),
        labelled(names[1], w_spec),
        labelled(names[2], place.out_spec),
        tuple(mesh.items()),
    )


def _plain(
    spec: str, x: jax.Array, w: jax.Array, place: Placing, precision: lax.PrecisionLike
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

    products: tuple[Product, ...]
    route: Route
    place: Placing
    options: tuple[tuple[str, Any], ...]
    target: Target
    """What the ring is written for: the same work is another program on another device."""


@partial(jax.jit, static_argnums=0, inline=True)
def _on_devices(work: _Work, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    place = work.place
    x_spec, w_spec = place.specs
    mapped = jax.shard_map(
        partial(_on_ring, work),
        mesh=place.mesh,
        in_specs=(x_spec, (w_spec,) * len(weights)),
        out_specs=(place.out_spec,) * len(weights),
    )
    return mapped(x, weights)


def _on_ring(work: _Work, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One device's part: to matrices, round the ring, and back to the result's dimensions."""
    product, route = work.products[0], work.route
    if route.swapped:
        product, x, weights = product.swapped(), weights[0], (x,)
    # The label that moves stands where the ring functions look for it: last of the rows, or
    # first among the contracted ones or the columns, whose blocks are then whole.
    rows = _last(product.rows, route.label)
    columns = _first(product.columns, route.label)
    contracted = _first(product.contracted, route.contracted or "")
    row_lengths = [x.shape[product.x.labels.index(n)] for n in rows]
    a = _arranged(x, product.x.labels, rows + contracted)
    a = a.reshape(*row_lengths, prod(a.shape[len(rows) :]))
    matrices = []
    for w in weights:
        b = _arranged(w, product.w.labels, contracted + columns)
        matrices.append(
            b.reshape(prod(b.shape[: len(contracted)]), prod(b.shape[len(contracted) :]))
        )
    found = _multiply(route, a, matrices, dict(work.options))
    outs = []
    for out, each in zip(found, work.products, strict=True):
        result = each.out
        local = [result.length_of(n) // each.devices(result.axes_of(n)) for n in rows + columns]
        outs.append(_as_result(work, _arranged(out.reshape(local), rows + columns, result.labels)))
    return tuple(outs)


def _as_result(work: _Work, out: jax.Array) -> jax.Array:
    # Axes of one device may stand in an operand's spec and not in the result's.
    named = {axis for axes in spread(work.place.out_spec, out.ndim) for axis in axes}
    single = tuple(sorted(varying_axes(out) - named))
    return same_everywhere(single, out) if single else out


def _multiply(
    route: Route, a: jax.Array, matrices: list[jax.Array], options: dict[str, Any]
) -> tuple[jax.Array, ...]:
    over: Any = {"axis_name": route.axis_name, **options}
    match route.movement:
        case "gather contraction":
            return allgather_matmul(a, matrices, **over)
        case "gather rows":
            return allgather_matmul(a, matrices, gathered="rows", **over)
        case "scatter columns":
            return (matmul_reducescatter(a, matrices[0], **over),)
        case "scatter rows":
            return (matmul_reducescatter(a, matrices[0], scattered="rows", **over),)
        case "allreduce":
            return (matmul_allreduce(a, matrices[0], **over),)
        case _:
            assert_never(route.movement)


def _arranged(array: jax.Array, labels: str, wanted: str) -> jax.Array:
    return array.transpose([labels.index(n) for n in wanted])


def _first(labels: str, label: str) -> str:
    return label + labels.replace(label, "") if label and label in labels else labels


def _last(labels: str, label: str) -> str:
    return labels.replace(label, "") + label if label and label in labels else labels
