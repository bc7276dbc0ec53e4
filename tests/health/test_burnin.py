"""The burn-in as it is called: from Python, from the command line, and before a job's program."""

# mypy: allow-untyped-calls

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from typer.testing import CliRunner

from drumline.cli import app
from drumline.errors import UserError
from drumline.health import __main__ as job
from drumline.health import burn_in, burnin
from drumline.health.bench import Bench
from drumline.health.checks.links import rings_of
from drumline.health.checks.machine import check_machine
from drumline.health.checks.patterns import Int8Product, int8_factors
from drumline.health.checks.rulers import checksum
from drumline.health.report import FAIL, PASS, WARN, BurnIn
from tests.health.seeds import SMALL, Plant, PlantingBench


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burnin, "sizes_for", lambda _: SMALL)


def test_the_host_knows_what_a_product_of_bytes_adds_up_to() -> None:
    product = Int8Product(3, 12, 40)
    left, right = (np.asarray(side, np.int64) for side in int8_factors(jnp.uint32(3), 12, 40))
    assert len(np.unique(left)) > 100
    both = checksum(jnp.asarray((left @ right).astype(np.int32))[None])
    assert tuple(int(value) for value in np.asarray(both)[0]) == product.checksum


def test_two_sound_devices_pass_and_say_so() -> None:
    report = burn_in(jax.devices()[:2], seconds=0.01)
    assert report.verdict == PASS
    told = json.loads(report.to_json())
    assert [device["id"] for device in told["devices"]] == [0, 1]
    assert set(told["devices"][0]["tests"]) == {
        "matmul_bf16", "matmul_int8", "functions", "memory", "links",
    }  # fmt: skip
    assert told["devices"][0]["tests"]["matmul_bf16"]["tflops"] > 0
    assert {"memory", "disk", "clock", "devices"} <= set(told["hosts"][0]["tests"])
    assert told["said"] == "2 chips on 1 host: nothing wrong was found"


@pytest.mark.parametrize("fault", ["flip", "memory"])
def test_one_device_alone_is_compared_with_itself(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(5, fault, 0, moment=3)
    monkeypatch.setattr(burnin, "Bench", lambda devices: PlantingBench(devices, plant))
    report = burn_in(jax.devices()[:1], seconds=0.01)
    assert [accusation.chip for accusation in report.accusations] == [0]
    plant.fault = "none"
    assert burn_in(jax.devices()[:1], seconds=0.01).verdict == PASS


def test_a_mistake_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="seconds is 0: say how long"):
        burn_in(seconds=0)
    with pytest.raises(ValueError, match="devices is empty"):
        burn_in([])


class At:
    """A device that knows its place."""

    def __init__(self, *coords: int) -> None:
        self.coords, self.core_on_chip = coords, 0


def test_rings_follow_the_axes_of_the_torus_both_ways() -> None:
    rings = {
        ring.name: ring for ring in rings_of(tuple(At(x, y, 0) for y in range(3) for x in (0, 1)))
    }
    assert set(rings) == {
        "all chips",
        "axis x",
        "axis y",
        "all chips, backwards",
        "axis y, backwards",
    }
    assert rings["axis x"].next == (1, 0, 3, 2, 5, 4)
    assert rings["axis y"].next == (2, 3, 4, 5, 0, 1)
    assert list(rings["axis y"].origins(1)) == [4, 5, 0, 1, 2, 3]
    assert all(list(ring.origins(ring.hops)) == list(range(6)) for ring in rings.values())


def test_a_host_counts_its_chips(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    for chip in (0, 1, 3):
        (tmp_path / "vfio" / str(chip)).touch()
    here = {"DRUMLINE_DEV": str(tmp_path), "DRUMLINE_ACCELERATOR": "v4-8", "DRUMLINE_BUCKETS": "/"}
    told = check_machine(here)
    assert (told["chips"].verdict, told["chips"].said) == (FAIL, "3 of 4 chips: chip 2 is missing")
    (tmp_path / "vfio" / "2").touch()
    assert check_machine(here)["chips"].verdict == PASS
    assert check_machine(here)["clock"].said == "not known"


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["burnin", *arguments])


def test_the_command_shows_each_chip_and_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Plant(1, "memory", 2, moment=0)
    monkeypatch.setattr(burnin, "Bench", lambda devices: PlantingBench(devices, plant))
    shown = ask("--seconds", "0.01")
    assert shown.exit_code == 1
    lines = shown.output.splitlines()
    assert lines[0].startswith("8 chips (cpu) · 1 host · ")
    assert lines[4].startswith("2 on host 0  FAIL")
    assert lines[-1].startswith("chip 2 of host 0 computes wrong: memory, pattern 00: 1 word read")
    plant.fault = "none"
    shown = ask("--seconds", "0.01", "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.output)["verdict"] == PASS


def test_chips_that_cannot_be_used_are_not_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> BurnIn:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

    monkeypatch.setattr(burnin, "burn_in", fails)
    asked = ask("--seconds", "1", "--json")
    assert isinstance(asked.exception, UserError)  # exit code 2, as for other mistakes
    assert str(asked.exception) == (
        "the chips could not be tested: RESOURCE_EXHAUSTED: Out of memory"
    )


def test_a_device_is_named_once() -> None:
    with pytest.raises(ValueError, match="devices has one twice"):
        burn_in([jax.devices()[0]] * 2, seconds=1)


def test_it_runs_within_a_training_which_has_a_mesh_of_its_own() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        report = burn_in(jax.devices()[:3], seconds=0.01)
        assert report.verdict == PASS
        assert jax.sharding.get_abstract_mesh().axis_names == ("data", "model")


def test_bad_arguments_are_refused() -> None:
    command = [sys.executable, "-m", "drumline", "burnin", "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--seconds 0: say how long to test, such as 30\n"


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRUMLINE_HEARTBEAT", str(tmp_path / "heartbeat.json"))
    monkeypatch.delenv("DRUMLINE_HOSTS", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return tmp_path / "burnin.json"


def test_before_a_job_a_bad_chip_is_accused(
    left: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant = Plant(1, "flip", 6, moment=2)
    monkeypatch.setattr(burnin, "Bench", lambda devices: PlantingBench(devices, plant))
    assert job.main(["--job", "--seconds", "0.01"]) == 86
    assert json.loads(left.read_text())["verdict"] == FAIL
    lines = capsys.readouterr().out.splitlines()
    assert (
        sum(line.startswith("drumline: chip 6 of host 0 computes wrong: ") for line in lines) == 1
    )


@pytest.mark.parametrize("trouble", [ImportError("No module named 'jax'"), RuntimeError("no way")])
def test_what_says_nothing_of_hardware_accuses_nobody(
    left: Path, trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> BurnIn:
        raise trouble

    monkeypatch.setattr(burnin, "burn_in", fails)
    assert job.main(["--job", "--seconds", "1"]) == 0
    told = json.loads(left.read_text())
    assert told["verdict"] == WARN
    assert str(trouble) in told["said"]


def test_programs_run_on_the_chips_of_this_host_alone() -> None:
    bench = Bench(jax.devices()[:4])
    assert [device.id for device in bench.local] == [0, 1, 2, 3]
    assert os.environ.get("DRUMLINE_MACHINE") is None
    outputs = {"x": jnp.zeros(3)}
    assert bench.computed("anything", outputs) is outputs
    bench.close()
