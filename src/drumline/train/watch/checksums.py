"""The bits of arrays as each device holds them: one row of sums for every device.

Unlike the sums of a checkpoint (digest.py), which are of the whole array wherever its parts lie,
these are of each device's own part, computed by that device alone: a program without any exchange,
so that a chip that computes wrong shows in its own row. Only the rows are then exchanged.
"""

# mypy: allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from drumline.train.checkpoints.digest import digest
from drumline.train.state import on_all

Rows = dict[int, tuple[bytes, ...]]
"""Device id → for each layout the sums of what the device holds of the leaves that lie so."""


@dataclass(frozen=True)
class Replicas:
    """Leaves that lie alike, and so have their replicas on the same devices."""

    spec: PartitionSpec
    groups: tuple[tuple[int, ...], ...]
    """Ids of devices that hold the same."""

    @property
    def replicated(self) -> bool:
        """Whether anything of it is held twice."""
        return any(len(group) > 1 for group in self.groups)


def layouts(mesh: Mesh, tree: Any) -> tuple[Replicas, ...]:
    """How the leaves of a tree of arrays, or of shapes with places, lie."""
    specs = dict.fromkeys(_plain(leaf.sharding.spec) for leaf in jax.tree.leaves(tree))
    return tuple(Replicas(spec, _replicas(mesh, spec)) for spec in specs)


def compared(mesh: Mesh, tree: Any) -> list[Any]:
    """The leaves of which there are replicas."""
    held_twice = {layout.spec for layout in layouts(mesh, tree) if layout.replicated}
    return [leaf for leaf in jax.tree.leaves(tree) if _plain(leaf.sharding.spec) in held_twice]


def checksums(mesh: Mesh, tree: Any) -> Rows:
    """The rows of all devices, in the order of `layouts`; all hosts see the same.

    This waits for the devices.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return {int(device.id): () for device in mesh.devices.flat}
    specs = tuple(_plain(leaf.sharding.spec) for leaf in leaves)
    sums = exchanged(mesh, _program(mesh, specs)(leaves))
    return {
        int(device.id): tuple(row[layout].tobytes() for layout in range(row.shape[0]))
        for device, row in zip(mesh.devices.flat, sums, strict=True)
    }


def exchanged(mesh: Mesh, rows: jax.Array) -> np.ndarray:
    """Rows that lie one on each device, in the order of the mesh, as every host sees them."""
    return np.asarray(_gather(mesh)(rows).addressable_data(0))


@lru_cache(maxsize=8)
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=on_all(mesh))


@lru_cache(maxsize=16)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Leaves that lie so → an array of devices × layouts × 2 words."""
    groups = list(dict.fromkeys(specs))

    def of_device(leaves: Sequence[jax.Array]) -> jax.Array:
        words = digest(list(leaves))
        # The order of the leaves matters: two that changed places are no replica.
        odd = 2 * jnp.arange(len(leaves), dtype=jnp.uint32)[:, None] + 1
        member = jnp.asarray([[spec == group for spec in specs] for group in groups], jnp.uint32)
        return (member[:, :, None] * (words * odd)[None]).sum(axis=1, dtype=jnp.uint32)[None]

    every = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            of_device, mesh=mesh, in_specs=(list(specs),), out_specs=every, check_vma=False
        )
    )


def _plain(spec: PartitionSpec) -> PartitionSpec:
    """The same layout in one spelling: without what is divided by nothing at its end."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _replicas(mesh: Mesh, spec: PartitionSpec) -> tuple[tuple[int, ...], ...]:
    named = {axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        at = tuple(i for i, axis in zip(place, mesh.axis_names, strict=True) if axis in named)
        groups.setdefault(at, []).append(int(device.id))
    return tuple(tuple(sorted(group)) for group in groups.values())
