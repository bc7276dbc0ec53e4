"""An emulated chip has the fault in its machine's file, only on its own device, and soon."""

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

from drumline.health.emulated import current_fault, inject_compute_fault, inject_link_fault

CALLS = 4


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRUMLINE_EMULATED", "1")
    monkeypatch.setenv("DRUMLINE_MACHINE", str(tmp_path))
    return tmp_path


def write_fault(machine: Path, mode: str, **fields: int) -> None:
    (machine / "fault.json").write_text(json.dumps({"how": mode, "chip": 2, "seed": 7, **fields}))


def sharded_values(spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    array: jax.Array = jax.device_put(jnp.arange(64, dtype=dtype), NamedSharding(mesh, spec))
    return array


def wrong_bits(before: jax.Array, after: jax.Array) -> dict[int, int]:
    """Return the number of bits that differ on each device."""
    counts = {}
    for old, new in zip(before.addressable_shards, after.addressable_shards, strict=True):
        old_and_new_bytes = (
            np.asarray(old.data).view(np.uint8),
            np.asarray(new.data).view(np.uint8),
        )
        counts[old.device.id] = int(
            np.bitwise_count(old_and_new_bytes[0] ^ old_and_new_bytes[1]).sum()
        )
    return counts


def test_a_machine_without_a_fault_changes_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"x": sharded_values(PartitionSpec("d"))}
    assert current_fault() is None
    assert inject_compute_fault(arrays) is arrays
    write_fault(machine, "lies")
    assert current_fault() is not None
    monkeypatch.delenv("DRUMLINE_EMULATED")
    assert current_fault() is None
    assert inject_compute_fault(arrays) is arrays


@pytest.mark.parametrize("spec", [PartitionSpec("d"), PartitionSpec()])
def test_one_bit_changes_only_on_the_faulty_device_and_soon(
    machine: Path, spec: PartitionSpec
) -> None:
    write_fault(machine, "lies")
    before = sharded_values(spec)
    bits_per_call = [wrong_bits(before, inject_compute_fault(before)) for _ in range(12)]
    faulty_calls = [bits for bits in bits_per_call if any(bits.values())]
    assert any(any(bits.values()) for bits in bits_per_call[:CALLS])
    assert 1 < len(faulty_calls) < 12
    assert all(bits == {0: 0, 1: 0, 2: 1, 3: 0} for bits in faulty_calls)


def test_only_floats_become_nan(machine: Path) -> None:
    write_fault(machine, "nan")
    tree = {"i": sharded_values(PartitionSpec(), jnp.int32), "x": sharded_values(PartitionSpec())}
    trees = [inject_compute_fault(tree) for _ in range(CALLS)]
    assert any(
        np.isnan(np.asarray(output["x"].addressable_shards[2].data)).any() for output in trees
    )
    assert all(output["i"] is tree["i"] for output in trees)


def test_a_bad_link_changes_only_received_arrays(machine: Path) -> None:
    write_fault(machine, "bad-link")
    before = sharded_values(PartitionSpec("d"))
    assert all(inject_compute_fault(before) is before for _ in range(CALLS))
    assert any(wrong_bits(before, inject_link_fault(before))[2] for _ in range(CALLS))


def test_a_fault_shows_from_its_step_on(machine: Path) -> None:
    write_fault(machine, "lies", from_step=100)
    before = sharded_values(PartitionSpec("d"))
    assert all(inject_compute_fault(before, step=99) is before for _ in range(CALLS))
    assert all(inject_compute_fault(before) is before for _ in range(CALLS))
    assert not (machine / "began").exists()
    assert any(wrong_bits(before, inject_compute_fault(before, step=100))[2] for _ in range(CALLS))
    assert (machine / "began").exists()
    assert any(wrong_bits(before, inject_compute_fault(before))[2] for _ in range(CALLS))


def test_a_fault_can_change_while_a_program_runs(machine: Path) -> None:
    write_fault(machine, "nan")
    os.utime(machine / "fault.json", ns=(1, 1))
    first = current_fault()
    write_fault(machine, "lies", chip=1)
    second = current_fault()
    assert first is not None
    assert second is not None
    assert (first.mode, first.chip, second.mode, second.chip) == ("nan", 2, "lies", 1)
    (machine / "fault.json").unlink()
    assert current_fault() is None


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
def test_an_invalid_file_is_no_fault(machine: Path, text: str) -> None:
    (machine / "fault.json").write_text(text)
    arrays = {"x": sharded_values(PartitionSpec("d"))}
    assert all(inject_compute_fault(arrays) is arrays for _ in range(CALLS))


def test_a_huge_seed_works(machine: Path) -> None:
    write_fault(machine, "lies", seed=10**300)
    before = sharded_values(PartitionSpec("d"))
    assert any(wrong_bits(before, inject_compute_fault(before))[2] for _ in range(CALLS))
