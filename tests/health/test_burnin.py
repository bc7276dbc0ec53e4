"""The burn-in from Python, from the command line, and before a job's program."""

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
from drumline.health.host_checks import check_host
from drumline.health.inputs import Int8Matmul, int8_operands
from drumline.health.links import rings_of
from drumline.health.report import FAIL, PASS, WARN, HealthReport
from drumline.health.runner import ChipRunner, checksum
from tests.health.seeds import SMALL, FaultyRunner, InjectedFault


@pytest.fixture(autouse=True)
def use_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burnin, "sizes_for", lambda _: SMALL)


def test_the_host_derives_the_checksum_of_an_int8_matmul() -> None:
    matmul = Int8Matmul(3, 12, 40)
    left, right = (np.asarray(side, np.int64) for side in int8_operands(jnp.uint32(3), 12, 40))
    assert len(np.unique(left)) > 100
    checksums = checksum(jnp.asarray((left @ right).astype(np.int32))[None])
    assert tuple(int(value) for value in np.asarray(checksums)[0]) == matmul.checksum


def test_two_healthy_devices_pass() -> None:
    report = burn_in(jax.devices()[:2], seconds=0.01)
    assert report.verdict == PASS
    fields = json.loads(report.to_json())
    assert [device["id"] for device in fields["devices"]] == [0, 1]
    assert set(fields["devices"][0]["tests"]) == {
        "matmul_bf16", "matmul_int8", "functions", "memory", "links",
    }  # fmt: skip
    assert fields["devices"][0]["tests"]["matmul_bf16"]["tflops"] > 0
    assert {"memory", "disk", "clock", "devices"} <= set(fields["hosts"][0]["tests"])
    assert fields["said"] == "2 chips on 1 host: no faults found"


@pytest.mark.parametrize("kind", ["flip", "memory"])
def test_a_single_device_is_compared_with_its_repeats(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = InjectedFault(5, kind, 0, call=3)
    monkeypatch.setattr(burnin, "ChipRunner", lambda devices: FaultyRunner(devices, fault))
    report = burn_in(jax.devices()[:1], seconds=0.01)
    assert [fault_report.chip for fault_report in report.faults] == [0]
    fault.kind = "none"
    assert burn_in(jax.devices()[:1], seconds=0.01).verdict == PASS


def test_bad_arguments_raise_value_error() -> None:
    with pytest.raises(ValueError, match="seconds is 0: say how long"):
        burn_in(seconds=0)
    with pytest.raises(ValueError, match="devices is empty"):
        burn_in([])


class TorusDevice:
    """A device with torus coordinates."""

    def __init__(self, *coords: int) -> None:
        self.coords, self.core_on_chip = coords, 0


def test_rings_follow_the_axes_of_the_torus_in_both_directions() -> None:
    rings = {
        ring.name: ring
        for ring in rings_of(tuple(TorusDevice(x, y, 0) for y in range(3) for x in (0, 1)))
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
    environment = {
        "DRUMLINE_DEV": str(tmp_path),
        "DRUMLINE_ACCELERATOR": "v4-8",
        "DRUMLINE_BUCKETS": "/",
    }
    outcomes = check_host(environment)
    assert (outcomes["chips"].verdict, outcomes["chips"].message) == (
        FAIL,
        "3 of 4 chips: chip 2 is missing",
    )
    (tmp_path / "vfio" / "2").touch()
    assert check_host(environment)["chips"].verdict == PASS
    assert check_host(environment)["clock"].message == "not known"


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["burnin", *arguments])


def test_the_command_prints_each_chip_and_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = InjectedFault(1, "memory", 2, call=0)
    monkeypatch.setattr(burnin, "ChipRunner", lambda devices: FaultyRunner(devices, fault))
    completed = run_command("--seconds", "0.01")
    assert completed.exit_code == 1
    lines = completed.output.splitlines()
    assert lines[0].startswith("8 chips (cpu) · 1 host · ")
    assert lines[4].startswith("2 on host 0  FAIL")
    assert lines[-1].startswith("chip 2 of host 0 computes wrong: memory, pattern 00: 1 word read")
    fault.kind = "none"
    completed = run_command("--seconds", "0.01", "--json")
    assert completed.exit_code == 0
    assert json.loads(completed.output)["verdict"] == PASS


def test_unusable_chips_are_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*_: object, **__: object) -> HealthReport:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

    monkeypatch.setattr(burnin, "burn_in", raise_error)
    completed = run_command("--seconds", "1", "--json")
    assert isinstance(completed.exception, UserError)  # exit code 2
    assert str(completed.exception) == (
        "the chips could not be tested: RESOURCE_EXHAUSTED: Out of memory"
    )


def test_duplicate_devices_are_rejected() -> None:
    with pytest.raises(ValueError, match="devices has one twice"):
        burn_in([jax.devices()[0]] * 2, seconds=1)


def test_a_burn_in_runs_within_another_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        report = burn_in(jax.devices()[:3], seconds=0.01)
        assert report.verdict == PASS
        assert jax.sharding.get_abstract_mesh().axis_names == ("data", "model")


def test_bad_options_are_rejected() -> None:
    command = [sys.executable, "-m", "drumline", "burnin", "--seconds", "0"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == "--seconds 0: say how long to test, such as 30\n"


@pytest.fixture
def report_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRUMLINE_HEARTBEAT", str(tmp_path / "heartbeat.json"))
    monkeypatch.delenv("DRUMLINE_HOSTS", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return tmp_path / "burnin.json"


def test_a_bad_chip_is_reported_before_a_job(
    report_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = InjectedFault(1, "flip", 6, call=2)
    monkeypatch.setattr(burnin, "ChipRunner", lambda devices: FaultyRunner(devices, fault))
    assert job.main(["--job", "--seconds", "0.01"]) == 86
    assert json.loads(report_file.read_text())["verdict"] == FAIL
    lines = capsys.readouterr().out.splitlines()
    assert (
        sum(line.startswith("drumline: chip 6 of host 0 computes wrong: ") for line in lines) == 1
    )


@pytest.mark.parametrize("error", [ImportError("No module named 'jax'"), RuntimeError("no way")])
def test_an_error_without_evidence_about_hardware_is_a_warning(
    report_file: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_: object, **__: object) -> HealthReport:
        raise error

    monkeypatch.setattr(burnin, "burn_in", raise_error)
    assert job.main(["--job", "--seconds", "1"]) == 0
    fields = json.loads(report_file.read_text())
    assert fields["verdict"] == WARN
    assert str(error) in fields["said"]


def test_programs_run_only_on_the_chips_of_this_host() -> None:
    runner = ChipRunner(jax.devices()[:4])
    assert [device.id for device in runner.local_devices] == [0, 1, 2, 3]
    assert os.environ.get("DRUMLINE_MACHINE") is None
    outputs = {"x": jnp.zeros(3)}
    assert runner.computed_outputs("anything", outputs) is outputs
    runner.close()
