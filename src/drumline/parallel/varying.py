"""Which mesh axes a value varies over, as `jax.shard_map(..., check_vma=True)` tracks it.

Inside a checked `shard_map` every array's type lists the axes along which devices may hold
different values. The rings need their operands and accumulators to vary over the same axes, and
an all-reduce has to tell the type system that its result is the same everywhere. With
`check_vma=False` nothing is tracked and these functions change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from drumline.parallel.axes import AxisName


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which devices may hold different values of x."""
    return _varying(jax.typeof(x))


def _varying(kind: Any) -> frozenset[str]:
    manual = getattr(kind, "manual_axis_type", None)
    axes = getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return frozenset(axes)


def is_checked(axis_name: AxisName) -> bool:
    """Whether the surrounding `shard_map` tracks the varying axes."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def vary_alike(axis_name: AxisName, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, all typed as varying over the ring's axis and over each other's axes.

    The cast moves nothing. Its transpose sums the gradient over the axes it added, which is what
    data parallelism needs for weights that other axes share.
    """
    axes = varying_axes(lax.axis_index(axis_name)).union(*map(varying_axes, arrays))
    return tuple(_vary_over(axes, array) for array in arrays)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the axes `like` varies over, to start a sum with."""
    return _vary_over(varying_axes(like), jnp.zeros(shape, dtype))


def empty(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Room for an array that varies over the axes `like` varies over, to be written in full."""
    return _vary_over(varying_axes(like), lax.empty(shape, dtype))  # type: ignore[no-untyped-call]


def same_everywhere(axis_name: AxisName, x: jax.Array) -> jax.Array:
    """Declare that x is equal on all devices of the axis, as the result of an all-reduce is.

    It moves nothing: the caller's ring has made it so, or there is one device. In its gradient
    every device's copy takes an equal share. JAX has no cast in this direction, since
    it cannot check it; hence a primitive that is the identity in the compiled program.
    """
    if not is_checked(axis_name):
        return x
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    pattern = _vary_over(varying_axes(x) - names, jnp.zeros(x.shape, x.dtype))
    return _same_everywhere_p.bind(x, pattern)  # type: ignore[no-any-return,no-untyped-call]


def _vary_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# The second operand only lends its type, so that no internals of JAX's types are named here; the
# lowering drops it.
_same_everywhere_p = Primitive("same_everywhere")
_same_everywhere_p.def_abstract_eval(lambda _x, pattern: pattern)  # type: ignore[no-untyped-call]
mlir.register_lowering(_same_everywhere_p, lambda _context, x, _pattern: [x])


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    x, dim = args[0], dims[0]
    assert dim is not None  # the pattern is never batched, so x is
    pattern = jnp.broadcast_to(jnp.expand_dims(args[1], dim), x.shape)
    return _same_everywhere_p.bind(x, pattern), dim  # type: ignore[no-untyped-call]


def _differentiate(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x, pattern), (dx, _) = primals, tangents
    out = _same_everywhere_p.bind(x, pattern)  # type: ignore[no-untyped-call]
    if type(dx) is ad.Zero:
        return out, ad.Zero(jax.typeof(out))
    return out, _same_everywhere_p.bind(dx, pattern)  # type: ignore[no-untyped-call]


def _transpose(cotangent: jax.Array, x: Any, _pattern: jax.Array) -> tuple[jax.Array, None]:
    axes = _varying(x.aval)
    copies = prod(lax.axis_size(axis) for axis in axes - varying_axes(cotangent))
    return _vary_over(axes, cotangent / copies if copies > 1 else cotangent), None


batching.primitive_batchers[_same_everywhere_p] = _batch
ad.primitive_jvps[_same_everywhere_p] = _differentiate
ad.primitive_transposes[_same_everywhere_p] = _transpose
