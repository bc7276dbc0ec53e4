"""Grouped products as loops over blocks of rows, for any device.

Rows arrive sorted by group. Each group is cut into blocks of `m` rows, and one block meets one
matrix, so the work is that of one dense product plus at most `m - 1` rows of padding for each
group: no factor of the number of groups, and no array larger than the operands. The number of
blocks depends on the data, so these are `while` loops; `grouped_matmul` gives them a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import varying_axes
from drumline.parallel.typed import fori_loop


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays with the same type towards the mesh: varying wherever one of them varies.

    Inside `shard_map` a loop wants its carry to keep one type, and a gradient must be summed over
    the axes its primal did not vary over; the cast does the first and transposes to the second.
    """
    varying = [varying_axes(array) for array in arrays]
    everywhere = frozenset[str]().union(*varying)
    return tuple(
        lax.pcast(array, tuple(sorted(everywhere - axes)), to="varying")
        if everywhere - axes
        else array
        for array, axes in zip(arrays, varying, strict=True)
    )


class Block(NamedTuple):
    """One block of rows: its group, where to cut it, and which of the cut rows are its own."""

    group: jax.Array
    start: jax.Array
    mine: jax.Array


def rows_per_block(rows: int, groups: int, *, most: int = 256) -> int:
    """Return how many rows one block takes.

    A quarter of the mean group, so that the padding of all groups together stays under a quarter
    of the rows; not under 8, below which a block no longer pays for reading its matrix.
    """
    if rows == 0:
        return 0
    wanted = max(8, rows // (4 * max(groups, 1)))
    power = 1 << (wanted.bit_length() - 1)
    return min(power, most, rows)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Return the type in which products of `dtype` are summed: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def _block_count(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    per_group = (sizes + (m - 1)) // m
    return per_group, jnp.cumsum(per_group)


def _block(
    i: jax.Array, sizes: jax.Array, per_group: jax.Array, last: jax.Array, m: int, n: int
) -> Block:
    ends = jnp.cumsum(sizes)
    group = jnp.sum(last <= i, dtype=jnp.int32)
    start = ends[group] - sizes[group] + (i - (last[group] - per_group[group])) * m
    # The last block may reach past the array: cut it earlier and leave the rows before it alone.
    at = jnp.minimum(start, n - m)
    rows = at + jnp.arange(m, dtype=start.dtype)
    return Block(group, at, ((rows >= start) & (rows < ends[group]))[:, None])


def blocked_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool,
    out_dtype: jnp.dtype,
    most: int = 256,
) -> jax.Array:
    """Multiply each group of rows of `x` by its matrix; rows past the last group become zero."""
    n, groups = x.shape[0], w.shape[0]
    m = rows_per_block(n, groups, most=most)
    out = jnp.zeros_like(x, shape=(n, w.shape[1 if transpose else 2]), dtype=out_dtype)
    if m == 0 or groups == 0:
        return out
    per_group, last = _block_count(sizes, m)
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        block = _block(i, sizes, per_group, last, m, n)
        rows = lax.dynamic_slice_in_dim(x, block.start, m)
        matrix = lax.dynamic_index_in_dim(w, block.group, keepdims=False)
        product = lax.dot_general(
            rows, matrix, contract, preferred_element_type=accumulator(x.dtype)
        )
        before = lax.dynamic_slice_in_dim(out, block.start, m)
        after = jnp.where(block.mine, product.astype(out_dtype), before)
        return lax.dynamic_update_slice_in_dim(out, after, block.start, 0)

    return fori_loop(last[-1], body, out)


def blocked_outer(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, out_dtype: jnp.dtype, most: int = 256
) -> jax.Array:
    """Sum the outer products of the rows of `x` and `y` in each group, in float32."""
    n, groups = x.shape[0], sizes.shape[0]
    m = rows_per_block(n, groups, most=most)
    dtype = accumulator(x.dtype)
    total = jnp.zeros_like(x, shape=(groups, x.shape[1], y.shape[1]), dtype=dtype)
    if m == 0 or groups == 0:
        return total.astype(out_dtype)
    per_group, last = _block_count(sizes, m)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        block = _block(i, sizes, per_group, last, m, n)
        # Both sides are masked: a NaN in a neighbour's row must not reach this group's sum.
        left = jnp.where(block.mine, lax.dynamic_slice_in_dim(x, block.start, m), 0)
        right = jnp.where(block.mine, lax.dynamic_slice_in_dim(y, block.start, m), 0)
        product = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype
        )
        so_far = lax.dynamic_index_in_dim(total, block.group)
        return lax.dynamic_update_slice_in_dim(total, so_far + product[None], block.group, 0)

    return fori_loop(last[-1], body, total).astype(out_dtype)
