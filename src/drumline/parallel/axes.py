"""Mesh axes inside `jax.shard_map`: their devices, their order, and the axes a value varies over.

A tuple of axes numbers its devices in the order of the tuple, the last axis fastest.
`PartitionSpec`, `lax.axis_index`, and the gathering and scattering collectives follow this order.
Only `lax.ppermute` numbers devices in the order of the mesh: silently before JAX 0.12, and with an
error since then. `AxisOrder` converts between the two.

Inside a checked `shard_map` the type of an array lists the axes along which devices may hold
different values. Rings need operands and accumulators that vary over the same axes, and an
all-reduce must declare that its result is equal on all devices. With `check_vma=False` these
functions have no effect.
"""

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


def as_axis_tuple(axis_name: AxisName) -> tuple[str, ...]:
    """Return the axes as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def devices_along(caller: str, axis_name: AxisName) -> int:
    """Return the number of devices along one or several axes. Raise ValueError for a missing axis.

    Args:
        caller: the name of the calling function, for messages.
        axis_name: the mesh axis or axes. Inside `jax.shard_map` they must be manual.
    """
    names = as_axis_tuple(axis_name)
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{caller}: axis_name {axis_name!r} has {name!r} twice")
    return prod(_devices(caller, name) for name in names)


def _devices(caller: str, name: str) -> int:
    try:
        return int(lax.axis_size(name))
    except NameError:
        pass
    mesh = jax.sharding.get_abstract_mesh()
    manual_axes = [
        axis
        for axis, array_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if array_type == AxisType.Manual
    ]
    if not manual_axes:
        raise ValueError(
            f"{caller}: there is no mesh axis {name!r} outside jax.shard_map; "
            "call it inside, or drumline.parallel.einsum outside"
        )
    raise ValueError(
        f"{caller}: axis {name!r} is not manual here, but {', '.join(map(repr, manual_axes))}; "
        "name one of these, or make jax.shard_map manual over it too"
    )


@dataclass(frozen=True)
class AxisOrder:
    """The order of some mesh axes: in the argument, and on the mesh."""

    names: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(caller: str, axis_name: AxisName) -> AxisOrder:
        """The order of some axes on the mesh of the surrounding `jax.shard_map`."""
        names = as_axis_tuple(axis_name)
        mesh = jax.sharding.get_abstract_mesh().axis_names
        for name in names:
            if len(names) > 1 and name not in mesh:
                raise ValueError(
                    f"{caller}: axis_name {axis_name!r} has {name!r}, no axis of the mesh; "
                    "a ring over several axes needs all of them to be"
                )
        mesh_order = sorted(names, key=mesh.index) if len(names) > 1 else names
        return AxisOrder(names, tuple((name, int(lax.axis_size(name))) for name in mesh_order))

    def path(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Sources and targets as `lax.ppermute` numbers them, from those by `lax.axis_index`."""
        axes = [name for name, _ in self.sizes]
        indices = np.arange(prod(size for _, size in self.sizes))
        indices = indices.reshape([size for _, size in self.sizes])
        indices = indices.transpose([axes.index(name) for name in self.names]).reshape(-1)
        return [(int(indices[source]), int(indices[target])) for source, target in pairs]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in the mesh's order."""
        return tuple(name for name, _ in self.sizes)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which devices may hold different values of x."""
    return _varying(jax.typeof(x))


def _varying(array_type: Any) -> frozenset[str]:
    manual = getattr(array_type, "manual_axis_type", None)
    axes = getattr(array_type, "vma", frozenset()) if manual is None else manual.varying
    return frozenset(axes)


def is_checked(axis_name: AxisName) -> bool:
    """Return True if the surrounding `shard_map` tracks the varying axes."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def match_varying_on(axis_name: AxisName, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays typed as varying over the ring's axis and all axes of the others.

    The cast moves no data. Its transpose sums the gradient over the added axes, which data
    parallelism needs for shared weights.
    """
    axes = varying_axes(lax.axis_index(axis_name)).union(*map(varying_axes, arrays))
    return tuple(_vary_over(axes, array) for array in arrays)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Return zeros that vary over the same axes as `like`."""
    return _vary_over(varying_axes(like), jnp.zeros(shape, dtype))


def empty(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Return an uninitialized array that varies over the same axes as `like`."""
    return _vary_over(varying_axes(like), lax.empty(shape, dtype))  # type: ignore[no-untyped-call]


def same_everywhere(axis_name: AxisName, x: jax.Array) -> jax.Array:
    """Declare that x is equal on all devices of the axis, as after an all-reduce.

    The caller guarantees the equality. In the gradient, the copies of the devices get equal shares.
    JAX has no such cast, because it cannot check it, so this is a primitive that compiles to the
    identity.
    """
    if not is_checked(axis_name):
        return x
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    type_like = _vary_over(varying_axes(x) - names, jnp.zeros(x.shape, x.dtype))
    return _same_everywhere_p.bind(x, type_like)  # type: ignore[no-any-return,no-untyped-call]


def _vary_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# The second operand only provides the type, which avoids JAX's internal types. The
# lowering drops it.
_same_everywhere_p = Primitive("same_everywhere")
_same_everywhere_p.def_abstract_eval(lambda _x, type_like: type_like)  # type: ignore[no-untyped-call]
mlir.register_lowering(_same_everywhere_p, lambda _context, x, _pattern: [x])


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    x, dim = args[0], dims[0]
    assert dim is not None  # the pattern is never batched, so x is
    type_like = jnp.broadcast_to(jnp.expand_dims(args[1], dim), x.shape)
    return _same_everywhere_p.bind(x, type_like), dim  # type: ignore[no-untyped-call]


def _differentiate(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x, type_like), (dx, _) = primals, tangents
    out = _same_everywhere_p.bind(x, type_like)  # type: ignore[no-untyped-call]
    if type(dx) is ad.Zero:
        return out, ad.Zero(jax.typeof(out))
    return out, _same_everywhere_p.bind(dx, type_like)  # type: ignore[no-untyped-call]


def _transpose(cotangent: jax.Array, x: Any, _pattern: jax.Array) -> tuple[jax.Array, None]:
    axes = _varying(x.aval)
    copies = prod(lax.axis_size(axis) for axis in axes - varying_axes(cotangent))
    return _vary_over(axes, cotangent / copies if copies > 1 else cotangent), None


batching.primitive_batchers[_same_everywhere_p] = _batch
ad.primitive_jvps[_same_everywhere_p] = _differentiate
ad.primitive_transposes[_same_everywhere_p] = _transpose
