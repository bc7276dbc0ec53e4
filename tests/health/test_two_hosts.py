"""Two hosts test their chips together and end with the same verdict and report."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.compiling import quick_flags
from tests.ports import free_port

FAULT = {"how": "lies", "chip": 1, "from_step": 0, "seed": 1}


def test_both_hosts_name_a_faulty_chip_of_one(tmp_path: Path) -> None:
    port = free_port()
    processes = []
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
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [86, 86]
    reports = [json.loads((tmp_path / str(host) / "burnin.json").read_text()) for host in (0, 1)]
    (fault,) = reports[0]["accusations"]
    assert reports[1]["accusations"] == [fault]
    bad = [device for device in reports[0]["devices"] if device["verdict"] == "fail"]
    assert [device["host"] for device in bad] == [1]
    assert bad[0]["id"] == [d["id"] for d in reports[0]["devices"] if d["host"] == 1][1]
    assert fault.startswith(f"drumline: chip {bad[0]['id']} of host 1 computes wrong: ")
    assert all(fault in output for output in outputs)
