"""Rows of sums: the device whose bits differ is the one that is found."""

# mypy: allow-untyped-calls

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from drumline.health.emulated import flip_bit, modify_shard
from drumline.train.mesh import make_mesh
from drumline.train.watch.checksums import Replicas, Rows, checksums, compared, layouts
from drumline.train.watch.pulse import pulse
from drumline.train.watch.verdict import Deviation, find, torn

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


def test_what_several_devices_hold_is_told_by_where_it_lies() -> None:
    whole, rows, both = layouts(MESH, [TREE["whole"], TREE["rows"], TREE["both"]])
    ids = sorted(int(device.id) for device in MESH.devices.flat)
    assert [sorted(group) for group in whole.groups] == [ids]
    assert sorted(map(len, rows.groups)) == [2] * 4
    assert not both.replicated
    assert len(compared(MESH, TREE)) == 3


@pytest.mark.parametrize("bit", [0, 77, 400])
@pytest.mark.parametrize("device", [0, 5])
def test_a_flipped_bit_in_a_replica_names_its_device(device: int, bit: int) -> None:
    order = layouts(MESH, TREE)
    good = checksums(MESH, TREE)
    bad = checksums(MESH, lying(TREE, "whole", device, bit))
    culprit = int(MESH.devices.flat[device].id)
    assert not torn(good, order)
    assert find([good, good], order) is None
    assert torn(bad, order)
    assert find([bad], order) == Deviation((culprit,))
    # Of two replicas one is wrong, and it takes other runs to tell which.
    pair = checksums(MESH, lying(TREE, "rows", device, bit % 96))
    found = find([pair], order)
    assert found is not None
    assert found.device is None
    assert find([pair, good, good], order) == Deviation((culprit,))
    # Of what nobody else holds only other runs know.
    alone = checksums(MESH, lying(TREE, "both", device, bit % 96))
    assert not torn(alone, order)
    assert find([alone, good, good], order) == Deviation((culprit,))


def test_what_has_reached_all_accuses_nobody_by_name() -> None:
    order = [Replicas(PartitionSpec(), ((0, 1, 2, 3),))]
    first: Rows = dict.fromkeys(range(4), (b"a",))
    second: Rows = dict.fromkeys(range(4), (b"b",))
    assert find([first, second], order) == Deviation()


def test_every_device_has_the_same_pulse() -> None:
    made, seconds = pulse(MESH, step=1)
    assert len(made) == 8
    assert len(set(made.values())) == 1
    assert len(seconds) == 1
    assert seconds[0] > 0
