"""Claims of checkpoint folders: one training at a time, and a dead one does not block the next."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optax  # type: ignore[import-untyped]
import pytest

from drumline.errors import UserError
from drumline.train import Ending, fit
from drumline.train.checkpoints import claim
from drumline.train.checkpoints.fence import FencedOff
from drumline.train.checkpoints.marks import Marks
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
def _no_job_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "DRUMLINE_OWNER",
        "DRUMLINE_JOB_ID",
        "DRUMLINE_ATTEMPT",
        "DRUMLINE_FENCE",
        "DRUMLINE_CHECKPOINT",
    ):
        monkeypatch.delenv(name, raising=False)


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_a_second_training_is_refused_until_the_first_is_killed(
    tmp_path: Path, compiled: str
) -> None:
    first = start(tmp_path, compiled, "--set", "pause=0.02", "--set", "steps=100000")
    try:
        wait_for_step(first, tmp_path, 12)
        with pytest.raises(UserError) as error_info:
            fit(toy(20), checkpoint=tmp_path)
        assert str(error_info.value) == (
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
    holder = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    with holder:
        child = int(holder.stdout.readline())
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            claim.claim(str(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)
        claim.claim(str(tmp_path)).release()


def set_attempt(monkeypatch: pytest.MonkeyPatch, owner: str, job: str, fence: int) -> None:
    """Set the environment of an attempt of a job."""
    monkeypatch.setenv("DRUMLINE_OWNER", owner)
    monkeypatch.setenv("DRUMLINE_JOB_ID", job)
    monkeypatch.setenv("DRUMLINE_ATTEMPT", str(fence))
    monkeypatch.setenv("DRUMLINE_FENCE", str(fence))


def test_a_later_attempt_of_a_job_takes_over_from_an_unreachable_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "LOCK_TIMEOUT", 0.0)
    set_attempt(monkeypatch, "aaaa", "000001", 1)
    first = claim.claim(str(tmp_path))
    with pytest.raises(UserError, match="is training into"):
        claim.claim(str(tmp_path))
    output: list[str] = []
    set_attempt(monkeypatch, "aaaa", "000001", 2)
    claim.claim(str(tmp_path), output.append).release()
    assert output[0].startswith(f"taking over {tmp_path} from process {os.getpid()} on ")
    with pytest.raises(FencedOff, match=r"attempt 2 of job 000001 .* has taken over"):
        first.check()
    set_attempt(monkeypatch, "bbbb", "000001", 3)
    with pytest.raises(UserError, match="is training into"):
        claim.claim(str(tmp_path))
    first.release()
    with pytest.raises(UserError, match="of job 000001 of another home"):
        claim.claim(str(tmp_path))
    set_attempt(monkeypatch, "aaaa", "000001", 1)
    with pytest.raises(
        UserError, match=r"a later attempt has claimed it \(attempt 2 of job 000001"
    ):
        claim.claim(str(tmp_path))


def test_a_folder_that_version_0_1_used_can_be_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a lock and marks, but no claims."""
    fit(toy(4), checkpoint=tmp_path)
    shutil.rmtree(tmp_path / "drumline" / "claims")
    (tmp_path / "drumline" / "lock").write_text('{"process": 7, "job": "000001", "attempt": "1"}')
    set_attempt(monkeypatch, "aaaa", "000001", 2)
    assert fit(toy(8), checkpoint=tmp_path).step == 8
    assert json.loads((tmp_path / "attempts.json").read_text())["seconds"].keys() >= {"4", "8"}


def test_the_claim_of_a_killed_attempt_ends_on_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as job_environment:
        set_attempt(job_environment, "aaaa", "000001", 1)
        killed_claim = claim.claim(str(tmp_path))
    assert killed_claim.lock is not None
    os.close(killed_claim.lock)  # as the kernel does after a kill
    claim._locked.discard(killed_claim.lock)
    claim.claim(str(tmp_path)).release()


def test_the_claim_of_an_attempt_on_another_machine_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as job_environment:
        job_environment.setattr(socket, "gethostname", lambda: "host-far-away")
        set_attempt(job_environment, "aaaa", "000001", 1)
        killed_claim = claim.claim(str(tmp_path))
    assert killed_claim.lock is not None
    claim._unlock(killed_claim.lock)
    with pytest.raises(UserError, match=f"remove {tmp_path}/drumline/claims$"):
        claim.claim(str(tmp_path))
    shutil.rmtree(tmp_path / "drumline" / "claims")
    claim.claim(str(tmp_path)).release()
    with pytest.raises(FencedOff):
        killed_claim.check()


def test_a_lock_that_a_machine_left_on_a_file_server_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other_machine:
        other_machine.setattr(socket, "gethostname", lambda: "host-of-old")
        remote_claim = claim.claim(str(tmp_path))
    lock = tmp_path / "drumline" / "lock"
    with pytest.raises(UserError, match=f"if that machine is gone, remove {lock}$"):
        claim.claim(str(tmp_path))
    lock.unlink()
    claim.claim(str(tmp_path)).release()
    remote_claim.release()


def test_two_jobs_whose_programs_name_one_folder_do_not_take_it_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attempt(monkeypatch, "aaaa", "000001", 1)
    first = claim.claim(str(tmp_path))
    set_attempt(monkeypatch, "aaaa", "000002", 2)
    with pytest.raises(UserError, match="is training into"):
        claim.claim(str(tmp_path))
    first.check()
    # A job created with `create --from` has the folder assigned.
    monkeypatch.setattr(claim, "LOCK_TIMEOUT", 0.0)
    monkeypatch.setenv("DRUMLINE_CHECKPOINT", str(tmp_path))
    claim.claim(str(tmp_path)).release()
    first.release()


def test_a_file_system_without_locks_does_not_prove_that_a_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with monkeypatch.context() as job_environment:
        set_attempt(job_environment, "aaaa", "000001", 1)
        claim.claim(str(tmp_path))
    with pytest.raises(UserError, match="it is claimed by attempt 1 of job 000001"):
        claim.claim(str(tmp_path))


def test_a_run_that_is_refused_for_its_recipe_does_not_take_the_folder(tmp_path: Path) -> None:
    fit(toy(4), checkpoint=tmp_path)
    holder = claim.claim(str(tmp_path))
    assert holder.lock is not None
    claim._unlock(holder.lock)  # as in a bucket, with the fence as the only protection
    with pytest.raises(UserError, match="comes from another recipe"):
        fit(replace(toy(8), optimizer=optax.adam(0.5)), checkpoint=tmp_path)
    holder.check()


def test_a_single_checkpoint_is_not_a_checkpoint_folder(tmp_path: Path) -> None:
    fit(toy(4), checkpoint=tmp_path)
    with pytest.raises(UserError, match="4 is one checkpoint of a run; name its parent folder"):
        fit(toy(4), checkpoint=tmp_path / "4")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_copy_of_a_checkpoint_under_another_step_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(toy(4), checkpoint=tmp_path)
    shutil.copytree(tmp_path / "4", tmp_path / "70")
    fit(toy(6), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "checkpoint 70 is damaged (it holds step 4); trying the previous checkpoint" in output
    assert "resuming from step 4" in output


def test_a_late_hardware_fault_does_not_mark_the_checkpoint_of_another_writer(
    tmp_path: Path,
) -> None:
    marks = Marks(str(tmp_path))
    marks.put("10", {}, claim=5)
    marks.mark_suspect("10", "a chip lies", claim=3)
    assert marks.names_with("suspect") == set()
    marks.mark_suspect("10", "a chip lies", claim=5)
    assert marks.names_with("suspect") == {"10"}
