"""Checksums of devices: a device with different bits is found."""

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


def placed(*spec: Any, shape: tuple[int, ...] = (8, 6), seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    array: jax.Array = jax.device_put(values, NamedSharding(MESH, PartitionSpec(*spec)))
    return array


TREE = {
    "whole": placed(),
    "rows": placed("data", seed=1),
    "both": placed("data", "model", seed=2),
    "small": placed(shape=(), seed=3),
}


def lying(tree: dict[str, jax.Array], name: str, device: int, bit: int) -> dict[str, jax.Array]:
    """One bit of what one device holds is another."""
    bad = modify_shard(tree[name], MESH.devices.flat[device], lambda values: flip_bit(values, bit))
    return {**tree, name: bad}


def test_replica_groups_follow_from_the_sharding() -> None:
    whole, rows, both = replica_groups(MESH, [TREE["whole"], TREE["rows"], TREE["both"]])
    ids = sorted(int(device.id) for device in MESH.devices.flat)
    assert [sorted(group) for group in whole.groups] == [ids]
    assert sorted(map(len, rows.groups)) == [2] * 4
    assert not both.replicated
    assert len(replicated_leaves(MESH, TREE)) == 3


@pytest.mark.parametrize("bit", [0, 77, 400])
@pytest.mark.parametrize("device", [0, 5])
def test_a_flipped_bit_in_a_replica_is_traced_to_its_device(device: int, bit: int) -> None:
    order = replica_groups(MESH, TREE)
    good = device_checksums(MESH, TREE)
    bad = device_checksums(MESH, lying(TREE, "whole", device, bit))
    culprit = int(MESH.devices.flat[device].id)
    assert not replicas_differ(good, order)
    assert find_deviation([good, good], order) is None
    assert replicas_differ(bad, order)
    assert find_deviation([bad], order) == Deviation((culprit,))
    # Of two replicas one is wrong, and it takes other runs to tell which.
    pair = device_checksums(MESH, lying(TREE, "rows", device, bit % 96))
    deviation = find_deviation([pair], order)
    assert deviation is not None
    assert deviation.device is None
    assert find_deviation([pair, good, good], order) == Deviation((culprit,))
    # Of what nobody else holds only other runs know.
    alone = device_checksums(MESH, lying(TREE, "both", device, bit % 96))
    assert not replicas_differ(alone, order)
    assert find_deviation([alone, good, good], order) == Deviation((culprit,))


def test_an_error_on_all_devices_names_no_device() -> None:
    order = [ReplicaGroups(PartitionSpec(), ((0, 1, 2, 3),))]
    first: DeviceChecksums = dict.fromkeys(range(4), (b"a",))
    second: DeviceChecksums = dict.fromkeys(range(4), (b"b",))
    assert find_deviation([first, second], order) == Deviation()


def test_every_device_has_the_same_probe_checksum() -> None:
    made, seconds = probe_devices(MESH, step=1)
    assert len(made) == 8
    assert len(set(made.values())) == 1
    assert len(seconds) == 1
    assert seconds[0] > 0
