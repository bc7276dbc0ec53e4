"""`matmul_reducescatter`: multiply and hand every device its share of the sum.

Each device holds a slice of the contracted dimension, so its product is one term of a sum over
the devices. Instead of forming the whole product and then reduce-scattering it, the sum for each
owner travels round the ring and every device adds the block it contributes just in time.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, empty, vary_alike
from drumline.parallel.rings.local import (
    check_contraction,
    check_divides,
    check_rows,
    check_weight,
    check_wire,
    dot,
    join,
    outer,
    put,
    result_dtype,
    take,
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

    With Y standing for `axis_name`:

    - `scattered="columns"`: `Tmp[..., F_Y] · W[F_Y, D] → Out[..., D_Y]`
    - `scattered="rows"`: `Tmp[..., B, F_Y] · W[F_Y, D] → Out[..., B_Y, D]`

    The same as `lax.psum_scatter(x @ w, axis_name, scatter_dimension=…, tiled=True)`, except
    that no device ever holds the whole product and that partial sums stay in float32, also on
    the wire, until one cast at the end.

    Args:
        x: this device's shard, with any number of leading dimensions.
        w: this device's rows of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        scattered: the dimension of the result that is divided between the devices.
        direction: `"both"` uses both directions of the ring's links, `"one"` sends everything one
            way.
        loop: `"rolled"` is a loop in the program, `"unrolled"` every step written out; `"auto"`
            rolls rings of more than two devices, which need less memory and compile time then, and
            on TPUs those of more than sixteen.
        precision: of each multiplication, as `jnp.matmul` takes it.
        wire_dtype: the type in which sums travel; None is that in which they are added, float32.
            bfloat16 halves the bytes and rounds a sum at every hop.
    """
    caller = "matmul_reducescatter"
    ring = ring_over(caller, axis_name, direction, loop, precision, wire_dtype)
    check_choice(caller, "scattered", scattered, get_args(Scattered))
    check_weight(caller, x, w)
    check_wire(caller, ring, x, w)
    check_contraction(caller, x, w)
    if scattered == "columns":
        check_divides(caller, "columns of w", w.shape[1], ring)
    else:
        check_rows(caller, x, "scattered='rows'")
        check_divides(caller, "rows of x", x.shape[-2], ring)
    x, w = reverse_only(caller, *vary_alike(axis_name, x, w))
    return dot(ring, x, w) if ring.size == 1 else _scatter(ring, scattered, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter(ring: Ring, scattered: Scattered, x: jax.Array, w: jax.Array) -> jax.Array:
    sums = scattered_sums(ring, scattered, (x,), (w,))
    return join(sums, scattered_dim(scattered, x)).astype(result_dtype(x, w))


def scattered_dim(scattered: Scattered, x: jax.Array) -> int:
    """The dimension of the product that the devices share."""
    return x.ndim - (1 if scattered == "columns" else 2)


def scattered_sums(
    ring: Ring, scattered: Scattered, xs: Arrays, weights: Arrays, *, along: int = 0
) -> tuple[jax.Array, ...]:
    """This device's share of Σ x · w, not yet cast, in one piece for each of the ring's lanes.

    `along` is the dimension of each w that is contracted: 1 multiplies by the transpose.
    """
    whole = weights[0].shape[1 - along] if scattered == "columns" else xs[0].shape[-2]
    length = whole // ring.size

    def product(start: jax.Array, size: int, x: jax.Array, w: jax.Array) -> jax.Array:
        if scattered == "columns":
            return dot(ring, x, take(w, start, size, 1 - along), along=along)
        return dot(ring, take(x, start, size, x.ndim - 2), w, along=along)

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
    """Gradients of both operands from one tour of g, this device's share of the cotangent."""
    x, w = operands
    gradients = _columns_gradients if scattered == "columns" else _rows_gradients
    return gradients(ring, x, w, g)


def _columns_gradients(
    ring: Ring, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # What is here of the two lanes is multiplied at once, so dx is added to only once a step.
    column_dim = g.ndim - 1
    width = g.shape[-1]
    lanes = ring.lanes(width)
    parts = [take(g, lane.start, lane.size, column_dim) for lane in lanes]

    def visit(
        carry: tuple[jax.Array, jax.Array] | None, arrivals: list[Arrival]
    ) -> tuple[jax.Array, jax.Array]:
        starts = [source * width + lane.start for lane, _, source in arrivals]
        weights = [take(w, start, lane.size, 1) for start, lane in zip(starts, lanes, strict=True)]
        block = join([part for _, part, _ in arrivals], column_dim)
        part = dot(ring, block, join(weights, 1), along=1)
        product = outer(ring, x, block)
        dx, dw = (None, empty(w.shape, w.dtype, g)) if carry is None else carry
        for start, lane in zip(starts, lanes, strict=True):
            dw = put(dw, take(product, lane.start, lane.size, 1), start, 1)
        return part if dx is None else dx + part, dw

    dx, dw = circulate(ring, lanes, parts, visit)
    return dx.astype(x.dtype), dw


def _rows_gradients(
    ring: Ring, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    row_dim = g.ndim - 2
    height = g.shape[row_dim]
    lanes = ring.lanes(height)
    parts = [take(g, lane.start, lane.size, row_dim) for lane in lanes]

    def visit(
        carry: tuple[jax.Array, jax.Array] | None, arrivals: list[Arrival]
    ) -> tuple[jax.Array, jax.Array]:
        dx, dw = (empty(x.shape, x.dtype, g), None) if carry is None else carry
        rows = []
        for lane, part, source in arrivals:
            start = source * height + lane.start
            dx = put(dx, dot(ring, part, w, along=1), start, row_dim)
            rows.append(take(x, start, lane.size, row_dim))
        # Both lanes in one product: dw, the largest array here, is read and written once a step.
        block = join([part for _, part, _ in arrivals], row_dim)
        part = outer(ring, join(rows, row_dim), block)
        return dx, part if dw is None else dw + part

    dx, dw = circulate(ring, lanes, parts, visit)
    return dx, dw.astype(w.dtype)


_scatter.defvjp(_forward, scatter_gradients)
