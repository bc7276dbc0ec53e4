"""Checkpoints are complete or ignored, and never restored with wrong bits."""

# mypy: allow-untyped-calls

import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.errors import UserError
from drumline.train import Functions, Settings, fit, load_params
from drumline.train.checkpoints.checkpoint import Checkpoints, Saved, steps_to_keep
from drumline.train.checkpoints.files import COMMITTED
from drumline.train.checkpoints.marks import Marks
from drumline.train.mesh import make_mesh
from drumline.train.state import State
from tests.cases import rare
from tests.train.checkpoints.dying_writer import state_of, state_on_devices, write
from tests.train.checkpoints.fences import fence_of
from tests.train.toy import SHARDED, toy


@dataclass
class Restoring:
    """A starting run with the checkpoint that it restores and its messages."""

    folder: Path
    messages: list[str] = field(default_factory=list)

    def step(self) -> int:
        """Restore a checkpoint, compare every bit with the saved state, and return its step."""
        mesh = make_mesh({"data": 1})
        abstract_state: State = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            state_on_devices(0).state,
        )
        checkpoints = Checkpoints(str(self.folder), set, self.messages.append, fence_of())
        restored = checkpoints.restore(abstract_state, mesh)
        assert isinstance(restored, Saved)
        step = int(restored.state.step)
        arrays, position = state_of(step)
        assert restored.position == position
        assert restored.state.key.tolist() == [0, step]
        for name, array in arrays.items():
            assert np.array_equal(restored.state.params[name], array.astype(np.float32)), name
        return step


# After a failed read, tensorstore may report errors to an event loop that no longer exists.
damaging = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        write(str(folder), step)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("count", [2, *rare(10)])
def test_a_process_killed_at_a_random_byte_of_a_write_loses_no_checkpoint(
    two_checkpoints: Path, tmp_path: Path, count: int
) -> None:
    shutil.copytree(two_checkpoints / "1", tmp_path / "1")
    rng = random.Random(20)
    largest = max(file.stat().st_size for file in (two_checkpoints / "2").rglob("*"))
    # Half of the limits are anywhere in the arrays, the other half within the small metadata files.
    limits = [rng.randrange(largest) for _ in range(count)]
    limits += [rng.randrange(800) for _ in range(count)]
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.train.checkpoints.dying_writer", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer:
        killed = 0
        for limit in limits:
            print(limit, file=writer.stdin, flush=True)
            ending = int(writer.stdout.readline())
            killed += ending != 0
            restoring = Restoring(tmp_path)
            assert restoring.step() == (1 if ending else 2), f"killed at byte {limit}"
            assert restoring.messages == []
            shutil.rmtree(tmp_path / "2", ignore_errors=True)
            assert {path.name for path in tmp_path.iterdir()} == {"1", "drumline"}
            remaining = {path.name for path in (tmp_path / "drumline").iterdir()}
            assert remaining <= ({"2.json"} if ending == 0 else set()), remaining
        assert killed == len(limits)
        writer.stdin.close()


DAMAGES = ("flip", "truncate", "remove")


@damaging
@pytest.mark.parametrize("to_every_file", [False, *rare(True)])
def test_a_damaged_checkpoint_is_never_restored_wrongly(
    two_checkpoints: Path, tmp_path: Path, to_every_file: bool
) -> None:
    files = [
        file.relative_to(two_checkpoints)
        for file in sorted((two_checkpoints / "2").rglob("*"))
        if file.is_file()
    ]
    arrays = max(files, key=lambda file: (two_checkpoints / file).stat().st_size)
    fallbacks = {}
    for index, file in enumerate(files):
        each = to_every_file or file == arrays
        for damage in DAMAGES if each else [DAMAGES[index % len(DAMAGES)]]:
            folder = tmp_path / f"{file.name}-{damage}"
            shutil.copytree(two_checkpoints, folder)
            _damage(folder / file, damage)
            restoring = Restoring(folder)
            step = restoring.step()
            if step == 1 and damage != "remove":
                assert restoring.messages, file
                # Damage to the names of the arrays looks like a different recipe.
                assert re.match(
                    r"checkpoint 2 (is damaged|does not fit the recipe) \(", restoring.messages[0]
                )
                assert restoring.messages[0].endswith("; trying the previous checkpoint")
                assert "\n" not in restoring.messages[0]
            fallbacks[file, damage] = step == 1
            shutil.rmtree(folder)
    assert all(fallbacks[arrays, damage] for damage in DAMAGES)
    assert len(files) >= 8


def _damage(file: Path, damage: str) -> None:
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
        return
    if damage == "flip":
        content[len(content) // 2] ^= 0x10
    else:
        del content[len(content) // 2 :]
    file.write_bytes(content)


@damaging
def test_parameters_load_for_inference_without_recipe_and_mesh(tmp_path: Path) -> None:
    state = fit(toy(30), checkpoint=tmp_path).state
    params = load_params(tmp_path)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert not np.array_equal(load_params(tmp_path, step=10)["body"], params["body"])
    # With shapes that have a sharding, the parameters are JAX arrays with this sharding.
    sharded = load_params(str(tmp_path), like=state.params)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    assert sharded["body"].sharding == state.params["body"].sharding

    def assert_rejected(message: str, **arguments: Any) -> None:
        with pytest.raises(UserError, match=message) as raised:
            load_params(tmp_path, **arguments)
        assert "\n" not in str(raised.value)

    assert_rejected("there is none of step 7 in .*; there are 10, 20, 30", step=7)
    assert_rejected(
        "step 30 in .* does not fit: .* only it has params.head", like={"body": params["body"]}
    )
    Marks(str(tmp_path)).mark_suspect("30", "a chip computes wrong results", 1)
    jax.tree.map(
        np.testing.assert_array_equal, load_params(tmp_path), load_params(tmp_path, step=20)
    )
    (tmp_path / "20" / COMMITTED).unlink()
    (tmp_path / "10" / COMMITTED).unlink()
    assert_rejected("there is no complete checkpoint in ")


@damaging
def test_damaged_parameters_are_never_returned(two_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    whole = load_params(tmp_path)
    files = [file for file in (tmp_path / "2").rglob("*") if file.is_file()]
    arrays = max(files, key=lambda file: file.stat().st_size)
    content = arrays.read_bytes()
    messages = []
    for position in range(0, len(content), max(1, len(content) // 12)):
        arrays.write_bytes(
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]
        )
        try:
            jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path), whole)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 2
    assert all(re.match("checkpoint: step 2 in .* is damaged", text) for text in messages)


@pytest.mark.parametrize(
    "params",
    [
        lambda key: jax.random.normal(key, (16,)),
        lambda key: [jax.random.normal(key, (16,)), {"scale": jnp.ones((), jnp.bfloat16)}],
    ],
)
def test_parameters_that_are_no_nested_dicts_load_with_their_structure(
    params: Any, tmp_path: Path
) -> None:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        weight, *others = params if isinstance(params, list) else [params]
        scale = others[0]["scale"].astype(jnp.float32) if others else 1.0
        return jnp.mean((batch["x"] @ weight * scale - batch["y"]) ** 2)

    state = fit(toy(2, model=Functions(params, loss)), checkpoint=tmp_path).state
    loaded = load_params(tmp_path, like=jax.eval_shape(params, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, loaded, state.params)
    expected = [leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(state.params))]
    assert [leaf.tobytes() for leaf in jax.tree.leaves(load_params(tmp_path))] == expected


@damaging
@pytest.mark.parametrize("count", [4, *rare(12)])
def test_a_flipped_bit_in_the_checksums_is_detected_or_harmless(
    two_checkpoints: Path, tmp_path: Path, count: int
) -> None:
    rng = random.Random(3)
    metadata_files = [
        f for f in (two_checkpoints / "2").rglob("d/*") if f.is_file() and f.stat().st_size < 1000
    ]
    for attempt in range(count):
        folder = tmp_path / str(attempt)
        shutil.copytree(two_checkpoints, folder)
        file = folder / rng.choice(metadata_files).relative_to(two_checkpoints)
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        assert Restoring(folder).step() in (1, 2)
        shutil.rmtree(folder)


@damaging
def test_a_run_without_a_usable_checkpoint_does_not_start_from_scratch(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    for step in ("1", "2"):
        shutil.copytree(two_checkpoints / step, tmp_path / step)
        for file in (tmp_path / step).rglob("d/*"):
            file.write_bytes(b"")
    with pytest.raises(
        UserError, match=r"none of the 2 in .* can be used: checkpoint 2 is damaged"
    ):
        Restoring(tmp_path).step()


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    fit(toy(2), checkpoint=tmp_path)
    model = replace(SHARDED, init=_wider_init)
    with pytest.raises(UserError) as raised:
        fit(toy(4, model=model), checkpoint=tmp_path)
    assert "checkpoint 2 does not fit the recipe (" in str(raised.value)
    assert "body has shape (16, 8) there and (16, 24) in the recipe" in str(raised.value)
    assert (tmp_path / "2").exists()


def _wider_init(key: jax.Array) -> dict[str, jax.Array]:
    return {"body": jax.random.normal(key, (16, 24)), "head": jax.numpy.ones(24)}


@pytest.mark.parametrize(
    ("steps", "last", "keep_every", "kept"),
    [
        (range(10, 70, 10), 2, None, {50, 60}),
        (range(10, 70, 10), 2, 30, {30, 50, 60}),
        (range(10, 70, 10), 9, None, {10, 20, 30, 40, 50, 60}),
        ([60, 10, 40], 1, 20, {40, 60}),
        ([], 3, 5, set()),
    ],
)
def test_steps_to_keep(
    steps: Iterable[int], last: int, keep_every: int | None, kept: set[int]
) -> None:
    assert steps_to_keep(steps, last, keep_every) == kept


def test_a_run_keeps_the_last_checkpoints_and_those_at_multiples(tmp_path: Path) -> None:
    fit(toy(14, save_every=2, keep_last=2, keep_every=6), checkpoint=tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.name.isdigit()} == {"6", "12", "14"}


def test_pruning_removes_a_link_and_nothing_that_it_leads_to(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    fit(toy(4, save_every=2, keep_last=2), checkpoint=folder)
    (folder / "2").rename(outside)
    (folder / "2").symlink_to(outside)
    before = sorted(path.name for path in outside.iterdir())
    fit(toy(10, save_every=2, keep_last=2), checkpoint=folder)
    assert not os.path.lexists(folder / "2")
    assert sorted(path.name for path in outside.iterdir()) == before


@damaging
def test_a_damaged_checkpoint_is_replaced_and_does_not_count_as_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(toy(6, save_every=2, keep_last=2), checkpoint=tmp_path)
    for file in (tmp_path / "6").rglob("d/*"):
        _damage(file, "truncate")
    capsys.readouterr()
    result = fit(toy(6, save_every=2, keep_last=2), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "checkpoint 6 is damaged" in output
    assert "resuming from step 4" in output
    assert result.step == 6
    fit(toy(6, save_every=2, keep_last=2), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "resuming from step 6" in output
    assert "damaged" not in output
    assert {path.name for path in tmp_path.iterdir() if path.name.isdigit()} == {"4", "6"}


def test_intervals_are_positive() -> None:
    with pytest.raises(UserError, match="save_every: 0 is not a number of steps; use 1 or more"):
        Settings(save_every=0)
    with pytest.raises(UserError, match="keep_every: -1 is not a number of steps"):
        Settings(keep_every=-1)


def test_other_files_in_the_folder_are_never_removed(tmp_path: Path) -> None:
    for name in ("2024", "7.orbax-notes", "old.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.txt").write_text("mine")
    (tmp_path / "2025").write_text("a file with a number for a name")
    # A checkpoint of replicated parameters is verified, so the previous one may be removed.
    copies = Functions(SHARDED.init, SHARDED.loss)
    fit(toy(4, model=copies, save_every=2, keep_last=1), checkpoint=tmp_path)
    fit(toy(6, model=copies, save_every=2, keep_last=1), checkpoint=tmp_path)
    for name in ("2024", "7.orbax-notes", "old.orbax-checkpoint-tmp"):
        assert (tmp_path / name / "photo.txt").read_text() == "mine"
    assert (tmp_path / "2025").exists()
    assert (tmp_path / "6").exists()
    assert not (tmp_path / "4").exists()


def test_a_folder_with_the_name_of_a_future_checkpoint_is_rejected_at_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "photo.txt").write_text("mine")
    with pytest.raises(UserError) as raised:
        fit(toy(6), checkpoint=tmp_path)
    assert str(raised.value) == (
        f"checkpoint: {tmp_path / '4'} was not written by Drumline, and step 4 would be saved "
        "there; move it away, or name another folder"
    )
    assert (tmp_path / "4" / "photo.txt").read_text() == "mine"


def test_incomplete_checkpoints_are_removed_at_the_next_start(tmp_path: Path) -> None:
    fit(toy(4, save_every=2), checkpoint=tmp_path)
    (tmp_path / "4" / COMMITTED).unlink()
    (tmp_path / "6.orbax-checkpoint-tmp").mkdir()
    result = fit(toy(4, save_every=2), checkpoint=tmp_path)
    assert result.step == 4
    assert (tmp_path / "4" / COMMITTED).exists()
    assert not (tmp_path / "6.orbax-checkpoint-tmp").exists()


def test_checkpoints_of_another_program_are_never_removed(tmp_path: Path) -> None:
    fit(toy(2), checkpoint=tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "2", tmp_path / "run" / "1")
    checkpoints = Checkpoints(str(tmp_path / "run"), lambda steps: {max(steps)}, print, fence_of())
    for step in (3, 4):
        checkpoints.save(step, state_on_devices(step), make_mesh({"data": 1}))
    checkpoints.close()
    assert {p.name for p in (tmp_path / "run").iterdir() if p.name.isdigit()} == {"1", "4"}


@pytest.mark.parametrize(
    ("message", "printed"), [("Event loop is closed", False), ("the disk is full", True)]
)
def test_a_thread_that_reports_to_a_closed_loop_does_not_break_up_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str, printed: bool
) -> None:
    Checkpoints(str(tmp_path), set, print, fence_of()).close()
    error = RuntimeError(message)
    thread = threading.Thread(target=sys.excepthook, args=(RuntimeError, error, None))
    thread.start()
    thread.join()
    assert (message in capsys.readouterr().err) is printed
    sys.excepthook(RuntimeError, error, None)
    assert message in capsys.readouterr().err
