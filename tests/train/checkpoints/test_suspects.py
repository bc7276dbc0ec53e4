"""Suspect checkpoints of faulty hardware: no run resumes from them, and a good one is kept."""

import json
from functools import partial
from pathlib import Path

import pytest

from drumline.train.checkpoints import checkpoint
from drumline.train.checkpoints.checkpoint import Checkpoints, Saved, steps_to_keep
from drumline.train.mesh import make_mesh
from tests.train.checkpoints.dying_writer import saved, write
from tests.train.checkpoints.fences import fence_of

MESH = {"data": 1}


def attempt(folder: Path) -> tuple[Checkpoints, Saved | None]:
    """Start an attempt that keeps one checkpoint. Return the checkpoint it resumes from."""
    checkpoints = Checkpoints(
        str(folder), partial(steps_to_keep, last=1, every=None), print, fence_of()
    )
    return checkpoints, checkpoints.restore(saved(0).state, make_mesh(MESH))


def add(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, saved(step), make_mesh(MESH))
    checkpoints.wait()


def step_of(saved: Saved | None) -> int:
    assert saved is not None
    return int(saved.state.step)


def steps_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def test_the_checkpoint_of_an_earlier_attempt_is_kept_until_a_later_one_is_verified(
    tmp_path: Path,
) -> None:
    write(str(tmp_path), 1)
    bad, restored = attempt(tmp_path)
    assert step_of(restored) == 1
    add(bad, 2)
    assert step_of(bad.restore(saved(0).state, make_mesh(MESH))) == 2
    add(bad, 3)
    assert steps_in(tmp_path) == {1, 3}
    # Step 2 has been removed, and is not marked.
    assert bad.mark_suspect("it computes wrong results", wait=True) == [3]
    bad.close()
    assert not (tmp_path / "drumline" / "2.json").exists()
    good, restored = attempt(tmp_path)
    assert step_of(restored) == 1
    good.close()


def test_a_suspect_checkpoint_is_not_used_if_its_replacement_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path), 1)
    bad, _ = attempt(tmp_path)
    add(bad, 2)
    bad.mark_suspect("it computes wrong results", wait=True)
    bad.close()
    second, _ = attempt(tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(second._writer, "save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        add(second, 2)
    second.close()
    third, restored = attempt(tmp_path)
    assert step_of(restored) == 1
    add(third, 2)
    third.close()
    fourth, restored = attempt(tmp_path)
    assert step_of(restored) == 2
    fourth.close()


def test_if_all_checkpoints_are_suspect_a_run_starts_from_scratch_and_replaces_them(
    tmp_path: Path,
) -> None:
    bad, restored = attempt(tmp_path)
    assert restored is None
    add(bad, 2)
    bad.mark_suspect("it computes wrong results", wait=True)
    bad.close()
    good, restored = attempt(tmp_path)
    assert restored is None
    add(good, 2)
    good.close()
    assert step_of(attempt(tmp_path)[1]) == 2


def test_a_host_that_alone_knows_of_a_fault_marks_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, _ = attempt(tmp_path)
    add(bad, 2)
    monkeypatch.setattr(checkpoint, "_is_host_0", lambda: False)
    bad.mark_suspect("it computes wrong results", wait=False)
    bad.close()
    assert (
        json.loads((tmp_path / "drumline" / "2.json").read_text())["suspect"]
        == "it computes wrong results"
    )
