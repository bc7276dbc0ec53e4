"""A writer that is paused and replaced stops with a message and changes no file."""

import hashlib
import random
import signal
import time
from pathlib import Path

import pytest

from drumline.train import fingerprint, fit
from drumline.train.checkpoints import claim
from tests.train.checkpoints.test_claim import set_attempt
from tests.train.checkpoints.test_resume import start, wait_for_step
from tests.train.toy import toy

UNFINISHED = ".orbax-checkpoint-tmp"


def contents(folder: Path, paused: int) -> dict[str, str]:
    """Return a checksum of every file below a folder, except those that belong to one process.

    A writer that resumes in the middle of a write still ends it. It may be a write to its own
    unfinished checkpoint, which the next run removes, or to its own file of TensorBoard events.
    """
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".draft" and UNFINISHED not in str(path)
        if f".{paused}." not in path.name
    }


def pause_and_replace(
    checkpoint: str,
    folder: Path,
    scratch: Path,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Pause attempt 1 at a random moment, let attempt 2 train to the end, and resume attempt 1."""
    monkeypatch.setattr(claim, "LOCK_TIMEOUT", 0.0)
    random_source = random.Random(seed)
    arguments = ("--set", "steps=100000", "--set", "pause=0.002", "--checkpoint", checkpoint)
    first_attempt = {"DRUMLINE_JOB_ID": "000001", "DRUMLINE_OWNER": "aaaa", "DRUMLINE_ATTEMPT": "1"}
    paused = start(scratch, compiled, *arguments, **first_attempt, DRUMLINE_FENCE="1")
    try:
        wait_for_step(paused, scratch, random_source.randrange(11, 30))
        time.sleep(random_source.random() / 20)  # at a random moment of a step or save
        paused.send_signal(signal.SIGSTOP)
        set_attempt(monkeypatch, "aaaa", "000001", 2)
        last_step = 120
        result = fit(toy(last_step), checkpoint=checkpoint)
        assert result.step == last_step
        contents_before = contents(folder, paused.pid)
        paused.send_signal(signal.SIGCONT)
        output, _ = paused.communicate(timeout=120)
    finally:
        paused.kill()
        paused.wait()
    assert paused.returncode == 1, output
    (message,) = [line for line in output.splitlines() if line.startswith("checkpoint: ")]
    assert message.startswith("checkpoint: attempt 2 of job 000001 (home aaaa, "), output
    assert f" has taken over {checkpoint}; this program (attempt 1 of " in message
    assert contents(folder, paused.pid) == contents_before
    assert fingerprint(fit(toy(last_step), checkpoint=checkpoint).state) == fingerprint(
        result.state
    )
    assert not list(folder.glob(f"*{UNFINISHED}*"))
    assert fingerprint(result.state) == fingerprint(fit(toy(last_step)).state)


@pytest.mark.every_case
@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_paused_and_replaced_writer_changes_no_file_on_a_disk(
    tmp_path: Path, compiled: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    pause_and_replace(str(folder), folder, scratch, compiled, monkeypatch, seed)


@pytest.mark.long
@pytest.mark.every_case
def test_a_paused_and_replaced_writer_changes_no_file_in_a_bucket(
    bucket: str,
    bucket_folder: Path,
    tmp_path: Path,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use google-cloud-storage for the claims, and gcsfs and TensorStore for the rest."""
    folder = bucket_folder / "run"
    pause_and_replace(f"{bucket}/run", folder, tmp_path, compiled, monkeypatch, seed=1)
