"""Checksums find a device with different bits."""

# mypy: allow-untyped-calls

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from drumline.health.emulated import flip_bit, modify_shard
from drumline.train.checksums import (
    Deviation,
    DeviceChecksums,
    ReplicaGroups,
    device_checksums,
    find_deviation,
    replica_groups,
    replicas_differ,
    replicated_leaves,
)
from drumline.train.mesh import make_mesh
from drumline.train.probe import probe_devices

MESH = make_mesh({"data": 4, "model": 2})


def sharded(*spec: Any, shape: tuple[int, ...] = (8, 6), seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    array: jax.Array = jax.device_put(values, NamedSharding(MESH, PartitionSpec(*spec)))
    return array


TREE = {
    "whole": sharded(),
    "rows": sharded("data", seed=1),
    "both": sharded("data", "model", seed=2),
    "small": sharded(shape=(), seed=3),
}


def with_flipped_bit(
    tree: dict[str, jax.Array], name: str, device: int, bit: int
) -> dict[str, jax.Array]:
    """Return the tree with one flipped bit on one device."""
    faulty = modify_shard(
        tree[name], MESH.devices.flat[device], lambda values: flip_bit(values, bit)
    )
    return {**tree, name: faulty}


def test_replica_groups_follow_from_the_sharding() -> None:
    replicated, rows, fully_sharded = replica_groups(
        MESH, [TREE["whole"], TREE["rows"], TREE["both"]]
    )
    ids = sorted(int(device.id) for device in MESH.devices.flat)
    assert [sorted(group) for group in replicated.groups] == [ids]
    assert sorted(map(len, rows.groups)) == [2] * 4
    assert not fully_sharded.replicated
    assert len(replicated_leaves(MESH, TREE)) == 3


@pytest.mark.parametrize("bit", [0, 77, 400])
@pytest.mark.parametrize("device", [0, 5])
def test_a_flipped_bit_in_a_replica_is_traced_to_its_device(device: int, bit: int) -> None:
    order = replica_groups(MESH, TREE)
    correct = device_checksums(MESH, TREE)
    faulty = device_checksums(MESH, with_flipped_bit(TREE, "whole", device, bit))
    faulty_id = int(MESH.devices.flat[device].id)
    assert not replicas_differ(correct, order)
    assert find_deviation([correct, correct], order) is None
    assert replicas_differ(faulty, order)
    assert find_deviation([faulty], order) == Deviation((faulty_id,))
    # Two replicas do not show the wrong one. Other runs do.
    two_replicas = device_checksums(MESH, with_flipped_bit(TREE, "rows", device, bit % 96))
    deviation = find_deviation([two_replicas], order)
    assert deviation is not None
    assert deviation.device is None
    assert find_deviation([two_replicas, correct, correct], order) == Deviation((faulty_id,))
    # An error in an array without replicas shows only in a comparison with other runs.
    without_replicas = device_checksums(MESH, with_flipped_bit(TREE, "both", device, bit % 96))
    assert not replicas_differ(without_replicas, order)
    assert find_deviation([without_replicas, correct, correct], order) == Deviation((faulty_id,))


def test_an_error_on_all_devices_names_no_device() -> None:
    order = [ReplicaGroups(PartitionSpec(), ((0, 1, 2, 3),))]
    first: DeviceChecksums = dict.fromkeys(range(4), (b"a",))
    second: DeviceChecksums = dict.fromkeys(range(4), (b"b",))
    assert find_deviation([first, second], order) == Deviation()


def test_every_device_has_the_same_probe_checksum() -> None:
    checksums, seconds = probe_devices(MESH, step=1)
    assert len(checksums) == 8
    assert len(set(checksums.values())) == 1
    assert len(seconds) == 1
    assert seconds[0] > 0
