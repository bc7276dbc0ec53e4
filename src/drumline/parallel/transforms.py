"""Limits of function transformations, and tracing without a mesh.

A function with its own gradient (`jax.custom_vjp`) has no forward mode, and JAX's error for that
depends on the call. The marks here are identities that cost nothing in the compiled program.
`reverse_only` passes tangents on if they are transposed later, and raises an error if they are
computed. `once_only` raises an error if it is differentiated. `batch_first` moves the dimension
that `jax.vmap` adds to the front, where some primitives of JAX need it.

`trace_without_mesh` makes kernels from JAX usable under a checked `shard_map`. There a kernel must
name the axes its results vary over, and JAX's kernels name none. The context of a trace is
thread-local, so a trace in another thread is not checked. Its results carry no axes, so the caller
adds those of the operands and defines the gradient.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def reverse_only(caller: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, marked so that `caller` has no forward mode."""
    return tuple(_reverse_only_p.bind(array, caller=caller) for array in arrays)


def once_only(
    caller: str,
    array: jax.Array,
    *,
    reason: str = "its backward pass is a loop whose length depends on the data",
) -> jax.Array:
    """Return the array, marked so that the backward pass of `caller` has no derivative."""
    return cast(jax.Array, _once_only_p.bind(array, caller=caller, why=reason))


def batch_first(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, with the dimension that `jax.vmap` maps over moved to the front."""
    return tuple(_batch_first_p.bind(*arrays))


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda _context, x, **_: [x])

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(args[0], **params), dims[0]

    batching.primitive_batchers[primitive] = batch
    return primitive


_reverse_only_p = _identity("reverse_only")
_tangent_p = _identity("reverse_only_tangent")
_once_only_p = _identity("once_only")


def _reverse_only_jvp(primals: Any, tangents: Any, *, caller: str) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    out = _reverse_only_p.bind(x, caller=caller)
    if type(dx) is ad.Zero:
        return out, dx
    return out, _tangent_p.bind(dx, caller=caller)


def _raise_no_forward_mode(*_: Any, caller: str) -> NoReturn:
    raise ValueError(
        f"{caller}: has a gradient (jax.grad, jax.vjp) but no forward mode "
        "(jax.jvp, jax.linearize, jax.jacfwd); use jax.vjp, or jax.jacrev"
    )


_batch_first_p = Primitive("batch_first")
_batch_first_p.multiple_results = True
_batch_first_p.def_impl(lambda *arrays: list(arrays))
_batch_first_p.def_abstract_eval(lambda *arrays: list(arrays))
mlir.register_lowering(_batch_first_p, lambda _context, *arrays: list(arrays))


def _move_batch_first(args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[int]]:
    (count,) = {x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None}
    moved = [
        jnp.broadcast_to(x, (count, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    return _batch_first_p.bind(*moved), [0] * len(moved)


def _raise_no_second_derivative(*_: Any, caller: str, why: str) -> NoReturn:
    raise ValueError(f"{caller}: has a gradient but no second derivative; {why}")


ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
ad.deflinear2(_tangent_p, lambda ct, *_, **__: [ct])
_tangent_p.def_impl(_raise_no_forward_mode)
mlir.register_lowering(_tangent_p, _raise_no_forward_mode)
ad.primitive_jvps[_once_only_p] = _raise_no_second_derivative
batching.primitive_batchers[_batch_first_p] = _move_batch_first


class ArrayType(NamedTuple):
    """The shape and type of an array, without its sharding."""

    shape: tuple[int, ...]
    dtype: Any

    @staticmethod
    def of(x: Any) -> ArrayType:
        """Return the type of an array or of a `ShapeDtypeStruct`."""
        return ArrayType(tuple(x.shape), x.dtype)


class Traced(NamedTuple):
    """A traced function of arrays."""

    call: Callable[..., list[jax.Array]]
    """The function: takes arrays of the traced types, returns the leaves of the result."""
    result: Any
    """A tree like the result, with the type of each leaf."""


def trace_without_mesh(function: Callable[..., Any], *types: ArrayType) -> Traced:
    """Trace a function of arrays of the given types outside of any mesh."""

    def trace() -> Traced:
        structs: list[Any] = [_struct(array_type.shape, array_type.dtype) for array_type in types]
        closed, result = jax.make_jaxpr(function, return_shape=True)(*structs)
        return Traced(jaxpr_as_fun(closed), result)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(trace).result()


_struct: Any = jax.ShapeDtypeStruct
