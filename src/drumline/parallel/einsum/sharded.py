"""`einsum`: multiply sharded arrays on the ring that fits their shardings.

`operands` reads the specification and the shardings, `choice` chooses a ring, and this module runs
it inside `jax.shard_map`. If no ring fits, it calls `jnp.einsum`. `explain_einsum` returns the
choice and its reason.
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
from drumline.parallel.einsum.choice import (
    EinsumImplementation,
    Explanation,
    RingOptions,
    Route,
    Types,
    describe_route,
    explain,
    fallback,
)
from drumline.parallel.einsum.operands import (
    WHOLE,
    Contraction,
    EinsumShardings,
    LabelledArray,
    Sharding,
    UnsupportedSpec,
    axes_per_dim,
    drop_single_axes,
    read_labels,
)
from drumline.parallel.fused.functions import fused_allgather_matmul, fused_matmul_reducescatter
from drumline.parallel.rings.allreduce import matmul_allreduce
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.local import sum_dtype
from drumline.parallel.rings.ring import Direction, Loop, check_choice, check_wire_dtype
from drumline.parallel.rings.scatter import matmul_reducescatter
from drumline.parallel.target import Target, current_target, current_tpu


@overload
def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    *,
    out_sharding: Sharding,
    implementation: EinsumImplementation = ...,
    direction: Direction = ...,
    mesh: Mesh | None = ...,
    x_sharding: Sharding | None = ...,
    w_sharding: Sharding | None = ...,
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
    out_sharding: Sharding,
    implementation: EinsumImplementation = ...,
    direction: Direction = ...,
    mesh: Mesh | None = ...,
    x_sharding: Sharding | None = ...,
    w_sharding: Sharding | None = ...,
    loop: Loop = ...,
    precision: lax.PrecisionLike = ...,
    wire_dtype: DTypeLike | None = ...,
) -> tuple[jax.Array, ...]: ...
def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    out_sharding: Sharding,
    implementation: EinsumImplementation = "auto",
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Sharding | None = None,
    w_sharding: Sharding | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute `jnp.einsum(spec, x, w, out_sharding=…)` on a ring, if one fits.

    On a mesh of Explicit axes the types of the operands contain their shardings, also inside
    `jax.jit`. On Auto axes, such as those of `drumline.train.fit`, concrete arrays have shardings
    but traced arrays need `x_sharding` and `w_sharding`. Without them this function calls
    `jnp.einsum` and logs a warning once. It also calls `jnp.einsum` if no ring fits or, on a TPU,
    is faster. The function is differentiable. A ring sums in float32 and casts once.

    Args:
        spec: two operands and a result, such as `"bsd,df->bsf"`, `"bshk,hkd->bsd"` or
            `"...d,df->...f"`.
        x: the first operand.
        w: the second operand, or a sequence of weights with equal shardings, which share a gather
            of x and return a tuple of results.
        out_sharding: the sharding of the result, which decides between gather, scatter and
            all-reduce.
        implementation: `"auto"`; `"xla"` for `jnp.einsum`; `"ring"` for a ring even where it is
            expected to be slower; `"pallas"` for the fused TPU kernels. The last two raise
            ValueError if the shardings do not fit.
        direction: the directions of the permutes, `"both"` or `"one"`.
        mesh: the mesh, if its axes are Auto and no argument has it.
        x_sharding: the sharding of x, for traced arrays on Auto axes.
        w_sharding: the sharding of w, for traced arrays on Auto axes.
        loop: `"unrolled"`, `"rolled"`, or `"auto"`, as in the ring functions.
        precision: the precision of the matmuls.
        wire_dtype: the type in which a ring sends sums. None is float32; on a TPU it is the
            result's type, in which `jnp.einsum` adds, if float32 sums would be exposed.
            `jnp.einsum` ignores it.
    """
    check_choice("einsum", "implementation", implementation, get_args(EinsumImplementation))
    check_choice("einsum", "direction", direction, get_args(Direction))
    check_choice("einsum", "loop", loop, get_args(Loop))
    weights = _as_tuple("einsum", w)
    shardings = EinsumShardings.find(
        "einsum", x, weights, out_sharding, mesh, (x_sharding, w_sharding)
    )
    options = RingOptions(
        direction, loop, check_wire_dtype("einsum", wire_dtype), implementation=implementation
    )
    arguments = (("direction", direction), ("loop", loop), ("precision", precision))
    outs: list[jax.Array] = []
    for group, explanation in _share_rings(spec, x, weights, shardings, options):
        if explanation.route is None:
            if implementation in {"ring", "pallas"} and explanation.choice != "local":
                raise ValueError(
                    f"einsum: no ring fits {spec!r}: {explanation.reason}; "
                    "change the shardings, or implementation="
                )
            if None in shardings.specs:
                _warn_once(
                    f"einsum: {spec!r} is computed by XLA, without a ring: {explanation.reason}"
                )
            outs += [_einsum_with_xla(spec, x, weight, shardings, precision) for weight in group]
            continue
        program = _RingProgram(
            tuple(_contraction_of(spec, x, weight, shardings) for weight in group),
            explanation.route,
            shardings,
            (*arguments, ("wire_dtype", explanation.wire_dtype)),
            current_target(shardings.mesh),
            fused=implementation == "pallas",
        )
        outs += _run_sharded(program, x, group)
    return tuple(outs) if isinstance(w, list | tuple) else outs[0]


def _share_rings(
    spec: str, x: Any, weights: tuple[Any, ...], shardings: EinsumShardings, options: RingOptions
) -> list[tuple[tuple[Any, ...], Explanation]]:
    """Yield groups of weights that share a ring, and their explanations."""
    together = _explain(spec, x, weights, shardings, options)
    if together.route is not None and together.route.gathers_x:
        return [(weights, together)]
    if len(weights) == 1:
        return [(weights, together)]
    return [((weight,), _explain(spec, x, (weight,), shardings, options)) for weight in weights]


def explain_einsum(
    spec: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct | Sequence[jax.Array | jax.ShapeDtypeStruct],
    *,
    out_sharding: Sharding,
    implementation: EinsumImplementation = "auto",
    direction: Direction = "both",
    mesh: Mesh | None = None,
    x_sharding: Sharding | None = None,
    w_sharding: Sharding | None = None,
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> Explanation:
    """Return the choice of `einsum` for the same arguments, and the bytes it would send.

    It computes nothing, and accepts `jax.ShapeDtypeStruct`s with shardings as well as arrays.
    """
    del precision
    check_choice("explain_einsum", "implementation", implementation, get_args(EinsumImplementation))
    check_choice("explain_einsum", "direction", direction, get_args(Direction))
    check_choice("explain_einsum", "loop", loop, get_args(Loop))
    weights = _as_tuple("explain_einsum", w)
    explicit = (x_sharding, w_sharding)
    shardings = EinsumShardings.find("explain_einsum", x, weights, out_sharding, mesh, explicit)
    options = RingOptions(
        direction,
        loop,
        check_wire_dtype("explain_einsum", wire_dtype),
        implementation=implementation,
    )
    explanations = [
        explanation for _, explanation in _share_rings(spec, x, weights, shardings, options)
    ]
    if len(explanations) == 1:
        return explanations[0]
    sent: dict[str, int] = {}
    for explanation in explanations:
        for axis, count in explanation.bytes_per_axis.items():
            sent[axis] = sent.get(axis, 0) + count
    reasons = list(dict.fromkeys(explanation.reason for explanation in explanations))
    reason = f"one ring for each of {len(explanations)} weights: {'; '.join(reasons)}"
    return replace(explanations[0], reason=reason, bytes_per_axis=sent)


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning once."""
    logging.getLogger("drumline.parallel").warning(sentence)


def _as_tuple(caller: str, w: Any) -> tuple[Any, ...]:
    """Return the weights as a tuple."""
    weights = tuple(w) if isinstance(w, list | tuple) else (w,)
    if not weights:
        raise ValueError(f"{caller}: w is an empty sequence; give one array or more")
    return weights


def _explain(
    spec: str, x: Any, weights: tuple[Any, ...], shardings: EinsumShardings, options: RingOptions
) -> Explanation:
    direction = options.direction
    if shardings.has(AxisType.Manual):
        return fallback("inside shard_map; call the ring functions themselves there", direction)
    for name, known_spec in zip("xw", shardings.specs, strict=True):
        if known_spec is None:
            reason = f"the sharding of {name} is not known here; pass {name}_sharding="
            return fallback(reason, direction)
    specs = (*shardings.specs, shardings.out_spec)
    if any(getattr(s, "unreduced", None) or getattr(s, "reduced", None) for s in specs):
        return fallback("a sum is kept unreduced", direction)
    if any(PartitionSpec.UNCONSTRAINED in s for s in specs if s is not None):
        return fallback("a dimension's sharding is left unconstrained", direction)
    try:
        contractions = [_contraction_of(spec, x, weight, shardings) for weight in weights]
    except UnsupportedSpec as refusal:
        return fallback(str(refusal), direction)
    result = jnp.result_type(x, *weights)
    types = Types(x.dtype, jnp.result_type(*weights), sum_dtype(x, *weights), result)
    sizes = [prod(contraction.w.lengths) for contraction in contractions]
    options = replace(
        options,
        target=current_target(shardings.mesh),
        chip=current_tpu(shardings.mesh),
        weights=sum(sizes) / max(sizes[0], 1),
    )
    return explain(contractions[0], types, options)


def _contraction_of(spec: str, x: Any, w: Any, shardings: EinsumShardings) -> Contraction:
    operand_labels = read_labels(spec, x.ndim, w.ndim)
    lengths = dict(zip(operand_labels[0] + operand_labels[1], (*x.shape, *w.shape), strict=True))
    mesh = dict(shardings.mesh.shape)

    def labelled(labels: str, known_spec: PartitionSpec | None) -> LabelledArray:
        if known_spec is not None and len(known_spec) > len(labels):
            raise ValueError(
                f"einsum: the sharding {known_spec} has {len(known_spec)} entries, but {labels!r} "
                f"of {spec!r} has {len(labels)} dimensions"
            )
        axes = drop_single_axes(axes_per_dim(known_spec or WHOLE, len(labels)), mesh)
        return LabelledArray(labels, tuple(lengths[n] for n in labels), axes)

    x_spec, w_spec = shardings.specs
    return Contraction(
        labelled(operand_labels[0], x_spec),
        labelled(operand_labels[1], w_spec),
        labelled(operand_labels[2], shardings.out_spec),
        tuple(mesh.items()),
    )


def _einsum_with_xla(
    spec: str, x: jax.Array, w: jax.Array, shardings: EinsumShardings, precision: lax.PrecisionLike
) -> jax.Array:
    target_sharding = NamedSharding(shardings.mesh, shardings.out_spec)
    if not shardings.has(AxisType.Auto):
        return jnp.einsum(spec, x, w, precision=precision, out_sharding=target_sharding)
    out = jnp.einsum(spec, x, w, precision=precision)
    constrained = lax.with_sharding_constraint(out, target_sharding)
    return cast(jax.Array, constrained)


@dataclass(frozen=True)
class _RingProgram:
    """A ring without its arrays. Equal programs are compiled once."""

    contractions: tuple[Contraction, ...]
    route: Route
    shardings: EinsumShardings
    options: tuple[tuple[str, Any], ...]
    target: Target
    """The compiler that the ring is written for."""
    fused: bool = False
    """True for the kernels that contain the ring and its matmuls."""


@partial(jax.jit, static_argnums=0, inline=True)
def _run_sharded(
    program: _RingProgram, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    shardings = program.shardings
    x_spec, w_spec = shardings.specs
    mapped = jax.shard_map(
        partial(_run_on_device, program),
        mesh=shardings.mesh,
        in_specs=(x_spec, (w_spec,) * len(weights)),
        out_specs=(shardings.out_spec,) * len(weights),
    )
    return mapped(x, weights)


def _run_on_device(
    program: _RingProgram, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Reshape the operands of one device to matrices, run the ring, and restore dimensions."""
    contraction, route = program.contractions[0], program.route
    if route.swapped:
        contraction, x, weights = contraction.swapped(), weights[0], (x,)
    # The label that moves must be the last of the rows, or the first of the contracted labels or
    # the columns, so that its blocks are contiguous.
    rows = _last(contraction.rows, route.label)
    columns = _first(contraction.columns, route.label)
    contracted = _first(contraction.contracted, route.contracted or "")
    row_lengths = [x.shape[contraction.x.labels.index(n)] for n in rows]
    a = _transpose(x, contraction.x.labels, rows + contracted)
    a = a.reshape(*row_lengths, prod(a.shape[len(rows) :]))
    matrices = []
    for w in weights:
        b = _transpose(w, contraction.w.labels, contracted + columns)
        matrices.append(
            b.reshape(prod(b.shape[: len(contracted)]), prod(b.shape[len(contracted) :]))
        )
    multiply = _multiply_in_kernel if program.fused else _multiply
    local_outs = multiply(route, a, matrices, dict(program.options))
    outs = []
    for out, contraction in zip(local_outs, program.contractions, strict=True):
        result = contraction.out
        local = [
            result.length_of(n) // contraction.devices(result.axes_of(n)) for n in rows + columns
        ]
        outs.append(
            _drop_single_axes(
                program, _transpose(out.reshape(local), rows + columns, result.labels)
            )
        )
    return tuple(outs)


def _drop_single_axes(program: _RingProgram, out: jax.Array) -> jax.Array:
    # Axes of size 1 may be in an operand's spec and not in the result's.
    named = {axis for axes in axes_per_dim(program.shardings.out_spec, out.ndim) for axis in axes}
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


def _multiply_in_kernel(
    route: Route, a: jax.Array, matrices: list[jax.Array], options: dict[str, Any]
) -> tuple[jax.Array, ...]:
    supported = {name: value for name, value in options.items() if name != "loop"}
    over: Any = {"axis_name": route.axis_name, **supported}
    if a.ndim == 2 and route.movement == "gather rows":
        return tuple(fused_allgather_matmul(a, matrix, **over) for matrix in matrices)
    if a.ndim == 2 and route.movement == "scatter rows":
        return (fused_matmul_reducescatter(a, matrices[0], **over),)
    raise ValueError(
        "einsum: implementation='pallas' gathers or scatters the rows of a matrix, and here "
        f"{describe_route(route)}, with {a.ndim - 1} dimensions of rows; use 'ring'"
    )


def _transpose(array: jax.Array, labels: str, target_sharding: str) -> jax.Array:
    return array.transpose([labels.index(n) for n in target_sharding])


def _first(labels: str, label: str) -> str:
    return label + labels.replace(label, "") if label and label in labels else labels


def _last(labels: str, label: str) -> str:
    return labels.replace(label, "") + label if label and label in labels else labels
