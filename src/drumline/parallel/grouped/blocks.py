"""Grouped matmuls as loops over blocks of rows, for any device.

Rows are sorted by group. A group is split into blocks of `m` rows, and a block is multiplied by the
matrix of its group. The work is that of a dense matmul plus at most `m - 1` rows of padding per
group, and no array is larger than the operands. The number of blocks depends on the data, so these
are `while` loops; `grouped_matmul` defines their gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import varying_axes
from drumline.parallel.typed import fori_loop


def match_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays typed as varying over the axes that any of them varies over.

    Inside `shard_map` the carry of a loop must keep one type, and a gradient must be summed over
    the axes that its primal does not vary over. The cast does the first, and its transpose the
    second.
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
    """A block of rows: its group, its start, and the mask of its own rows."""

    group: jax.Array
    start: jax.Array
    in_group: jax.Array


def rows_per_block(rows: int, groups: int, *, max_rows: int = 256) -> int:
    """Return the number of rows of a block.

    This is a quarter of the mean group, so that the padding of all groups stays below a quarter of
    the rows, but at least 8, because smaller blocks do not pay for loading their matrix.
    """
    if rows == 0:
        return 0
    rows_wanted = max(8, rows // (4 * max(groups, 1)))
    power = 1 << (rows_wanted.bit_length() - 1)
    return min(power, max_rows, rows)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Return the type for sums of `dtype`: float32, or float64 for float64."""
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
    # The last block may extend past the array. It then starts earlier and masks the rows before it.
    row_index = jnp.minimum(start, n - m)
    rows = row_index + jnp.arange(m, dtype=start.dtype)
    return Block(group, row_index, ((rows >= start) & (rows < ends[group]))[:, None])


def blocked_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool,
    out_dtype: jnp.dtype,
    max_rows: int = 256,
) -> jax.Array:
    """Multiply the groups of rows of `x` by their matrices. Rows past the last group are zero."""
    n, groups = x.shape[0], w.shape[0]
    m = rows_per_block(n, groups, max_rows=max_rows)
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
        previous = lax.dynamic_slice_in_dim(out, block.start, m)
        updated = jnp.where(block.in_group, product.astype(out_dtype), previous)
        return lax.dynamic_update_slice_in_dim(out, updated, block.start, 0)

    return fori_loop(last[-1], body, out)


def blocked_outer(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, out_dtype: jnp.dtype, max_rows: int = 256
) -> jax.Array:
    """Sum the outer products of the rows of `x` and `y` by group, in float32."""
    n, groups = x.shape[0], sizes.shape[0]
    m = rows_per_block(n, groups, max_rows=max_rows)
    dtype = accumulator(x.dtype)
    total = jnp.zeros_like(x, shape=(groups, x.shape[1], y.shape[1]), dtype=dtype)
    if m == 0 or groups == 0:
        return total.astype(out_dtype)
    per_group, last = _block_count(sizes, m)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        block = _block(i, sizes, per_group, last, m, n)
        # Mask the operands, because rows of another group may be NaN.
        left = jnp.where(block.in_group, lax.dynamic_slice_in_dim(x, block.start, m), 0)
        right = jnp.where(block.in_group, lax.dynamic_slice_in_dim(y, block.start, m), 0)
        product = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype
        )
        group_total = lax.dynamic_index_in_dim(total, block.group)
        return lax.dynamic_update_slice_in_dim(total, group_total + product[None], block.group, 0)

    return fori_loop(last[-1], body, total).astype(out_dtype)
