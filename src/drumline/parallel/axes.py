"""Mesh axes as the code of one device sees them: whether they are there, and in which order.

A tuple of axes numbers its devices in the order in which it names them, the last axis fastest:
`PartitionSpec`, `lax.axis_index` and the collectives that gather and scatter agree on that.
`lax.ppermute` alone numbers devices in the order of the mesh, however the axes are named: before
JAX 0.12 without a word, since then with a refusal. `Order` leads from the one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from jax import lax
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
