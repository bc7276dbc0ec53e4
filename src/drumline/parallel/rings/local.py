"""The local operations of the rings: matmuls, slices, and checks of shapes.

Matmuls accumulate in float32 (integers in int32) for any operand types. The rings add in that type
and cast once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.rings.ring import Ring


def result_dtype(x: jax.Array, w: jax.Array) -> jnp.dtype:
    """Return the type of `x @ w`, as for `jnp.matmul`."""
    return jnp.result_type(x, w)


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return the type in which matmuls of these arrays are summed: at least 32 bits wide."""
    dtype = jnp.result_type(*arrays)
    return jnp.promote_types(
        dtype, jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    )


def dot(ring: Ring, x: jax.Array, w: jax.Array, *, w_dim: int = 0) -> jax.Array:
    """Multiply x[..., K] · w[K, N] in the type of the sum; with `w_dim=1`, w is [N, K]."""
    return _contract(ring, x, w, (x.ndim - 1,), (w_dim,))


def outer(ring: Ring, x: jax.Array, g: jax.Array) -> jax.Array:
    """Multiply x[..., K]ᵀ · g[..., N] → [K, N], contracting all leading dimensions."""
    leading = tuple(range(x.ndim - 1))
    return _contract(ring, x, g, leading, leading)


def _contract(
    ring: Ring, a: jax.Array, b: jax.Array, a_dims: tuple[int, ...], b_dims: tuple[int, ...]
) -> jax.Array:
    # On a single device no other terms are added, so the result has its final type at once, as
    # by `jnp.matmul`.
    sums = result_dtype(a, b) if ring.size == 1 else sum_dtype(a, b)
    return contract(a, b, a_dims, b_dims, sums, ring.precision)


def contract(
    a: jax.Array,
    b: jax.Array,
    a_dims: tuple[int, ...],
    b_dims: tuple[int, ...],
    sums: jnp.dtype,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Contract dimensions of a and b, and return the sums in a type."""
    dtype = result_dtype(a, b)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        ((a_dims, b_dims), ((), ())),
        precision=precision,
        preferred_element_type=sums,
    )


def take_slice(array: jax.Array, start: int | jax.Array, size: int, dim: int) -> jax.Array:
    """Slice `size` entries of a dimension from `start`, which may differ between devices."""
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(array, start, size, axis=dim)


def put_slice(array: jax.Array, block: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    """Write a block into a dimension from `start`, cast to the type of the array."""
    return lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), start, axis=dim)


def concat(blocks: Sequence[jax.Array], dim: int) -> jax.Array:
    """Concatenate blocks along a dimension."""
    return blocks[0] if len(blocks) == 1 else lax.concatenate(blocks, dim)


def check_weight(caller: str, x: jax.Array, w: jax.Array) -> None:
    """Raise ValueError unless w is a local matrix and x is not a scalar."""
    if w.ndim != 2:
        raise ValueError(
            f"{caller}: w must be a matrix [rows, columns], but its shape is {w.shape}"
        )
    if x.ndim == 0:
        raise ValueError(f"{caller}: x must have at least one dimension, but it is a scalar")
    for name, array in (("x", x), ("w", w)):
        divided = [axis for axis in getattr(jax.typeof(array).sharding, "spec", ()) if axis]
        if divided:
            raise ValueError(
                f"{caller}: {name} is divided over {divided[0]!r}, an Explicit axis that the "
                "surrounding jax.shard_map is not manual over; make it manual over that axis too, "
                "or give the mesh Auto axes"
            )


def check_weights(
    caller: str, x: jax.Array, w: jax.Array | Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Return the weights as a tuple. Raise ValueError if one is not a matrix."""
    weights = tuple(w) if isinstance(w, list | tuple) else (cast(jax.Array, w),)
    if not weights:
        raise ValueError(f"{caller}: w is an empty sequence; give one matrix or more")
    for weight in weights:
        if not hasattr(weight, "ndim"):
            raise ValueError(
                f"{caller}: w must be a matrix or several, not {type(weight).__name__}"
            )
        check_weight(caller, x, weight)
    return weights


def check_wire_operands(caller: str, ring: Ring, x: jax.Array, w: jax.Array) -> None:
    """Raise ValueError if a floating-point `wire_dtype` is set for integer sums."""
    if ring.wire_dtype is not None and not jnp.issubdtype(jnp.result_type(x, w), jnp.floating):
        raise ValueError(
            f"{caller}: wire_dtype={ring.wire_dtype} is for sums of floating-point products, "
            f"but x · w is {jnp.result_type(x, w)}; leave it out"
        )


def check_rows(caller: str, x: jax.Array, option: str) -> None:
    """Raise ValueError if x has no rows."""
    if x.ndim < 2:
        raise ValueError(f"{caller}: {option} needs x as [..., rows, columns], not {x.shape}")


def check_contraction(caller: str, x: jax.Array, w: jax.Array) -> None:
    """Raise ValueError if the operands do not match on their own device."""
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{caller}: x has {x.shape[-1]} columns on each device, but w has {w.shape[0]} rows"
        )


def check_gathered_columns(caller: str, x: jax.Array, w: jax.Array, ring: Ring) -> None:
    """Raise ValueError if the rows of w are not the gathered columns of x."""
    gathered_columns = x.shape[-1] * ring.size
    if w.shape[0] != gathered_columns:
        raise ValueError(
            f"{caller}: w has {w.shape[0]} rows, but x brings {x.shape[-1]} columns on each of "
            f"the {ring.size} devices of axis {ring.axis_name!r} ({gathered_columns} in all)"
        )


class SizedRing(Protocol):
    """The mesh axis (or axes) of a ring, and its number of devices."""

    @property
    def axis_name(self) -> AxisName:
        """The axis, or axes."""

    @property
    def size(self) -> int:
        """The number of devices."""


def check_divides(caller: str, dimension: str, length: int, ring: SizedRing) -> None:
    """Raise ValueError if the devices do not divide a dimension."""
    if length % ring.size:
        raise ValueError(
            f"{caller}: the {length} {dimension} cannot be divided between "
            f"the {ring.size} devices of axis {ring.axis_name!r}"
        )
