"""Suspect checkpoints of faulty hardware: no run resumes from them, and a good one is kept."""

import json
from functools import partial
from pathlib import Path

import pytest

from drumline.train.checkpoints import checkpoint
from drumline.train.checkpoints.checkpoint import Checkpoints, Saved, steps_to_keep
from drumline.train.mesh import make_mesh
from tests.train.checkpoints.dying_writer import state_on_devices, write
from tests.train.checkpoints.fences import fence_of

MESH = {"data": 1}


def start_attempt(folder: Path) -> tuple[Checkpoints, Saved | None]:
    """Start an attempt that keeps one checkpoint. Return the checkpoint it resumes from."""
    checkpoints = Checkpoints(
        str(folder), partial(steps_to_keep, last=1, every=None), print, fence_of()
    )
    return checkpoints, checkpoints.restore(state_on_devices(0).state, make_mesh(MESH))


def save_checkpoint(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state_on_devices(step), make_mesh(MESH))
    checkpoints.wait()


def step_of(restored: Saved | None) -> int:
    assert restored is not None
    return int(restored.state.step)


def steps_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def test_the_checkpoint_of_an_earlier_attempt_is_kept_until_a_later_one_is_verified(
    tmp_path: Path,
) -> None:
    write(str(tmp_path), 1)
    faulty_attempt, restored = start_attempt(tmp_path)
    assert step_of(restored) == 1
    save_checkpoint(faulty_attempt, 2)
    assert step_of(faulty_attempt.restore(state_on_devices(0).state, make_mesh(MESH))) == 2
    save_checkpoint(faulty_attempt, 3)
    assert steps_in(tmp_path) == {1, 3}
    # Step 2 has been removed, and is not marked.
    assert faulty_attempt.mark_suspect("it computes wrong results", wait=True) == [3]
    faulty_attempt.close()
    assert not (tmp_path / "drumline" / "2.json").exists()
    healthy_attempt, restored = start_attempt(tmp_path)
    assert step_of(restored) == 1
    healthy_attempt.close()


def test_a_suspect_checkpoint_is_not_used_if_its_replacement_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path), 1)
    faulty_attempt, _ = start_attempt(tmp_path)
    save_checkpoint(faulty_attempt, 2)
    faulty_attempt.mark_suspect("it computes wrong results", wait=True)
    faulty_attempt.close()
    second_attempt, _ = start_attempt(tmp_path)

    def fail_to_save(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(second_attempt._writer, "save", fail_to_save)
    with pytest.raises(RuntimeError, match="killed"):
        save_checkpoint(second_attempt, 2)
    second_attempt.close()
    third_attempt, restored = start_attempt(tmp_path)
    assert step_of(restored) == 1
    save_checkpoint(third_attempt, 2)
    third_attempt.close()
    fourth_attempt, restored = start_attempt(tmp_path)
    assert step_of(restored) == 2
    fourth_attempt.close()


def test_if_all_checkpoints_are_suspect_a_run_starts_from_scratch_and_replaces_them(
    tmp_path: Path,
) -> None:
    faulty_attempt, restored = start_attempt(tmp_path)
    assert restored is None
    save_checkpoint(faulty_attempt, 2)
    faulty_attempt.mark_suspect("it computes wrong results", wait=True)
    faulty_attempt.close()
    healthy_attempt, restored = start_attempt(tmp_path)
    assert restored is None
    save_checkpoint(healthy_attempt, 2)
    healthy_attempt.close()
    assert step_of(start_attempt(tmp_path)[1]) == 2


def test_the_only_host_with_a_fault_marks_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_attempt, _ = start_attempt(tmp_path)
    save_checkpoint(faulty_attempt, 2)
    monkeypatch.setattr(checkpoint, "_is_host_0", lambda: False)
    faulty_attempt.mark_suspect("it computes wrong results", wait=False)
    faulty_attempt.close()
    assert (
        json.loads((tmp_path / "drumline" / "2.json").read_text())["suspect"]
        == "it computes wrong results"
    )
