"""A run that is interrupted and resumes gives the same bits as an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from drumline.train import Ending, Result, fingerprint, fit
from tests.train.conftest import FOR_CHILDREN
from tests.train.toy import toy

CONFIG = Path(__file__).parents[1] / "toy.py"


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl. An incomplete line would not parse."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Run forty steps on eight devices without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return fit(toy(40, mesh=8), checkpoint=folder), folder


def start(
    folder: Path, compiled: str, *arguments: str, **environment: str
) -> "subprocess.Popen[str]":
    """Start the command line on the same recipe in its own process."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "drumline.train",
            str(CONFIG),
            "--checkpoint",
            str(folder),
            *arguments,
        ],
        env={
            **os.environ,
            **FOR_CHILDREN,
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "DRUMLINE_HEARTBEAT": str(folder / "heartbeat.json"),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run: "subprocess.Popen[str]", folder: Path, step: int) -> None:
    """Wait until the heartbeat reports this step and a checkpoint."""
    while run.poll() is None:
        file = folder / "heartbeat.json"
        beat = json.loads(file.read_text()) if file.exists() else {"step": -1}
        if beat["step"] >= step and beat["checkpoint"]:
            return
        time.sleep(0.01)


@pytest.mark.long
def test_a_killed_and_stopped_run_ends_with_the_same_bits(tmp_path: Path, compiled: str) -> None:
    steps, folder = 60, tmp_path / "disturbed"
    folder.mkdir()
    slow_settings = ("--set", f"steps={steps}", "--set", "pause=0.05")
    rng = random.Random()
    stop_steps = [rng.randint(11, 25), rng.randint(31, 50)]
    killed = start(folder, compiled, *slow_settings)
    wait_for_step(killed, folder, stop_steps[0])
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, stop_steps
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    (folder / "heartbeat.json").unlink()
    stopped = start(folder, compiled, *slow_settings)
    wait_for_step(stopped, folder, stop_steps[1])
    stopped.terminate()
    output, _ = stopped.communicate(timeout=240)
    assert stopped.returncode == 75, output
    assert f"resuming from step {newest}" in output
    saved = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    assert saved >= stop_steps[1]
    assert f"stopped by SIGTERM at step {saved}; newest checkpoint: step {saved}" in output

    result = fit(toy(steps), checkpoint=folder)
    undisturbed = fit(toy(steps), checkpoint=tmp_path / "undisturbed")
    assert result.ending is undisturbed.ending is Ending.DONE
    assert fingerprint(result.state) == fingerprint(undisturbed.state), stop_steps
    records = lines(folder)
    logged_steps = [(line["attempt"], line["step"]) for line in records]
    assert len(set(logged_steps)) == len(logged_steps)
    assert {line["attempt"] for line in records} == {1, 2, 3}
    expected = {line["step"]: line["loss"] for line in lines(tmp_path / "undisturbed")}
    assert len(expected) == steps
    assert all(line["loss"] == expected[line["step"]] for line in records)


LOSSES_ON_ANOTHER_MESH = 2e-6
"""The relative tolerance. Sums over rows differ in order, and training amplifies the rounding."""


def test_a_run_on_eight_devices_resumes_on_four(
    undisturbed: tuple[Result, Path], tmp_path: Path
) -> None:
    fit(toy(20, mesh=8), checkpoint=tmp_path)
    result = fit(toy(40, mesh=4), checkpoint=tmp_path)
    assert result.ending is Ending.DONE
    sharding = result.state.opt_state[0].mu["body"].sharding
    assert isinstance(sharding, NamedSharding)
    assert sharding.mesh.size == 4
    assert tuple(sharding.spec) == ("data",)
    before, after = lines(undisturbed[1]), lines(tmp_path)
    assert [line["step"] for line in after] == list(range(1, 41))
    for name in ("numbers", "squares"):
        assert [line[name] for line in after] == [line[name] for line in before]
    losses = np.array([[line["loss"] for line in records] for records in (before, after)])
    assert np.array_equal(losses[0, :20], losses[1, :20])
    np.testing.assert_allclose(losses[1], losses[0], rtol=LOSSES_ON_ANOTHER_MESH)


def test_a_finished_run_takes_no_more_steps(
    undisturbed: tuple[Result, Path],
) -> None:
    repeated = fit(toy(40, mesh=8), checkpoint=undisturbed[1])
    assert repeated.ending is Ending.DONE
    assert repeated.step == 40
    assert fingerprint(repeated.state) == fingerprint(undisturbed[0].state)
    assert len(lines(undisturbed[1])) == 40


def test_fingerprints_depend_only_on_the_bits() -> None:
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    on_one_device = jax.device_put(values, jax.devices()[0])
    sharded_copies = [
        jax.device_put(values, NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))  # type: ignore[no-untyped-call]
        for spec in ((), ("data",), (None, "data"))
    ]
    assert len({fingerprint(tree) for tree in (on_one_device, *sharded_copies)}) == 1
    bits = values.view(np.uint32).copy()
    bits[3, 3] ^= 1
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    different_arrays = (
        values,
        bits.view(np.float32),
        swapped,
        values.T.copy(),
        values.astype(np.float16),
    )
    assert len({fingerprint(jax.numpy.asarray(tree)) for tree in different_arrays}) == len(
        different_arrays
    )
    assert fingerprint([on_one_device, on_one_device + 1]) != fingerprint(
        [on_one_device + 1, on_one_device]
    )
