"""Typed wrappers of JAX functions that have no types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.transforms import batch_first

T = TypeVar("T")


def psum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`lax.psum`."""
    return cast(jax.Array, lax.psum(x, axis_name))  # type: ignore[no-untyped-call]


def pmean(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`lax.pmean`."""
    return cast(jax.Array, lax.pmean(x, axis_name))  # type: ignore[no-untyped-call]


def pmax(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`lax.pmax`."""
    return cast(jax.Array, lax.pmax(x, axis_name))  # type: ignore[no-untyped-call]


def psum_scatter(x: jax.Array, axis_name: AxisName, dimension: int = 0) -> jax.Array:
    """`lax.psum_scatter`, tiled."""
    scattered = lax.psum_scatter(  # type: ignore[no-untyped-call]
        x, axis_name, scatter_dimension=dimension, tiled=True
    )
    return cast(jax.Array, scattered)


def by_platform(*operands: Any, default: Callable[..., T], **others: Callable[..., T]) -> T:
    """Call `lax.platform_dependent`: the platform is known when the program is lowered.

    Every branch is traced each time, so pass only the platforms that differ.
    """
    return cast(T, lax.platform_dependent(*operands, default=default, **others))


def array_type(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array | None = None
) -> jax.ShapeDtypeStruct:
    """Return the type of an array, varying over the mesh as `like` does."""
    kind = None if like is None else jax.typeof(like)
    manual = getattr(kind, "manual_axis_type", None)  # `vma` in other versions
    options: dict[str, Any] = {}
    if manual is not None and manual.varying:
        options = {"manual_axis_type": manual}
    elif getattr(kind, "vma", None):
        options = {"vma": getattr(kind, "vma", None)}
    return jax.ShapeDtypeStruct(shape, dtype, **options)  # type: ignore[no-untyped-call]


def all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`lax.all_to_all` of rows, tiled."""
    moved = lax.all_to_all(x, axis_name, 0, 0, tiled=True)  # type: ignore[no-untyped-call]
    return cast(jax.Array, moved)


def ragged_all_to_all(*operands: jax.Array, axis_name: AxisName) -> jax.Array:
    """`lax.ragged_all_to_all`."""
    moved = lax.ragged_all_to_all(  # type: ignore[no-untyped-call]
        *batch_first(*operands), axis_name=axis_name
    )
    return cast(jax.Array, moved)


def fori_loop(upper: jax.Array, body: Callable[[jax.Array, T], T], start: T) -> T:
    """`lax.fori_loop` from zero."""
    return cast(T, lax.fori_loop(0, upper, body, start))
