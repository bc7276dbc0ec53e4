"""Another user of the machine cannot reach anything of the owner.

A job with a secret runs; then a process that has become `nobody` attempts every access.
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drumline.cli.emulator import app
from drumline.cloud.emulator import launch, processes
from tests.jobs.installation import Installation

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.getuid() != 0,
    reason="needs root on Linux, to become another user",
)
SECRET = "the-owners-own-secret"  # noqa: S105

# Nobody may be unable to read Python's own files, so the script rehearses before it switches the
# user. It prints every access that was not denied.
STRANGER = """
import asyncio, asyncssh, http.client, json, os, socket, sys
known = json.load(sys.stdin)
key = asyncssh.generate_private_key("ssh-ed25519")
ended = {}

def call(method, path, body=None, token=None):
    connection = http.client.HTTPConnection("127.0.0.1", known["port"], timeout=60)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, json.dumps(body or {}), headers)
    return connection.getresponse().status

async def log_in(port, user):
    try:
        async with asyncssh.connect("127.0.0.1", port, username=user, client_keys=[key],
                                    known_hosts=None, agent_path=None, config=None, password="",
                                    x509_trusted_certs=None, x509_trusted_cert_paths=None):
            return "let in"
    except asyncssh.PermissionDenied:
        return "denied"

call("GET", "/")
asyncio.run(log_in(known["ssh"][0], "drumline"))
os.setgroups([]); os.setgid(known["gid"]); os.setuid(known["uid"])

public = key.export_public_key().decode().strip()
node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base",
        "metadata": {"ssh-keys": f"nobody:{public}"}}
zone = "/v2/projects/local/locations/local-a"
for token in (None, "", "guess"):
    ended[f"create a node, token {token!r}"] = call("POST", f"{zone}/nodes?nodeId=n", node, token)
    ended[f"list nodes, token {token!r}"] = call("GET", f"{zone}/nodes", None, token)
    for verb in ("status", "resources"):
        ended[f"{verb}, token {token!r}"] = call("GET", f"/emulator/{verb}", None, token)
    for verb in ("preempt", "capacity", "faults", "break", "stop"):
        ended[f"{verb}, token {token!r}"] = call("POST", f"/emulator/{verb}", None, token)

for port in known["ssh"]:
    for user in ("drumline", "root", "nobody", ""):
        ended[f"ssh to {port} as {user!r}"] = asyncio.run(log_in(port, user))

def attempt(what, do):
    try:
        ended[what] = repr(do())
    except PermissionError:
        ended[what] = "denied"
    except (ProcessLookupError, FileNotFoundError):
        assert "/home/" not in what  # a process that has ended meanwhile

def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)

for path in known["sockets"]:
    attempt(f"connect to {path}", lambda: connect(path))
for path in known["folders"]:
    attempt(f"list {path}", lambda: os.listdir(path))
    attempt(f"write into {path}", lambda: open(path + "/by-nobody", "w").close())
for path in known["files"]:
    attempt(f"read {path}", lambda: open(path, "rb").read())
for pid in known["pids"]:
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
    attempt(f"environment of {pid}", lambda: open(f"/proc/{pid}/environ", "rb").read())
print(json.dumps(ended))
"""


@pytest.fixture
def installation() -> Iterator[Installation]:
    """A home in a folder that everybody may enter, so that only the home's mode protects it."""
    base = Path(tempfile.mkdtemp(prefix="dl-"))
    base.chmod(0o755)
    new = Installation(base / "home", base / "jobs")
    try:
        yield new
    finally:
        new.stop()
        shutil.rmtree(base, ignore_errors=True)


def our_pids(home: Path) -> list[int]:
    """Return server, emulator, hosts, and all their child processes."""
    emulator = launch.find(home / "emulator")
    assert emulator is not None
    pids = {emulator.pid, *processes.find_by_environment(f"DRUMLINE_HOST_TAG={home}")}
    pids.update(processes.find_by_environment(f"DRUMLINE_HOME={home}\0"))
    for pid in pids:
        pids.update(processes.descendants(pid))
    return sorted(pids - {os.getpid()})


def sockets_of(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets of these processes."""
    inodes: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def listening_ports(inodes: set[str]) -> set[int]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in inodes
    }


def abstract_sockets(inodes: set[str]) -> list[str]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if len(line) > 7 and line[7][0] == "@" and line[6] in inodes]


def try_everything(known: dict[str, Any]) -> dict[str, Any]:
    nobody = pwd.getpwnam("nobody")
    known |= {"uid": nobody.pw_uid, "gid": nobody.pw_gid}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER], input=json.dumps(known), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, Any] = json.loads(done.stdout)
    return ended


def test_another_user_cannot_reach_the_owners_data(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_HOME", str(installation.home))
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    assert CliRunner().invoke(app, ["start"]).exit_code == 0
    job = installation.create("echo told; sleep 1000", accelerator="v4-16", secrets=["SECRET"])
    installation.reaches(job, "RUNNING", timeout=60)
    before = installation.emulator("resources")

    pids = our_pids(installation.home)
    inodes = sockets_of(pids)
    emulator = launch.find(installation.home / "emulator")
    assert emulator is not None
    port = int(emulator.url.rpartition(":")[2])
    ssh = [host["port"] for host in before["hosts"]]
    assert len(ssh) == 2
    # Check that the attempts cover every socket and file.
    assert listening_ports(inodes) == {port, *ssh}
    assert abstract_sockets(inodes) == []
    everything = sorted(installation.home.rglob("*"))
    hosts = [path for path in everything if path.parent.parent.name == "hosts"]
    assert len(hosts) == 2
    assert any(path.suffix == ".log" for path in everything)

    ended = try_everything(
        {
            "port": port,
            "ssh": ssh,
            "sockets": [str(path) for path in everything if path.is_socket()],
            "folders": [
                str(installation.home),
                *(str(path) for path in everything if path.is_dir()),
            ],
            "files": [str(path) for path in everything if path.is_file()],
            "pids": pids,
        }
    )
    assert {how: end for how, end in ended.items() if end not in (401, "denied")} == {}
    assert len(ended) > 100
    assert installation.emulator("resources") == before
    assert installation.status(job) == "RUNNING"
    # Everybody may read the command line of a process.
    shown = " ".join(processes.command_line(pid) for pid in list(pids))
    assert SECRET not in shown
    assert emulator.token not in shown
