"""Checkpoints of hardware that computed wrong: nobody goes on from one, and a good one is left."""

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
    """One more attempt, which keeps one checkpoint, and what it goes on from."""
    checkpoints = Checkpoints(
        str(folder), partial(steps_to_keep, last=1, every=None), print, fence_of()
    )
    return checkpoints, checkpoints.restore(saved(0).state, make_mesh(MESH))


def add(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, saved(step), make_mesh(MESH))
    checkpoints.wait()


def step_of(found: Saved | None) -> int:
    assert found is not None
    return int(found.state.step)


def there(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def test_what_other_hardware_left_outlives_a_rollback_and_the_next_goes_on_from_it(
    tmp_path: Path,
) -> None:
    write(str(tmp_path), 1)
    bad, found = attempt(tmp_path)
    assert step_of(found) == 1
    add(bad, 2)
    assert step_of(bad.restore(saved(0).state, make_mesh(MESH))) == 2
    add(bad, 3)
    assert there(tmp_path) == {1, 3}
    # Of what is gone there is nothing to say.
    assert bad.mark_suspect("it lies", wait=True) == [3]
    bad.close()
    assert not (tmp_path / "drumline" / "2.json").exists()
    good, found = attempt(tmp_path)
    assert step_of(found) == 1
    good.close()


def test_killed_before_a_suspect_one_is_written_anew_it_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path), 1)
    bad, _ = attempt(tmp_path)
    add(bad, 2)
    bad.mark_suspect("it lies", wait=True)
    bad.close()
    second, _ = attempt(tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(second._writer, "save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        add(second, 2)
    second.close()
    third, found = attempt(tmp_path)
    assert step_of(found) == 1
    add(third, 2)
    third.close()
    fourth, found = attempt(tmp_path)
    assert step_of(found) == 2
    fourth.close()


def test_where_all_are_suspect_a_run_begins_anew_and_writes_over_them(tmp_path: Path) -> None:
    bad, found = attempt(tmp_path)
    assert found is None
    add(bad, 2)
    bad.mark_suspect("it lies", wait=True)
    bad.close()
    good, found = attempt(tmp_path)
    assert found is None
    add(good, 2)
    good.close()
    assert step_of(attempt(tmp_path)[1]) == 2


def test_a_host_that_found_it_alone_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, _ = attempt(tmp_path)
    add(bad, 2)
    monkeypatch.setattr(checkpoint, "_is_host_0", lambda: False)
    bad.mark_suspect("it lies", wait=False)
    bad.close()
    assert json.loads((tmp_path / "drumline" / "2.json").read_text())["suspect"] == "it lies"
