"""X"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName
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


def check_weight(caller: str, x: jax.Array, w: jax.Array) -> None:
    """Refuse weights that are not a matrix, and a scalar x."""
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
    """One weight or several as a tuple, each of them checked."""
    weights = tuple(w) if isinstance(w, list | tuple) else (cast(jax.Array, w),)
    if not weights:
        raise ValueError(f"{caller}: w is an empty sequence; give one matrix or more")
    for one in weights:
        if not hasattr(one, "ndim"):
            raise ValueError(f"{caller}: w must be a matrix or several, not {type(one).__name__}")
        check_weight(caller, x, one)
    return weights


def check_wire(caller: str, ring: Ring, x: jax.Array, w: jax.Array) -> None:
    """Refuse a type on the wire that could not hold the sums."""
    if ring.wire_dtype is not None and not jnp.issubdtype(jnp.result_type(x, w), jnp.floating):
        raise ValueError(
            f"{caller}: wire_dtype={ring.wire_dtype} is for sums of floating-point products, "
            f"but x · w is {jnp.result_type(x, w)}; leave it out"
        )


def check_rows(caller: str, x: jax.Array, option: str) -> None:
    """Refuse a vector where rows are asked for."""
    if x.ndim < 2:
        raise ValueError(f"{caller}: {option} needs x as [..., rows, columns], not {x.shape}")


def check_contraction(caller: str, x: jax.Array, w: jax.Array) -> None:
    """Refuse operands that do not multiply on their own device."""
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{caller}: x has {x.shape[-1]} columns on each device, but w has {w.shape[0]} rows"
        )


def check_gathered_columns(caller: str, x: jax.Array, w: jax.Array, ring: Ring) -> None:
    """Refuse weights whose rows are not the columns that all devices bring together."""
    brought = x.shape[-1] * ring.size
    if w.shape[0] != brought:
        raise ValueError(
            f"{caller}: w has {w.shape[0]} rows, but x brings {x.shape[-1]} columns on each of "
            f"the {ring.size} devices of axis {ring.axis_name!r} ({brought} in all)"
        )


class Circle(Protocol):
    """Devices in a circle, and the mesh axis (or axes) that they lie along."""

    @property
    def axis_name(self) -> AxisName:
        """The axis, or axes."""

    @property
    def size(self) -> int:
        """How many devices."""


def check_divides(caller: str, dimension: str, length: int, ring: Circle) -> None:
    """Refuse a dimension that cannot be shared out evenly."""
    if length % ring.size:
        raise ValueError(
            f"{caller}: the {length} {dimension} cannot be divided between "
            f"the {ring.size} devices of axis {ring.axis_name!r}"
        )
