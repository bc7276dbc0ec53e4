"""`allgather_matmul`: multiply by what the other devices hold, without gathering it.

The shards of x travel round the ring; each device multiplies the shard that is passing with the
block of weights that belongs to it. Its gradient is a matmul that scatters (for x) and a second
tour of the shards (for w): running the ring again is cheaper than keeping what it brought.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Literal, get_args

import jax
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.modes import reverse_only
from drumline.parallel.rings.loops import (
    Arrival,
    Direction,
    Loop,
    Ring,
    check_choice,
    circulate,
    in_turn,
    ring_over,
)
from drumline.parallel.rings.products import dot, join, outer, put, result_dtype, sum_dtype, take
from drumline.parallel.rings.scatter import Scattered, scattered_dim, scattered_sums
from drumline.parallel.rings.shapes import (
    check_contraction,
    check_gathered_columns,
    check_rows,
    check_weight,
)
from drumline.parallel.varying import vary_alike, zeros

Gathered = Literal["contraction", "rows"]


def allgather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    gathered: Gathered = "contraction",
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiply an array that is sharded over a mesh axis, for use inside `jax.shard_map`.

    With Y standing for `axis_name`:

    - `gathered="contraction"`: `A[..., D_Y] · W[D, F_Y] → Out[..., F_Y]`
    - `gathered="rows"`: `A[..., B_Y, D] · W[D, F_Y] → Out[..., B, F_Y]`

    The same as `lax.all_gather(x, axis_name, axis=…, tiled=True) @ w`, except that no device
    ever holds the whole of A.

    Args:
        x: this device's shard, with any number of leading dimensions.
        w: this device's columns of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        gathered: the dimension of x that is sharded over the axis.
        direction: `"both"` sends halves both ways round the ring, `"one"` everything one way.
        loop: `"rolled"` is a loop in the program, `"unrolled"` every step written out; `"auto"`
            rolls rings of more than two devices, which need less memory and compile time then.
        precision: of each multiplication, as `jnp.matmul` takes it.
    """
    caller = "allgather_matmul"
    ring = ring_over(caller, axis_name, direction, loop, precision)
    check_choice(caller, "gathered", gathered, get_args(Gathered))
    check_weight(caller, x, w)
    if gathered == "contraction":
        check_gathered_columns(caller, x, w, ring)
    else:
        check_rows(caller, x, "gathered='rows'")
        check_contraction(caller, x, w)
    x, w = reverse_only(caller, *vary_alike(axis_name, x, w))
    if ring.size == 1:
        return dot(ring, x, w)
    if gathered == "contraction":
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        return _gather(ring, "contraction", rows, w).reshape(*x.shape[:-1], w.shape[1])
    return _gather(ring, "rows", x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(ring: Ring, gathered: Gathered, x: jax.Array, w: jax.Array) -> jax.Array:
    row_dim = x.ndim - 2
    lanes = ring.lanes(x.shape[row_dim])
    parts = [take(x, lane.start, lane.size, row_dim) for lane in lanes]

    if gathered == "contraction":
        depth = x.shape[1]

        def visit(sums: tuple[jax.Array, ...], arrivals: list[Arrival]) -> tuple[jax.Array, ...]:
            return tuple(
                sum_ + dot(ring, part, take(w, source * depth, depth, 0))
                for sum_, (_, part, source) in zip(sums, arrivals, strict=True)
            )

        start = tuple(zeros((lane.size, w.shape[1]), sum_dtype(x, w), x) for lane in lanes)
        sums = circulate(ring, lanes, parts, visit, start)
        return join(sums, 0).astype(result_dtype(x, w))

    height = x.shape[row_dim]

    def row_visit(out: jax.Array, arrival: Arrival) -> jax.Array:
        lane, part, source = arrival
        return put(out, dot(ring, part, w), source * height + lane.start, row_dim)

    shape = (*x.shape[:row_dim], height * ring.size, w.shape[1])
    return circulate(ring, lanes, parts, in_turn(row_visit), zeros(shape, result_dtype(x, w), x))


def _forward(
    ring: Ring, gathered: Gathered, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(ring, gathered, x, w), (x, w)


def _backward(
    ring: Ring, gathered: Gathered, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    scattered: Scattered = "columns" if gathered == "contraction" else "rows"
    sums = scattered_sums(ring, scattered, g, w, along=1)
    dx = join(sums, scattered_dim(scattered, g)).astype(x.dtype)
    return dx, _weight_gradient(ring, gathered, x, g).astype(w.dtype)


def _weight_gradient(ring: Ring, gathered: Gathered, x: jax.Array, g: jax.Array) -> jax.Array:
    if gathered == "contraction":
        # Cut along the columns, unlike the forward pass: each block of the gradient is then
        # complete when it is computed, and needs no float32 sum.
        depth = x.shape[1]
        lanes = ring.lanes(depth)
        parts = [take(x, lane.start, lane.size, 1) for lane in lanes]

        def visit(dw: jax.Array, arrival: Arrival) -> jax.Array:
            lane, part, source = arrival
            return put(dw, outer(ring, part, g), source * depth + lane.start, 0)

        dtype = result_dtype(x, g)
        return circulate(
            ring, lanes, parts, in_turn(visit), zeros((depth * ring.size, g.shape[1]), dtype, g)
        )

    row_dim = x.ndim - 2
    height = x.shape[row_dim]
    lanes = ring.lanes(height)
    parts = [take(x, lane.start, lane.size, row_dim) for lane in lanes]

    def row_visit(dw: jax.Array, arrivals: list[Arrival]) -> jax.Array:
        rows = [
            take(g, source * height + lane.start, lane.size, row_dim)
            for lane, _, source in arrivals
        ]
        # Both lanes in one product: dw, the largest array here, is read and written once a step.
        block = join([part for _, part, _ in arrivals], row_dim)
        return dw + outer(ring, block, join(rows, row_dim))

    start = zeros((x.shape[-1], g.shape[-1]), sum_dtype(x, g), g)
    return circulate(ring, lanes, parts, row_visit, start)


_gather.defvjp(_forward, _backward)
