"""The multiplications and slices that the rings are made of.

Products accumulate in float32 (integers in int32) whatever the operands are; the rings add them
in that type and cast once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.rings.ring import Ring


def result_dtype(x: jax.Array, w: jax.Array) -> jnp.dtype:
    """The type of `x @ w` for the caller, as `jnp.matmul` has it."""
    return jnp.result_type(x, w)


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The type in which products of arrays are summed: at least 32 bits wide."""
    dtype = jnp.result_type(*arrays)
    return jnp.promote_types(
        dtype, jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    )


def dot(ring: Ring, x: jax.Array, w: jax.Array, *, along: int = 0) -> jax.Array:
    """x[..., K] · w[K, N] → [..., N] in the sum's type; `along=1` takes w as [N, K]."""
    return _contract(ring, x, w, (x.ndim - 1,), (along,))


def outer(ring: Ring, x: jax.Array, g: jax.Array) -> jax.Array:
    """x[..., K]ᵀ · g[..., N] → [K, N] in the sum's type, summed over all leading dimensions."""
    leading = tuple(range(x.ndim - 1))
    return _contract(ring, x, g, leading, leading)


def _contract(
    ring: Ring, a: jax.Array, b: jax.Array, a_dims: tuple[int, ...], b_dims: tuple[int, ...]
) -> jax.Array:
    dtype = result_dtype(a, b)
    # Alone, a device adds nothing to the product: the hardware's own float32 sum is written in
    # the result's type at once, as `jnp.matmul` has it, without a second pass to cast it.
    sums = dtype if ring.size == 1 else sum_dtype(a, b)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        ((a_dims, b_dims), ((), ())),
        precision=ring.precision,
        preferred_element_type=sums,
    )


def take(array: jax.Array, start: int | jax.Array, size: int, dim: int) -> jax.Array:
    """`size` entries of a dimension from `start`, which may differ between devices."""
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(array, start, size, axis=dim)


def put(array: jax.Array, block: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    """Write a block into a dimension from `start`, cast to the array's type."""
    return lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), start, axis=dim)


def join(blocks: Sequence[jax.Array], dim: int) -> jax.Array:
    """The blocks side by side along a dimension."""
    return blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, dim)
