"""X"""

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
    """The arrays, whose tangents cannot be computed on behalf of `caller`, only transposed."""
    return tuple(_reverse_only_p.bind(array, caller=caller) for array in arrays)


def once_only(
    caller: str,
    array: jax.Array,
    *,
    why: str = "its backward pass is a loop that goes round as often as the groups of rows take",
) -> jax.Array:
    """The array, with which the backward pass of `caller` begins and cannot be differentiated."""
    return cast(jax.Array, _once_only_p.bind(array, caller=caller, why=why))


def batch_first(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, with the dimension that `jax.vmap` maps over as the first of each of them."""
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


def _refuse_tangent(*_: Any, caller: str) -> NoReturn:
    raise ValueError(
        f"{caller}: has a gradient (jax.grad, jax.vjp) but no forward mode "
        "(jax.jvp, jax.linearize, jax.jacfwd); use jax.vjp, or jax.jacrev"
    )


_batch_first_p = Primitive("batch_first")
_batch_first_p.multiple_results = True
_batch_first_p.def_impl(lambda *arrays: list(arrays))
_batch_first_p.def_abstract_eval(lambda *arrays: list(arrays))
mlir.register_lowering(_batch_first_p, lambda _context, *arrays: list(arrays))


def _lead(args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[int]]:
    (count,) = {x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None}
    led = [
        jnp.broadcast_to(x, (count, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    return _batch_first_p.bind(*led), [0] * len(led)


def _refuse_once_more(*_: Any, caller: str, why: str) -> NoReturn:
    raise ValueError(f"{caller}: has a gradient but no second derivative; {why}")


ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
ad.deflinear2(_tangent_p, lambda ct, *_, **__: [ct])
_tangent_p.def_impl(_refuse_tangent)
mlir.register_lowering(_tangent_p, _refuse_tangent)
ad.primitive_jvps[_once_only_p] = _refuse_once_more
batching.primitive_batchers[_batch_first_p] = _lead


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
