"""`matmul_reducescatter`: multiply, sum over the devices, and give each device its share.

A device holds a slice of the contracted dimension, so its matmul is a term of a sum over the
devices. The sum for each owner moves around the ring. Every device computes a block of its matmul
when the sum arrives, and never holds the full matmul.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, empty, match_varying_on
from drumline.parallel.rings.local import (
    check_contraction,
    check_divides,
    check_rows,
    check_weight,
    check_wire_operands,
    concat,
    dot,
    outer,
    put_slice,
    result_dtype,
    take_slice,
)
from drumline.parallel.rings.loops import accumulate, circulate
from drumline.parallel.rings.ring import (
    Arrival,
    Direction,
    Lane,
    Loop,
    Ring,
    check_choice,
    ring_over,
)
from drumline.parallel.transforms import reverse_only

Scattered = Literal["columns", "rows"]
Arrays = tuple[jax.Array, ...]


def matmul_reducescatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    scattered: Scattered = "columns",
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiply by row-sharded weights and scatter the sum, for use inside `jax.shard_map`.

    With Y for `axis_name`:

    - `scattered="columns"`: `Tmp[..., F_Y] · W[F_Y, D] → Out[..., D_Y]`
    - `scattered="rows"`: `Tmp[..., B, F_Y] · W[F_Y, D] → Out[..., B_Y, D]`

    The result equals `lax.psum_scatter(x @ w, axis_name, scatter_dimension=…, tiled=True)`, but no
    device stores the full matmul. Partial sums are float32, also when sent, and are cast once.

    Args:
        x: this device's shard, with any number of leading dimensions.
        w: this device's rows of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        scattered: the dimension of the result that is divided between the devices.
        direction: the directions of the permutes, `"both"` or `"one"`.
        loop: `"rolled"` for a loop, `"unrolled"` for straight-line code. `"auto"` rolls rings of
            more than two devices (on TPUs, sixteen) to save memory and compile time.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which sums are sent; None is the type of the sums, float32. bfloat16
            halves the bytes and rounds a sum at every permute.
    """
    caller = "matmul_reducescatter"
    ring = ring_over(caller, axis_name, direction, loop, precision, wire_dtype)
    check_choice(caller, "scattered", scattered, get_args(Scattered))
    check_weight(caller, x, w)
    check_wire_operands(caller, ring, x, w)
    check_contraction(caller, x, w)
    if scattered == "columns":
        check_divides(caller, "columns of w", w.shape[1], ring)
    else:
        check_rows(caller, x, "scattered='rows'")
        check_divides(caller, "rows of x", x.shape[-2], ring)
    x, w = reverse_only(caller, *match_varying_on(axis_name, x, w))
    return dot(ring, x, w) if ring.size == 1 else _scatter(ring, scattered, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter(ring: Ring, scattered: Scattered, x: jax.Array, w: jax.Array) -> jax.Array:
    sums = scattered_sums(ring, scattered, (x,), (w,))
    return concat(sums, scattered_dim(scattered, x)).astype(result_dtype(x, w))


def scattered_dim(scattered: Scattered, x: jax.Array) -> int:
    """Return the dimension of the result that is divided between the devices."""
    return x.ndim - (1 if scattered == "columns" else 2)


def scattered_sums(
    ring: Ring, scattered: Scattered, xs: Arrays, weights: Arrays, *, w_dim: int = 0
) -> tuple[jax.Array, ...]:
    """Return this device's share of Σ x · w before the cast, one array per lane of the ring.

    `w_dim` is the dimension of each w that is contracted; 1 multiplies by the transpose.
    """
    full_shards = weights[0].shape[1 - w_dim] if scattered == "columns" else xs[0].shape[-2]
    length = full_shards // ring.size

    def product(start: jax.Array, size: int, x: jax.Array, w: jax.Array) -> jax.Array:
        if scattered == "columns":
            return dot(ring, x, take_slice(w, start, size, 1 - w_dim), w_dim=w_dim)
        return dot(ring, take_slice(x, start, size, x.ndim - 2), w, w_dim=w_dim)

    def term(operands: Arrays, lane: Lane, owner: jax.Array) -> jax.Array:
        start = owner * length + lane.start
        pairs = zip(operands[: len(xs)], operands[len(xs) :], strict=True)
        products = [product(start, lane.size, x, w) for x, w in pairs]
        return reduce(jnp.add, products)

    return accumulate(ring, ring.lanes(length), (*xs, *weights), term)


def _forward(
    ring: Ring, scattered: Scattered, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scatter(ring, scattered, x, w), (x, w)


def scatter_gradients(
    ring: Ring, scattered: Scattered, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the operands, which share a gather of the cotangent g."""
    x, w = operands
    gradients = _column_gradients if scattered == "columns" else _row_gradients
    return gradients(ring, x, w, g)


def _column_gradients(
    ring: Ring, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # The lanes share a matmul, so dx is updated once per step.
    column_dim = g.ndim - 1
    width = g.shape[-1]
    lanes = ring.lanes(width)
    parts = [take_slice(g, lane.start, lane.size, column_dim) for lane in lanes]

    def visit(
        carry: tuple[jax.Array, jax.Array] | None, arrivals: list[Arrival]
    ) -> tuple[jax.Array, jax.Array]:
        starts = [source * width + lane.start for lane, _, source in arrivals]
        weights = [
            take_slice(w, start, lane.size, 1) for start, lane in zip(starts, lanes, strict=True)
        ]
        block = concat([part for _, part, _ in arrivals], column_dim)
        part = dot(ring, block, concat(weights, 1), w_dim=1)
        product = outer(ring, x, block)
        dx, dw = (None, empty(w.shape, w.dtype, g)) if carry is None else carry
        for start, lane in zip(starts, lanes, strict=True):
            dw = put_slice(dw, take_slice(product, lane.start, lane.size, 1), start, 1)
        return part if dx is None else dx + part, dw

    dx, dw = circulate(ring, lanes, parts, visit)
    return dx.astype(x.dtype), dw


def _row_gradients(
    ring: Ring, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    row_dim = g.ndim - 2
    rows_per_shard = g.shape[row_dim]
    lanes = ring.lanes(rows_per_shard)
    parts = [take_slice(g, lane.start, lane.size, row_dim) for lane in lanes]

    def visit(
        carry: tuple[jax.Array, jax.Array] | None, arrivals: list[Arrival]
    ) -> tuple[jax.Array, jax.Array]:
        dx, dw = (empty(x.shape, x.dtype, g), None) if carry is None else carry
        rows = []
        for lane, part, source in arrivals:
            start = source * rows_per_shard + lane.start
            dx = put_slice(dx, dot(ring, part, w, w_dim=1), start, row_dim)
            rows.append(take_slice(x, start, lane.size, row_dim))
        # The lanes share a matmul, so dw, the largest array, is read and written once per step.
        block = concat([part for _, part, _ in arrivals], row_dim)
        part = outer(ring, concat(rows, row_dim), block)
        return dx, part if dw is None else dw + part

    dx, dw = circulate(ring, lanes, parts, visit)
    return dx, dw.astype(w.dtype)


_scatter.defvjp(_forward, scatter_gradients)
