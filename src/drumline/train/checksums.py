"""Checksums over the bits of arrays: of whole arrays, and of the part on each device.

The checksum of a whole array (`digest`) does not depend on its sharding. Each element is mixed with
its index, and all are added modulo 2³², so any order of additions, mesh or number of hosts gives
the same sum. It is computed where the arrays are. So a checkpoint is verified from the memory
before it was written to the memory after it was read.

The checksums of each device (`device_checksums`) cover only the part on that device, and the device
computes them itself. So a chip that computes wrong results changes only its own row. Afterwards the
rows are gathered and compared.
"""

# mypy: allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drumline.health.replicas import ReplicaComparison, compare_replicas
from drumline.train.state import replicated

# Whole arrays -------------------------------------------------------------------------------------


def digest(leaves: list[jax.Array]) -> jax.Array:
    """Return two 32-bit sums for each array."""
    return jnp.stack([jnp.stack(_sums(_to_words(leaf))) for leaf in leaves])


def fingerprint(tree: Any) -> str:
    """Return 16 hex digits that are equal for two trees only if all their bits are."""
    leaves = jax.tree.leaves(tree)
    sharding = getattr(leaves[0], "sharding", None)
    # With several hosts every host needs the full sums.
    output = replicated(sharding.mesh) if isinstance(sharding, NamedSharding) else None
    words = np.asarray(jax.jit(_fold, out_shardings=output)(leaves).addressable_data(0))
    return "".join(f"{int(word):08x}" for word in words)


def _fold(leaves: list[jax.Array]) -> jax.Array:
    """Return the sums of the digest, so that the order of the arrays matters."""
    return jnp.stack(_sums(digest(leaves)))


def _sums(words: Any) -> tuple[Any, Any]:
    """Return two sums over words that are mixed with their indices.

    At a given index both sums use a bijection of the word. So a single changed word always changes
    the sums, and several changed words cancel with a probability of 2⁻⁶⁴.
    """
    index = np.zeros((), np.uint32)
    for dimension, size in enumerate(words.shape):
        shape = [1] * words.ndim
        shape[dimension] = size
        iota = lax.broadcasted_iota(np.uint32, shape, dimension)
        index = index * np.uint32(size % 2**32) + iota
    index = index * np.uint32(0x9E3779B1) + np.uint32(0x243F6A88)
    mixed = (words ^ index) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(15))
    # A single pass for both sums is several times as fast on a CPU.
    operands = (mixed, mixed * (index | np.uint32(1)))
    zeros = (np.uint32(0), np.uint32(0))
    sums: tuple[Any, Any] = lax.reduce(operands, zeros, _add, tuple(range(words.ndim)))
    return sums


def _add(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    return left[0] + right[0], left[1] + right[1]


def _to_words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as 32-bit words. Narrower types are widened, wider ones split."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    size = leaf.dtype.itemsize
    if size >= 4:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    return lax.bitcast_convert_type(leaf, f"uint{8 * size}").astype(jnp.uint32)


# The part on each device --------------------------------------------------------------------------

DeviceChecksums = dict[int, tuple[bytes, ...]]
"""The checksums of the arrays on each device, by device id, in the order of `replica_groups`."""


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of devices that have the same part of the arrays with this sharding."""

    spec: PartitionSpec
    groups: tuple[tuple[int, ...], ...]
    """Device ids. The devices of a group should have equal bits."""

    @property
    def replicated(self) -> bool:
        """True if any part is on more than one device."""
        return any(len(group) > 1 for group in self.groups)


def replica_groups(mesh: Mesh, tree: Any) -> tuple[ReplicaGroups, ...]:
    """Return the replica groups of each sharding in a tree of arrays or of shapes."""
    specs = dict.fromkeys(_normalize(leaf.sharding.spec) for leaf in jax.tree.leaves(tree))
    return tuple(ReplicaGroups(spec, _group_devices(mesh, spec)) for spec in specs)


def replicated_leaves(mesh: Mesh, tree: Any) -> list[Any]:
    """Return the leaves of a tree that have replicas."""
    specs = {groups.spec for groups in replica_groups(mesh, tree) if groups.replicated}
    return [leaf for leaf in jax.tree.leaves(tree) if _normalize(leaf.sharding.spec) in specs]


def device_checksums(mesh: Mesh, tree: Any) -> DeviceChecksums:
    """Return the checksums of all devices, in the order of `replica_groups`.

    All hosts get the same. This waits for the devices.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return {int(device.id): () for device in mesh.devices.flat}
    specs = tuple(_normalize(leaf.sharding.spec) for leaf in leaves)
    rows = gather_rows(mesh, _checksum_program(mesh, specs)(leaves))
    return {
        int(device.id): tuple(row[index].tobytes() for index in range(row.shape[0]))
        for device, row in zip(mesh.devices.flat, rows, strict=True)
    }


def gather_rows(mesh: Mesh, rows: jax.Array) -> np.ndarray:
    """Gather the rows of all devices on every host, in the order of the mesh."""
    return np.asarray(_gather_program(mesh)(rows).addressable_data(0))


@lru_cache(maxsize=8)
def _gather_program(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=replicated(mesh))


@lru_cache(maxsize=16)
def _checksum_program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return a function from leaves with these specs to an array of devices × specs × 2 words."""
    unique_specs = list(dict.fromkeys(specs))

    def checksum(leaves: Sequence[jax.Array]) -> jax.Array:
        words = digest(list(leaves))
        # The weights depend on the order, so that swapped leaves are not equal.
        weights = 2 * jnp.arange(len(leaves), dtype=jnp.uint32)[:, None] + 1
        member = jnp.asarray(
            [[spec == leaf for leaf in specs] for spec in unique_specs], jnp.uint32
        )
        return (member[:, :, None] * (words * weights)[None]).sum(axis=1, dtype=jnp.uint32)[None]

    per_device = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            checksum, mesh=mesh, in_specs=(list(specs),), out_specs=per_device, check_vma=False
        )
    )


def _normalize(spec: PartitionSpec) -> PartitionSpec:
    """Return the same sharding without unsharded dimensions at its end."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _group_devices(mesh: Mesh, spec: PartitionSpec) -> tuple[tuple[int, ...], ...]:
    axes = {axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for coordinates, device in np.ndenumerate(mesh.devices):
        names = zip(coordinates, mesh.axis_names, strict=True)
        shard = tuple(coordinate for coordinate, axis in names if axis in axes)
        groups.setdefault(shard, []).append(int(device.id))
    return tuple(tuple(sorted(group)) for group in groups.values())


# Deviations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deviation:
    """A difference between checksums that should be equal."""

    devices: tuple[int, ...] = ()
    """The ids of the deviating devices. Empty if the majority does not single any out."""

    @property
    def device(self) -> int | None:
        """The deviating device, or None if there are several or none."""
        return self.devices[0] if len(self.devices) == 1 else None


def replicas_differ(checksums: DeviceChecksums, groups: Sequence[ReplicaGroups]) -> bool:
    """Return True if replicas of the same array differ."""
    return any(_compare([checksums], index, group) for index, group in enumerate(groups))


def find_deviation(
    runs: Sequence[DeviceChecksums], groups: Sequence[ReplicaGroups]
) -> Deviation | None:
    """Compare runs that should be bit-identical. Return None if all of them agree.

    First compare the replicas within each run, even if the runs differ from each other: gradients
    soon carry the error of one chip to all others, and then no two runs agree. Compare across runs
    only if no single run has a majority.
    """
    indexed = list(enumerate(groups))
    within_runs = [_compare([run], index, group) for run in runs for index, group in indexed]
    across_runs = [_compare(runs, index, group) for index, group in indexed]
    if not any(within_runs) and not any(across_runs):
        return None
    for comparisons in (within_runs, across_runs):
        devices = sorted({device for comparison in comparisons for device in comparison.devices})
        if devices:
            return Deviation(tuple(devices))
    return Deviation()


def compare_repeats(
    runs: Sequence[DeviceChecksums], groups: Sequence[ReplicaGroups]
) -> Deviation | None:
    """Compare repeats of one computation. Return None if they agree, even if replicas differ."""
    return None if all(run == runs[0] for run in runs) else find_deviation(runs, groups)


def without_replicas(groups: ReplicaGroups) -> ReplicaGroups:
    """Put each device in its own group, for a program that lets its replicas diverge."""
    single = tuple((device,) for group in groups.groups for device in group)
    return replace(groups, groups=single)


def _compare(
    runs: Sequence[DeviceChecksums], index: int, groups: ReplicaGroups
) -> ReplicaComparison:
    values = [{device: row[index] for device, row in run.items()} for run in runs]
    return compare_replicas(values, groups.groups)
