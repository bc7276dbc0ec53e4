"""`init --probe` on the emulator."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.cloud.emulator import launch
from drumline.jobs.config import read
from drumline.jobs.probe import REMOVED, plan_probe, without_secrets
from tests.cases import rare
from tests.jobs.installation import Installation

BIN = Path(sys.executable).parent / "drumline"


@pytest.fixture(scope="module")
def installation(worker_installation: Installation) -> Iterator[Installation]:
    yield worker_installation
    worker_installation.clear()


def probe(installation: Installation, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [BIN, "init", "--probe", "--yes", *options],
        env=os.environ | {"DRUMLINE_HOME": str(installation.home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output = process.communicate(timeout=240)[0]
    assert "Traceback" not in output, output
    return process.returncode, output


def test_every_step_is_reported_and_no_resource_is_left(installation: Installation) -> None:
    code, output = finish(probe(installation, "--accelerator", "v4-16"))
    assert code == 0, output
    steps = re.findall(r"^✓ (\S+(?: \S+)*?)(?:  |$)", output, re.MULTILINE)
    assert steps == [
        "login", "permissions", "request", "state", "addresses", "host keys",
        "SSH host 0", "SSH host 1", "deletion",
    ]  # fmt: skip
    assert "in local-a, project local, which costs nothing" in output
    assert re.search(r"✓ SSH host 0 .*Python 3", output)
    assert "GET /v2/projects/local/locations/local-a/queuedResources/dl-probe-" in output
    assert installation.resources() == []
    path = Path(output.strip().rpartition(": ")[2])
    assert path.parent == installation.home
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    report = path.read_text()
    public_key = (installation.home / "ssh" / "id_ed25519.pub").read_text().split()[1]
    access = launch.find(installation.home / "emulator")
    assert access is not None
    for secret in (public_key, access.token, "emulator@local"):
        assert secret not in report
        assert secret not in output
    assert '"acceleratorType": "v4-16"' in report
    assert REMOVED in report


def test_a_failed_step_is_explained_and_no_resource_is_left(installation: Installation) -> None:
    installation.emulator("faults", deny=["local-c"])
    code, output = finish(probe(installation, "--zone", "local-c"))
    assert code == 1
    assert "✗ login" in output
    assert "local-c" in output
    assert "the cloud's own words: " in output
    assert "you can: ask an administrator" in output
    installation.emulator("faults", clear=True)
    assert installation.resources() == []


@pytest.mark.parametrize("name", ["SIGINT", *rare("SIGTERM")])
def test_an_interrupted_probe_deletes_its_slice(installation: Installation, name: str) -> None:
    installation.emulator("capacity", zone="local-b", accelerator="v4", chips=0)
    process = probe(installation, "--zone", "local-b", "--accelerator", "v4-8")
    assert process.stdout is not None
    lines: list[str] = []
    while "· state" not in "".join(lines[-1:]):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    assert len(installation.resources()) == 1
    process.send_signal(getattr(signal, name))
    code, output = finish(process)
    assert code == 1
    assert "interrupted" in output
    assert "✓ deletion     confirmed" in output
    assert installation.resources() == []


def test_without_a_terminal_it_needs_yes(installation: Installation) -> None:
    done = subprocess.run(
        [BIN, "init", "--probe"],
        env=os.environ | {"DRUMLINE_HOME": str(installation.home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "add --yes" in done.stderr
    assert installation.resources() == []


def test_the_plan_follows_the_quota_and_names_its_cost(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "cloud: google\nproject: lab-tpu-1\nzones: [europe-west4-a, us-central2-b]\n"
        "quota: [32 on-demand v4 chips in us-central2-b]\n"
    )
    config = read(tmp_path)
    plan = plan_probe(config, None, None, None)
    assert (plan.zone, plan.accelerator, plan.capacity) == ("europe-west4-a", "v5litepod-1", "spot")
    plan = plan_probe(config, "us-central2-b", None, None)
    assert (plan.accelerator, plan.capacity) == ("v4-8", "on-demand")
    assert plan.cost == "costs about $12.88 an hour, $3.22 for 15 min"
    with pytest.raises(ValueError, match="it has no v4-8; zones: us-central2-b"):
        plan_probe(config, "europe-west4-a", "v4-8", None)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach https://u:p4ssw0rd@proxy:80/x", "p4ssw0rd"),
        ("GET /?access_token=abc123&zone=a", "abc123"),
        ("nc --token=abc123: refused", "abc123"),
        ("client_secret: GOCSPX-abcdefghij", "abcdefghij"),
        ("login hf_abcdefghij failed", "hf_abcdefghij"),
        ("refresh 1//0abcdefghijkl", "abcdefghijkl"),
        ("clone with ghp_abcdefghij", "ghp_abcdefghij"),
    ],
)
def test_secrets_are_removed_from_the_words_of_commands(text: str, secret: str) -> None:
    assert secret not in without_secrets(text)
    assert secret not in str(without_secrets({"Set-Cookie": secret, "user-data": secret}))


def test_secrets_are_removed_from_answers() -> None:
    answer = {
        "metadata": {"ssh-keys": "drumline:ssh-ed25519 AAAA", "note": "Bearer ya29.a0Af_x"},
        "items": [{"key": "ssh-ed25519", "value": "AAAAC3"}, {"key": "hostname", "value": "t1v"}],
        "message": "ann@example.org and trainer@p.iam.gserviceaccount.com may not",
        "access_token": "x",
        "state": "READY",
    }
    text = json.dumps(without_secrets(answer))
    for secret in ("AAAA", "ya29", "ann@", "trainer@", '"x"'):
        assert secret not in text
    assert "READY" in text
    assert "t1v" in text
