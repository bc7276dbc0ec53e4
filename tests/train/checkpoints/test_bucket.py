"""Checkpoints in Cloud Storage, through the clients that a run on Google Cloud uses."""

# mypy: allow-untyped-calls

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import pytest
from etils import epath  # type: ignore[import-untyped]
from etils.epath import backend  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding

from drumline.train import Ending, fingerprint, fit
from drumline.train.checkpoints.claim import claim, this_writer
from drumline.train.checkpoints.fence import FencedOff
from drumline.train.checkpoints.files import COMMITTED, list_folder
from tests.train.conftest import FOR_CHILDREN
from tests.train.toy import spec, toy

CONFIG = Path(__file__).parents[1] / "toy.py"


def checkpoints(run: Path) -> list[int]:
    """Return the complete checkpoints of a run, from the files of the bucket."""
    return sorted(int(path.parent.name) for path in run.glob(f"*/{COMMITTED}"))


def test_orbax_saves_and_restores_a_sharded_tree(bucket: str) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), spec())
    tree = {"w": jax.device_put(jnp.arange(64.0), sharding), "step": jnp.int32(7)}
    path = epath.Path(bucket) / "run" / "7"
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(path, args=ocp.args.PyTreeSave(tree))
        writer.wait_until_finished()
    assert (path / COMMITTED).exists()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arguments = ocp.checkpoint_utils.construct_restore_args(tree)
        restored = reader.restore(path, args=ocp.args.PyTreeRestore(tree, arguments))
    assert restored["w"].sharding == sharding
    assert np.array_equal(restored["w"], tree["w"])
    assert restored["step"] == 7


def test_a_run_sees_the_files_of_another_host(bucket: str, bucket_folder: Path) -> None:
    run = f"{bucket}/run"
    backend.fsspec_backend.fs(run).dircache.use_listings_cache = True  # gcsfs's default
    claimed = claim(run)
    assert [path.name for path in list_folder(epath.Path(run))] == ["drumline"]
    for step in ("7", "8"):
        (bucket_folder / "run" / step).mkdir(parents=True)
        (bucket_folder / "run" / step / COMMITTED).touch()
        assert (epath.Path(run) / step / COMMITTED).exists()
        assert step in {path.name for path in list_folder(epath.Path(run))}
    claimed.release()


@pytest.mark.parametrize("spelling", ["team//run", "team/./run", "/team/run", "team/run//"])
def test_every_spelling_of_a_folder_has_the_same_claims(bucket: str, spelling: str) -> None:
    first = claim(f"{bucket}/team/run")
    second = claim(f"{bucket}/{spelling}")
    second.check()
    with pytest.raises(FencedOff):
        first.check()
    second.release()


@pytest.mark.parametrize("spelling", ["team//run", "team/run/"])
def test_an_attempt_recognizes_its_folder_in_any_spelling(
    spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_CHECKPOINT", f"gs://lab/{spelling}")
    assert this_writer("gs://lab/team/run").assigned
    assert this_writer("gs://lab/team//run/a").assigned
    assert not this_writer("gs://lab/team/run2").assigned


@pytest.mark.every_case
@pytest.mark.long
def test_a_killed_run_resumes_from_the_bucket_with_the_same_bits(
    bucket: str, bucket_folder: Path, tmp_path: Path, compiled: str
) -> None:
    run, files = f"{bucket}/team/run", bucket_folder / "team" / "run"
    assert fit(toy(10), checkpoint=run).ending is Ending.DONE
    assert checkpoints(files) == [10]
    heartbeat = tmp_path / "heartbeat.json"
    command = [sys.executable, "-m", "drumline.train", str(CONFIG), "--checkpoint", run]
    with subprocess.Popen(
        [*command, "--set", "steps=40", "--set", "pause=0.05"],
        env={
            **os.environ,
            **FOR_CHILDREN,
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "DRUMLINE_HEARTBEAT": str(heartbeat),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        while child.poll() is None and max(checkpoints(files)) == 10:
            time.sleep(0.01)
        child.kill()
        output, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL, output
    newest = max(checkpoints(files))
    assert 10 < newest < 40

    resumed = fit(toy(40), checkpoint=run)
    undisturbed = fit(toy(40), checkpoint=tmp_path / "undisturbed")
    assert resumed.ending is Ending.DONE
    assert fingerprint(resumed.state) == fingerprint(undisturbed.state)
    lines = [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]
    last_attempt = max(line["attempt"] for line in lines)
    assert [line["step"] for line in lines if line["attempt"] == last_attempt] == [
        *range(newest + 1, 41)
    ]
    # Only the kept checkpoints are left, each with its mark.
    marks = sorted(int(path.stem) for path in (files / "drumline").glob("[0-9]*.json"))
    assert checkpoints(files) == marks
    assert max(marks) == 40
