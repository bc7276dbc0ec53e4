"""X"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

AxisName = str | tuple[str, ...]


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """The axes one by one."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def devices_along(caller: str, axis_name: AxisName) -> int:
    """How many devices an axis has, or several together, refused in one sentence if it is not here.

    Args:
        caller: the function that needs it.
        axis_name: the mesh axis or axes; inside `jax.shard_map` they are to be manual.
    """
    names = names_of(axis_name)
    for at, name in enumerate(names):
        if name in names[:at]:
            raise ValueError(f"{caller}: axis_name {axis_name!r} has {name!r} twice")
    return prod(_devices(caller, name) for name in names)


def _devices(caller: str, name: str) -> int:
    try:
        return int(lax.axis_size(name))
    except NameError:
        pass
    mesh = jax.sharding.get_abstract_mesh()
    here = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    ]
    if not here:
        raise ValueError(
            f"{caller}: there is no mesh axis {name!r} outside jax.shard_map; "
            "call it inside, or drumline.parallel.einsum outside"
        )
    raise ValueError(
        f"{caller}: axis {name!r} is not manual here, but {', '.join(map(repr, here))}; "
        "name one of these, or make jax.shard_map manual over it too"
    )


@dataclass(frozen=True)
class Order:
    """Several axes of a mesh, in the order they are named and in the order the mesh has them.

    Attributes:
        named: the axes as the caller names them.
        sizes: the same axes in the mesh's order, each with its number of devices.
    """

    named: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(caller: str, axis_name: AxisName) -> Order:
        """The order of some axes on the mesh of the surrounding `jax.shard_map`."""
        named = names_of(axis_name)
        mesh = jax.sharding.get_abstract_mesh().axis_names
        for name in named:
            if len(named) > 1 and name not in mesh:
                raise ValueError(
                    f"{caller}: axis_name {axis_name!r} has {name!r}, no axis of the mesh; "
                    "a ring over several axes needs all of them to be"
                )
        ordered = sorted(named, key=mesh.index) if len(named) > 1 else named
        return Order(named, tuple((name, int(lax.axis_size(name))) for name in ordered))

    def path(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Sources and targets as `lax.ppermute` numbers them, from those by `lax.axis_index`."""
        axes = [name for name, _ in self.sizes]
        numbers = np.arange(prod(size for _, size in self.sizes))
        numbers = numbers.reshape([size for _, size in self.sizes])
        numbers = numbers.transpose([axes.index(name) for name in self.named]).reshape(-1)
        return [(int(numbers[source]), int(numbers[target])) for source, target in pairs]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in the mesh's order."""
        return tuple(name for name, _ in self.sizes)


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
