"""Kernels that JAX ships, made fit for a `shard_map` that checks what varies.

There a kernel has to name the mesh axes its results vary over, and those in JAX name none. What
surrounds a trace belongs to its thread: traced in another, nothing asks. The results carry no axes
then, so whoever calls gives them those of the operands, and a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun


class ArrayType(NamedTuple):
    """The type of an array without its place on a mesh."""

    shape: tuple[int, ...]
    dtype: Any

    @staticmethod
    def of(x: Any) -> ArrayType:
        """The type of an array, or of what stands for one."""
        return ArrayType(tuple(x.shape), x.dtype)


class Traced(NamedTuple):
    """A function of arrays, traced."""

    call: Callable[..., list[jax.Array]]
    """Takes arrays of the types it was traced with; returns the leaves of the result."""
    result: Any
    """A tree like the result, with the type of each leaf."""


def traced_apart(function: Callable[..., Any], *types: ArrayType) -> Traced:
    """Trace a function of arrays of these types, away from any mesh."""

    def trace() -> Traced:
        structs: list[Any] = [_struct(one.shape, one.dtype) for one in types]
        closed, result = jax.make_jaxpr(function, return_shape=True)(*structs)
        return Traced(jaxpr_as_fun(closed), result)

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(trace).result()


_struct: Any = jax.ShapeDtypeStruct
