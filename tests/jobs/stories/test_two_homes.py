"""Two homes that share a checkpoint folder keep their checkpoints apart."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drumline.train.checkpoints.files import COMMITTED
from tests.buckets import StorageServer
from tests.jobs.installation import Installation, temporary_installation
from tests.jobs.stories.test_bad_chips import TRAINING, learnt, outcomes

SLOW = """
import time
class Slow:
    def __init__(self, columns):
        self.columns, self.count = columns, 0
    def __len__(self):
        return 256
    def rows(self, numbers):
        self.count += 1
        while self.count > 25 and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.05)
        time.sleep(0.05)
        return {name: column[numbers] for name, column in self.columns.items()}
"""
WHERE = """
import os
checkpoint = os.environ.get("DRUMLINE_CHECKPOINT")
if checkpoint and "BUCKET" in os.environ:
    checkpoint = os.environ["BUCKET"] + "/" + os.path.basename(checkpoint)
"""
"""On emulated hosts a bucket is a folder; with BUCKET the program uses the real API."""
PROGRAM = (
    TRAINING.replace(
        "drumline.distributed.initialize()", SLOW + "drumline.distributed.initialize()"
    )
    .replace("default_rng(0)", 'default_rng(int(os.environ["SEED"]))')
    .replace("data.arrays(columns, batch=64)", "data.Data(Slow(columns), batch=64, threads=1)")
)


def train(
    installation: Installation, seed: int, checkpoint: str | None, gate: Path, **more: str
) -> str:
    """Create a job whose program stops after 25 batches until the gate exists."""
    environment = {"SEED": str(seed), "GATE": str(gate)} | more
    file = installation.write_job(
        "python train.py", accelerator="v4-8", checkpoint=checkpoint, environment=environment
    )
    program = PROGRAM.replace('os.environ["DRUMLINE_CHECKPOINT"]', "checkpoint")
    (file.parent / "train.py").write_text(WHERE + program)
    return str(installation.client.create(file)["id"])


def taken_away(installation: Installation, job: str, times: int, shared: Path) -> None:
    """Preempt the slice, each time a little further in the training."""
    for attempt in range(1, times + 1):
        installation.until(
            partial(_trains, installation, job, attempt, shared), what=f"attempt {attempt} to train"
        )
        installation.emulator("preempt", target=job)


def _trains(installation: Installation, job: str, attempt: int, shared: Path) -> bool:
    """Return True if this attempt has saved.

    An attempt that is taken away before would be repeated by the next one, and the gate would stop
    that one too early.
    """
    shown: dict[str, Any] = installation.client.show(job)
    folder = shared / Path(shown["checkpoint"]).name
    steps = [float(path.parent.name) for path in folder.glob(f"*/{COMMITTED}")]
    saved = max(steps, default=0) >= 10 * attempt
    return shown["status"] == "RUNNING" and len(shown["attempts"]) == attempt and saved


# tests/simulation covers it in virtual time, and test_claim.py of the checkpoints on one host.
@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("storage", ["disk", "bucket"])
def test_two_homes_with_one_checkpoint_folder_do_not_touch_each_other(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shared, more = tmp_path / "shared", {}
    if storage == "bucket":
        from drumline.cloud.emulator.api.storage import client_environment

        server: StorageServer = request.getfixturevalue("storage_server")
        shared = request.getfixturevalue("bucket_folder")
        more = {**client_environment(server.url), "BUCKET": f"gs://{shared.name}"}
    with (
        temporary_installation(tmp_path / "ada") as ada,
        temporary_installation(tmp_path / "bob") as bob,
    ):
        undisturbed = [ada.end(train(ada, seed, None, tmp_path)) for seed in (1, 2)]
        alone = [learnt(ada, shown) for shown in undisturbed]
        assert alone[0] != alone[1]
        # So that both homes assign the same number to the next job.
        for _ in alone:
            bob.end(bob.create("true"))
        homes = ((ada, 1), (bob, 2))
        place, gate = str(tmp_path / "shared"), tmp_path / "gate"
        jobs = [train(home, seed, place, gate, **more) for home, seed in homes]
        assert jobs[0] == jobs[1]
        for (home, _), job in zip(homes, jobs, strict=True):
            taken_away(home, job, 2, shared)
        gate.touch()
        ended = [home.end(job) for (home, _), job in zip(homes, jobs, strict=True)]
        for (home, _), shown, expected in zip(homes, ended, alone, strict=True):
            assert shown["status"] == "SUCCEEDED"
            assert outcomes(shown) == ["preempted", "preempted", "succeeded"]
            assert learnt(home, shown) == expected
    names = sorted(path.name for path in shared.iterdir())
    assert [name[8:] for name in names] == [f"-{jobs[0]}"] * 2
    assert all(re.match("[0-9a-f]{8}-", name) for name in names)
    assert names[0] != names[1]
