"""`matmul_allreduce`: multiply and give every device the full sum.

A ring reduce-scatter, whose permutes overlap with the matmuls, and then a ring all-gather of the
complete shares. XLA would merge a `psum` per tile into one all-reduce that waits for the full
matmul.
"""

from __future__ import annotations

from functools import partial
from math import prod

import jax
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName, empty, is_checked, match_varying_on, same_everywhere
from drumline.parallel.rings.local import (
    check_contraction,
    check_weight,
    check_wire_operands,
    concat,
    dot,
    outer,
    put_slice,
    result_dtype,
    sum_dtype,
    take_slice,
)
from drumline.parallel.rings.loops import accumulate, circulate
from drumline.parallel.rings.ring import Arrival, Direction, Lane, Loop, Ring, ring_over
from drumline.parallel.rings.scatter import (
    Scattered,
    scatter_gradients,
    scattered_dim,
    scattered_sums,
)
from drumline.parallel.transforms import reverse_only


def matmul_allreduce(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiply by row-sharded weights and sum over a mesh axis, for use inside `jax.shard_map`.

    `A[..., D_Y] · W[D_Y, F] → Out[..., F]` with Y for `axis_name`.

    The result equals `lax.psum(x @ w, axis_name)`, also in its type (under `check_vma=True` it does
    not vary over the axis) and in its gradient, which then needs no communication. The result is
    scattered by rows, or by columns if the devices do not divide the rows. The all-gather at the
    end has no matmul to overlap with.

    Args:
        x: this device's shard, with any number of leading dimensions.
        w: this device's rows of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        direction: the directions of the permutes, `"both"` or `"one"`.
        loop: `"rolled"` for a loop, `"unrolled"` for straight-line code. `"auto"` rolls rings of
            more than two devices (on TPUs, sixteen) to save memory and compile time.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which sums are sent; None is the type of the sums, float32.
    """
    caller = "matmul_allreduce"
    ring = ring_over(caller, axis_name, direction, loop, precision, wire_dtype)
    check_weight(caller, x, w)
    check_wire_operands(caller, ring, x, w)
    check_contraction(caller, x, w)
    checked = is_checked(axis_name)
    x, w = reverse_only(caller, *match_varying_on(axis_name, x, w))
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    scattered = _scattered_dimension(caller, ring, rows.shape[0], w.shape[1])
    return _allreduce(ring, scattered, checked, rows, w).reshape(*x.shape[:-1], w.shape[1])


def _scattered_dimension(caller: str, ring: Ring, rows: int, columns: int) -> Scattered:
    if rows % ring.size == 0:
        return "rows"
    if columns % ring.size == 0:
        return "columns"
    raise ValueError(
        f"{caller}: neither the {rows} rows of x nor the {columns} columns of w can be divided "
        f"between the {ring.size} devices of axis {ring.axis_name!r}"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _allreduce(
    ring: Ring,
    scattered: Scattered,
    checked: bool,  # noqa: ARG001 - for the backward pass
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    if ring.size == 1:
        return same_everywhere(ring.axis_name, dot(ring, x, w))
    dtype = result_dtype(x, w)
    shares = [share.astype(dtype) for share in scattered_sums(ring, scattered, (x,), (w,))]
    return same_everywhere(
        ring.axis_name, _gather_shares(ring, scattered_dim(scattered, x), shares)
    )


def _gather_shares(ring: Ring, dim: int, shares: list[jax.Array]) -> jax.Array:
    """Gather the full array from every device's share, which has one part per lane."""
    length = sum(share.shape[dim] for share in shares)
    shape = list(shares[0].shape)
    shape[dim] = length * ring.size

    def visit(out: jax.Array | None, arrivals: list[Arrival]) -> jax.Array:
        out = empty(tuple(shape), shares[0].dtype, shares[0]) if out is None else out
        for lane, part, source in arrivals:
            out = put_slice(out, part, source * length + lane.start, dim)
        return out

    return circulate(ring, ring.lanes(length), shares, visit)


def _forward(
    ring: Ring, scattered: Scattered, checked: bool, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _allreduce(ring, scattered, checked, x, w), (x, w)


def _backward(
    ring: Ring,
    scattered: Scattered,
    checked: bool,
    operands: tuple[jax.Array, jax.Array],
    g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    if checked or ring.size == 1:
        # All devices share one cotangent, so no communication is needed.
        (g,) = match_varying_on(ring.axis_name, g)
        return dot(ring, g, w, w_dim=1).astype(x.dtype), outer(ring, x, g).astype(w.dtype)
    # Without `check_vma`, every device has a cotangent for its copy of the result, as with `psum`.
    # Sum them first, then gather the shares of the sum as in the gradient of a scatter.
    share = _scatter_sum(ring, scattered_dim(scattered, x), g)
    return scatter_gradients(ring, scattered, operands, share)


def _scatter_sum(ring: Ring, dim: int, g: jax.Array) -> jax.Array:
    """Return this device's share of g summed over the ring."""
    length = g.shape[dim] // ring.size

    def term(operands: tuple[jax.Array, ...], lane: Lane, owner: jax.Array) -> jax.Array:
        share = take_slice(operands[0], owner * length + lane.start, lane.size, dim)
        return share.astype(sum_dtype(g, g))

    return concat(accumulate(ring, ring.lanes(length), (g,), term), dim).astype(g.dtype)


_allreduce.defvjp(_forward, _backward)
