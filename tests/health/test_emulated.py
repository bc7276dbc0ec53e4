"""An emulated chip lies as its machine's file says, on its own device alone, and soon."""

# mypy: allow-untyped-calls

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drumline.health.emulated import as_computed, as_sent, fault_here

ENOUGH = 4


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRUMLINE_EMULATED", "1")
    monkeypatch.setenv("DRUMLINE_MACHINE", str(tmp_path))
    return tmp_path


def broken(machine: Path, how: str, **more: int) -> None:
    (machine / "fault.json").write_text(json.dumps({"how": how, "chip": 2, "seed": 7, **more}))


def values(spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    laid: jax.Array = jax.device_put(jnp.arange(64, dtype=dtype), NamedSharding(mesh, spec))
    return laid


def wrong_on(before: jax.Array, after: jax.Array) -> dict[int, int]:
    """How many bits differ on each device."""
    found = {}
    for was, now in zip(before.addressable_shards, after.addressable_shards, strict=True):
        pair = (np.asarray(was.data).view(np.uint8), np.asarray(now.data).view(np.uint8))
        found[was.device.id] = int(np.bitwise_count(pair[0] ^ pair[1]).sum())
    return found


def test_sound_machines_tell_the_truth(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"x": values(PartitionSpec("d"))}
    assert fault_here() is None
    assert as_computed(arrays) is arrays
    broken(machine, "lies")
    assert fault_here() is not None
    monkeypatch.delenv("DRUMLINE_EMULATED")
    assert fault_here() is None
    assert as_computed(arrays) is arrays


@pytest.mark.parametrize("spec", [PartitionSpec("d"), PartitionSpec()])
def test_one_bit_changes_on_the_lying_device_alone_and_soon(
    machine: Path, spec: PartitionSpec
) -> None:
    broken(machine, "lies")
    before = values(spec)
    wrong = [wrong_on(before, as_computed(before)) for _ in range(12)]
    struck = [found for found in wrong if any(found.values())]
    assert any(any(found.values()) for found in wrong[:ENOUGH])
    assert 1 < len(struck) < 12
    assert all(found == {0: 0, 1: 0, 2: 1, 3: 0} for found in struck)


def test_nan_comes_into_floats_only(machine: Path) -> None:
    broken(machine, "nan")
    tree = {"i": values(PartitionSpec(), jnp.int32), "x": values(PartitionSpec())}
    seen = [as_computed(tree) for _ in range(ENOUGH)]
    assert any(np.isnan(np.asarray(one["x"].addressable_shards[2].data)).any() for one in seen)
    assert all(one["i"] is tree["i"] for one in seen)


def test_a_bad_link_shows_in_what_was_sent(machine: Path) -> None:
    broken(machine, "bad-link")
    before = values(PartitionSpec("d"))
    assert all(as_computed(before) is before for _ in range(ENOUGH))
    assert any(wrong_on(before, as_sent(before))[2] for _ in range(ENOUGH))


def test_a_fault_begins_at_its_step_and_stays(machine: Path) -> None:
    broken(machine, "lies", from_step=100)
    before = values(PartitionSpec("d"))
    assert all(as_computed(before, step=99) is before for _ in range(ENOUGH))
    assert all(as_computed(before) is before for _ in range(ENOUGH))
    assert not (machine / "began").exists()
    assert any(wrong_on(before, as_computed(before, step=100))[2] for _ in range(ENOUGH))
    assert (machine / "began").exists()
    assert any(wrong_on(before, as_computed(before))[2] for _ in range(ENOUGH))


def test_a_running_program_can_be_broken_and_healed(machine: Path) -> None:
    broken(machine, "nan")
    os.utime(machine / "fault.json", ns=(1, 1))
    first = fault_here()
    broken(machine, "lies", chip=1)
    second = fault_here()
    assert first is not None
    assert second is not None
    assert (first.how, first.chip, second.how, second.chip) == ("nan", 2, "lies", 1)
    (machine / "fault.json").unlink()
    assert fault_here() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"how": "lies", "seed": 1e999}',
        '{"how": "lies", "chip": -5}',
        '{"how": "lies", "chip": 64}',
        '{"how": "lies", "chip": null}',
    ],
)
def test_a_file_that_says_nothing_sensible_breaks_nothing(machine: Path, text: str) -> None:
    (machine / "fault.json").write_text(text)
    arrays = {"x": values(PartitionSpec("d"))}
    assert all(as_computed(arrays) is arrays for _ in range(ENOUGH))


def test_a_huge_seed_is_a_seed(machine: Path) -> None:
    broken(machine, "lies", seed=10**300)
    before = values(PartitionSpec("d"))
    assert any(wrong_on(before, as_computed(before))[2] for _ in range(ENOUGH))
