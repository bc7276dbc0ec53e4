"""Two processes of four devices each, joined as two hosts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.train import Ending, fit
from drumline.train.checkpoints.files import COMMITTED
from tests.compiling import quick_flags
from tests.ports import free_port
from tests.train.checkpoints.test_resume import LOSSES_ON_ANOTHER_MESH
from tests.train.toy import toy

ROOT = Path(__file__).parents[2]


def start(folder: Path, host: int, port: int) -> "subprocess.Popen[str]":
    """Start one of two hosts."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.host", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": quick_flags(4),
            "DRUMLINE_HOST": str(host),
            "DRUMLINE_HOSTS": "2",
            "DRUMLINE_COORDINATOR": f"127.0.0.1:{port}",
            "DRUMLINE_HEARTBEAT": str(folder / f"heartbeat-{host}.json"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def beat(folder: Path, host: int) -> dict[str, Any]:
    path = folder / f"heartbeat-{host}.json"
    fields: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return fields


@pytest.mark.long
def test_two_hosts_train_together_find_a_bad_row_and_stop_together(tmp_path: Path) -> None:
    port = free_port()
    hosts = [start(tmp_path, host, port) for host in (0, 1)]
    try:
        # The last run has ten thousand steps.
        while beat(tmp_path, 1).get("total") != 10_000 or beat(tmp_path, 1)["step"] < 5:
            assert all(process.poll() is None for process in hosts), [
                process.communicate()[0] for process in hosts
            ]
            time.sleep(0.05)
        hosts[1].terminate()
        outputs = [process.communicate(timeout=240)[0] for process in hosts]
    finally:
        for process in hosts:
            process.kill()
            process.communicate()
    results = [json.loads((tmp_path / f"result-{host}.json").read_text()) for host in (0, 1)]

    # Only host 1 got the notice. Both hosts stopped after the same step, saved it, and report it.
    assert [process.returncode for process in hosts] == [75, 75], outputs
    (saved,) = [path for path in (tmp_path / "stopped").iterdir() if path.name.isdigit()]
    assert (saved / COMMITTED).exists()
    assert [beat(tmp_path, host)["step"] for host in (0, 1)] == [int(saved.name)] * 2
    assert [beat(tmp_path, host)["checkpoint"] for host in (0, 1)] == [int(saved.name)] * 2
    assert f"stopped by SIGTERM at step {saved.name}" in outputs[0]
    assert not any("[Gloo]" in output for output in outputs), outputs[0]

    # After the NaN both hosts stopped before the same step and name the host of the row.
    assert results[0] == results[1]
    assert results[0]["ending"] == Ending.NOT_FINITE.exit_code
    assert results[0]["step"] == 3
    assert results[0]["report"].startswith(
        "step 4: non-finite value from batch 3, first on host 1 of 2"
    )

    # The hosts chose the same steps to save, although they measure different times.
    assert results[0]["auto"] == results[0]["whole"]
    auto_steps = {int(path.name) for path in (tmp_path / "auto").iterdir() if path.name.isdigit()}
    assert 2 in auto_steps, "the shortest lifetime of slices counts"
    assert "saving every " in outputs[0]
    assert "saving every " not in outputs[1]

    # One host with the same rows in the same order gives the same results.
    one_host_run = fit(toy(12, mesh=8, save_every=6), checkpoint=tmp_path / "alone")
    assert results[0]["loss"] == pytest.approx(
        one_host_run.metrics["loss"], rel=LOSSES_ON_ANOTHER_MESH
    )
    metrics = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "alone")
    ]
    assert [line["squares"] for line in metrics[0]] == [line["squares"] for line in metrics[1]]

    # One host resumes from the checkpoint of two hosts.
    resumed = fit(toy(14, mesh=8), checkpoint=tmp_path / "whole")
    assert resumed.ending is Ending.DONE
    expected = fit(toy(14, mesh=8), checkpoint=tmp_path / "alone")
    loss = pytest.approx(expected.metrics["loss"], rel=LOSSES_ON_ANOTHER_MESH)
    assert resumed.metrics["loss"] == loss
