"""A job whose hosts are reached through a proxy only, on the emulator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.test_proxy_command import RELAY
from tests.jobs.installation import Installation

BIN = Path(sys.executable).parent / "drumline"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs an OpenSSH client")
def test_the_server_and_ssh_exec_and_cp_connect_through_the_proxy(
    shared: Installation, tmp_path: Path
) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(f"open({str(tmp_path / 'used')!r}, 'a').write(sys.argv[3] + ' ')\n{RELAY}")
    relay.write_text("import sys\n" + relay.read_text())
    command = f"{sys.executable} {relay} %h %p host-%i-in-%z"

    def drumline(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [BIN, *words],
            env=os.environ | {"DRUMLINE_HOME": str(shared.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )

    gate = tmp_path / "gate"
    job = shared.create(
        f"echo hello > out.txt; while [ ! -e {gate} ]; do sleep 0.05; done",
        zones=["local-a"],
        external_ip=False,
        ssh={"proxy_command": command},
    )
    shared.reaches(job, "RUNNING")
    used = (tmp_path / "used").read_text().split()
    assert set(used) == {"host-0-in-local-a", "host-1-in-local-a"}
    done = drumline("exec", job, "--host", "1", "--", "cat", "out.txt")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    done = drumline("ssh", job, "--host", "1", "--", "echo", "through")
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr
    done = drumline("cp", f"{job}:out.txt", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert len((tmp_path / "used").read_text().split()) >= len(used) + 2
    gate.touch()
    assert shared.end(job)["status"] == "SUCCEEDED"
