"""One training for a checkpoint folder at a time, and none that a dead one hinders."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.train import Ending, Mistake, fit
from drumline.train.checkpoints import claim
from tests.train.checkpoints.test_resume import start, wait_for_step
from tests.train.toy import toy

HOLDER = """
import os, sys
from drumline.train.checkpoints.claim import claim
claim(sys.argv[1])
reader = os.fork()
if reader == 0:
    sys.stdin.read()
    os._exit(0)
print(reader, flush=True)
os.waitpid(reader, 0)
"""


@pytest.fixture(autouse=True)
def _of_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRUMLINE_JOB_ID", "DRUMLINE_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_a_second_training_is_refused_while_the_first_lives_and_not_once_it_is_killed(
    tmp_path: Path, compiled: str
) -> None:
    first = start(tmp_path, compiled, "--set", "pause=0.02", "--set", "steps=100000")
    try:
        wait_for_step(first, tmp_path, 12)
        with pytest.raises(Mistake) as refusal:
            fit(toy(20), checkpoint=tmp_path)
        assert str(refusal.value) == (
            f"checkpoint: process {first.pid} on {os.uname().nodename} is training into "
            f"{tmp_path}, and a second training would destroy its work; wait for it, stop it, or "
            "name another folder"
        )
        assert json.loads((tmp_path / "attempts.json").read_text())["attempt"] == 1
        wait_for_step(first, tmp_path, newest(tmp_path) + 15)
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert fit(toy(newest(tmp_path) + 15), checkpoint=tmp_path).ending is Ending.DONE


def test_a_child_that_outlives_a_killed_training_does_not_hold_the_folder(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout is not None
    with held:
        child = int(held.stdout.readline())
        with pytest.raises(Mistake, match=f"process {held.pid} on "):
            claim.claim(str(tmp_path))
        held.send_signal(signal.SIGKILL)
        held.wait()
        os.kill(child, 0)
        claim.claim(str(tmp_path))()


def test_a_later_attempt_of_a_job_goes_on_without_an_earlier_one_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "PATIENCE", 0.0)
    monkeypatch.setenv("DRUMLINE_JOB_ID", "digits-1")
    monkeypatch.setenv("DRUMLINE_ATTEMPT", "1")
    release = claim.claim(str(tmp_path))
    with pytest.raises(Mistake, match="is training into"):
        claim.claim(str(tmp_path))
    said: list[str] = []
    monkeypatch.setenv("DRUMLINE_ATTEMPT", "2")
    claim.claim(str(tmp_path), said.append)()
    assert said[0].startswith(f"going on although process {os.getpid()} on ")
    monkeypatch.setenv("DRUMLINE_JOB_ID", "digits-2")
    with pytest.raises(Mistake, match="is training into"):
        claim.claim(str(tmp_path))
    release()


def test_a_lock_that_a_machine_left_on_a_file_server_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "host-of-old")
        release = claim.claim(str(tmp_path))
    lock = tmp_path / "drumline" / "lock"
    with pytest.raises(Mistake, match=f"if that machine is gone, remove {lock}$"):
        claim.claim(str(tmp_path))
    lock.unlink()
    claim.claim(str(tmp_path))()
    release()
