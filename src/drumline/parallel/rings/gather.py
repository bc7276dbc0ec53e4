"""`allgather_matmul`: multiply by gathered shards without storing the gathered array.

The shards of x move around the ring. Each device multiplies the shard that has arrived by the
matching block of its weights. The gradient of x is a matmul with a reduce-scatter. The gradient of
the weights gathers x again, which costs less than saving the gathered x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Literal, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, empty, match_varying_on
from drumline.parallel.rings.local import (
    check_contraction,
    check_gathered_columns,
    check_rows,
    check_weights,
    check_wire_operands,
    concat,
    dot,
    outer,
    put_slice,
    result_dtype,
    take_slice,
)
from drumline.parallel.rings.loops import circulate, visit_in_turn
from drumline.parallel.rings.ring import Arrival, Direction, Loop, Ring, check_choice, ring_over
from drumline.parallel.rings.scatter import Arrays, Scattered, scattered_dim, scattered_sums
from drumline.parallel.transforms import reverse_only

Gathered = Literal["contraction", "rows"]


@overload
def allgather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    gathered: Gathered = ...,
    direction: Direction = ...,
    loop: Loop = ...,
    precision: lax.PrecisionLike = ...,
    wire_dtype: DTypeLike | None = ...,
) -> jax.Array: ...
@overload
def allgather_matmul(
    x: jax.Array,
    w: Sequence[jax.Array],
    *,
    axis_name: AxisName,
    gathered: Gathered = ...,
    direction: Direction = ...,
    loop: Loop = ...,
    precision: lax.PrecisionLike = ...,
    wire_dtype: DTypeLike | None = ...,
) -> tuple[jax.Array, ...]: ...
def allgather_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    *,
    axis_name: AxisName,
    gathered: Gathered = "contraction",
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Multiply an array that is sharded over a mesh axis, for use inside `jax.shard_map`.

    With Y for `axis_name`:

    - `gathered="contraction"`: `A[..., D_Y] · W[D, F_Y] → Out[..., F_Y]`
    - `gathered="rows"`: `A[..., B_Y, D] · W[D, F_Y] → Out[..., B, F_Y]`

    The result equals `lax.all_gather(x, axis_name, axis=…, tiled=True) @ w`, but no device stores
    the full A.

    Args:
        x: this device's shard, with any number of leading dimensions.
        w: this device's columns of the weights, or a sequence of weights (such as queries, keys
            and values), which share a gather of x and return a tuple of results.
        axis_name: the mesh axis (or axes) of the ring.
        gathered: the dimension of x that is sharded over the axis.
        direction: the directions of the permutes, `"both"` or `"one"`.
        loop: `"rolled"` for a loop, `"unrolled"` for straight-line code. `"auto"` rolls rings of
            more than two devices (on TPUs, sixteen) to save memory and compile time.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which the sums of x's gradient are sent; None is the type of the
            sums, float32.
    """
    caller = "allgather_matmul"
    ring = ring_over(caller, axis_name, direction, loop, precision, wire_dtype)
    check_choice(caller, "gathered", gathered, get_args(Gathered))
    weights = check_weights(caller, x, w)
    for weight in weights:
        check_wire_operands(caller, ring, x, weight)
        if gathered == "contraction":
            check_gathered_columns(caller, x, weight, ring)
        else:
            check_rows(caller, x, "gathered='rows'")
            check_contraction(caller, x, weight)
    x, *varying = reverse_only(caller, *match_varying_on(axis_name, x, *weights))
    weights = tuple(varying)
    if ring.size == 1:
        outs = tuple(dot(ring, x, weight) for weight in weights)
    elif gathered == "contraction":
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        results = _gather(ring, "contraction", rows, weights)
        outs = tuple(out.reshape(*x.shape[:-1], out.shape[1]) for out in results)
    else:
        outs = _gather(ring, "rows", x, weights)
    return outs if isinstance(w, list | tuple) else outs[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(ring: Ring, gathered: Gathered, x: jax.Array, weights: Arrays) -> Arrays:
    products = _gather_contraction if gathered == "contraction" else _gather_rows
    return products(ring, x, weights)


def _gather_contraction(ring: Ring, x: jax.Array, weights: Arrays) -> Arrays:
    lanes = ring.lanes(x.shape[0])
    parts = [take_slice(x, lane.start, lane.size, 0) for lane in lanes]
    depth = x.shape[1]

    def visit(sums: tuple[Arrays, ...] | None, arrivals: list[Arrival]) -> tuple[Arrays, ...]:
        products = tuple(
            tuple(dot(ring, part, take_slice(w, source * depth, depth, 0)) for w in weights)
            for _, part, source in arrivals
        )
        return products if sums is None else jax.tree.map(jnp.add, sums, products)

    sums = circulate(ring, lanes, parts, visit)
    return tuple(
        concat(lane_sums, 0).astype(result_dtype(x, w))
        for w, lane_sums in zip(weights, zip(*sums, strict=True), strict=True)
    )


def _gather_rows(ring: Ring, x: jax.Array, weights: Arrays) -> Arrays:
    row_dim = x.ndim - 2
    rows_per_shard = x.shape[row_dim]
    lanes = ring.lanes(rows_per_shard)
    parts = [take_slice(x, lane.start, lane.size, row_dim) for lane in lanes]

    def visit(outs: Arrays | None, arrival: Arrival) -> Arrays:
        lane, part, source = arrival
        if outs is None:
            shape = (*x.shape[:row_dim], rows_per_shard * ring.size)
            outs = tuple(empty((*shape, w.shape[1]), result_dtype(x, w), x) for w in weights)
        start = source * rows_per_shard + lane.start
        return tuple(
            put_slice(out, dot(ring, part, w), start, row_dim)
            for out, w in zip(outs, weights, strict=True)
        )

    return circulate(ring, lanes, parts, visit_in_turn(ring, visit))


def _forward(
    ring: Ring, gathered: Gathered, x: jax.Array, weights: Arrays
) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    return _gather(ring, gathered, x, weights), (x, weights)


def _backward(
    ring: Ring, gathered: Gathered, operands: tuple[jax.Array, Arrays], gs: Arrays
) -> tuple[jax.Array, Arrays]:
    x, weights = operands
    scattered: Scattered = "columns" if gathered == "contraction" else "rows"
    sums = scattered_sums(ring, scattered, gs, weights, w_dim=1)
    dx = concat(sums, scattered_dim(scattered, gs[0])).astype(x.dtype)
    gradients = _contraction_gradients if gathered == "contraction" else _row_gradients
    dws = gradients(ring, x, gs)
    return dx, tuple(dw.astype(w.dtype) for dw, w in zip(dws, weights, strict=True))


def _contraction_gradients(ring: Ring, x: jax.Array, gs: Arrays) -> Arrays:
    # Unlike the forward pass, split along the columns: each block of the gradient is then complete
    # when it is computed and needs no float32 sum.
    depth = x.shape[1]
    lanes = ring.lanes(depth)
    parts = [take_slice(x, lane.start, lane.size, 1) for lane in lanes]

    def visit(dws: Arrays | None, arrival: Arrival) -> Arrays:
        lane, part, source = arrival
        if dws is None:
            shapes = [(depth * ring.size, g.shape[1]) for g in gs]
            dws = tuple(empty(s, result_dtype(x, g), g) for s, g in zip(shapes, gs, strict=True))
        start = source * depth + lane.start
        return tuple(
            put_slice(dw, outer(ring, part, g), start, 0) for dw, g in zip(dws, gs, strict=True)
        )

    return circulate(ring, lanes, parts, visit_in_turn(ring, visit))


def _row_gradients(ring: Ring, x: jax.Array, gs: Arrays) -> Arrays:
    row_dim = x.ndim - 2
    rows_per_shard = x.shape[row_dim]
    lanes = ring.lanes(rows_per_shard)
    parts = [take_slice(x, lane.start, lane.size, row_dim) for lane in lanes]

    def visit(dws: Arrays | None, arrivals: list[Arrival]) -> Arrays:
        starts = [source * rows_per_shard + lane.start for lane, _, source in arrivals]
        # The lanes share a matmul, so dw, the largest array, is read and written once per step.
        block = concat([part for _, part, _ in arrivals], row_dim)
        results = []
        for g in gs:
            rows = [
                take_slice(g, start, lane.size, row_dim)
                for start, (lane, _, _) in zip(starts, arrivals, strict=True)
            ]
            results.append(outer(ring, block, concat(rows, row_dim)))
        return tuple(results) if dws is None else jax.tree.map(jnp.add, dws, tuple(results))

    return circulate(ring, lanes, parts, visit)


_gather.defvjp(_forward, _backward)
