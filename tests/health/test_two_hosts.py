"""Two hosts test their chips together, and each ends with the same verdict and the same report."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.compiling import quick_flags
from tests.ports import free_port

FAULT = {"how": "lies", "chip": 1, "from_step": 0, "seed": 1}


def test_a_chip_that_lies_on_one_host_is_named_by_both(tmp_path: Path) -> None:
    port = free_port()
    running = []
    for host in (0, 1):
        folder = tmp_path / str(host)
        folder.mkdir()
        if host == 1:
            (folder / "fault.json").write_text(json.dumps(FAULT))
        environment = {
            **os.environ,
            "XLA_FLAGS": quick_flags(2),
            "JAX_PLATFORMS": "cpu",
            "DRUMLINE_EMULATED": "1",
            "DRUMLINE_MACHINE": str(folder),
            "DRUMLINE_HEARTBEAT": str(folder / "heartbeat.json"),
            "DRUMLINE_HOSTS": "2",
            "DRUMLINE_HOST": str(host),
            "DRUMLINE_COORDINATOR": f"127.0.0.1:{port}",
        }
        command = [sys.executable, "-m", "drumline.health", "--job", "--seconds", "0.1"]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [program.communicate(timeout=240)[0] for program in running]
    assert [program.returncode for program in running] == [86, 86]
    reports = [json.loads((tmp_path / str(host) / "burnin.json").read_text()) for host in (0, 1)]
    (accused,) = reports[0]["accusations"]
    assert reports[1]["accusations"] == [accused]
    bad = [device for device in reports[0]["devices"] if device["verdict"] == "fail"]
    assert [device["host"] for device in bad] == [1]
    assert bad[0]["id"] == [d["id"] for d in reports[0]["devices"] if d["host"] == 1][1]
    assert accused.startswith(f"drumline: chip {bad[0]['id']} of host 1 computes wrong: ")
    assert all(accused in output for output in outputs)
