"""Resuming with a changed recipe: the messages, the refusals, and the data position."""

# mypy: allow-untyped-calls

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from drumline.errors import UserError
from drumline.models import MLP
from drumline.train import Data, Recipe, data, fingerprint, fit
from drumline.train.batches import BatchLoader
from drumline.train.checkpoints import checkpoint
from drumline.train.checkpoints.provenance import find_changes, hash_records, provenance
from drumline.train.mesh import make_mesh
from drumline.train.state import abstract_state
from drumline.train.steps.step import trace_loss
from tests.train import toy as toys
from tests.train.toy import ROWS, SHARDED


def toy(steps: int, **settings: Any) -> Recipe:
    """Return the toy on one device, which compiles quickly."""
    return toys.toy(steps, **{"mesh": 1, **settings})


def with_data(steps: int, **of_data: Any) -> Recipe:
    """Return the toy with changed data."""
    return replace(toy(steps), data=replace(toy(steps).data, **of_data))


def double_init(key: Any) -> Any:
    return jax.tree.map(lambda array: 2 * array, SHARDED.init(key))


def double_loss(params: Any, batch: Any, key: Any) -> Any:
    value, metrics = SHARDED.loss(params, batch, key)
    return 2 * value, metrics


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of the toy that ended after six steps."""
    folder = tmp_path_factory.mktemp("six")
    fit(toy(6), checkpoint=folder)
    return folder


OTHER_ROWS = {name: column[::-1].copy() for name, column in ROWS.items()}
FEWER_ROWS = {name: column[:100] for name, column in ROWS.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: with_data(8, batch=8), "batch 16 → 8"),
        (lambda: with_data(8, seed=8), "data seed 7 → 8"),
        (lambda: with_data(8, shuffle=False), "data shuffle True → False"),
        (lambda: replace(toy(8), data=data.arrays(FEWER_ROWS, batch=16, seed=7)), "data of 203 →"),
        (lambda: replace(toy(8), data=data.arrays(OTHER_ROWS, batch=16, seed=7)), "other records"),
        (lambda: toy(8, seed=1), "seed 0 → 1"),
        (lambda: replace(toy(8), optimizer=optax.adam(0.01)), "optimizer's numbers 0.02 → 0.01"),
        (
            lambda: replace(toy(8), optimizer=optax.adam(0.02, nesterov=True)),
            "the optimizer computes something else",
        ),
        (
            lambda: toy(8, model=replace(SHARDED, loss=double_loss)),
            "the model's loss computes something",
        ),
        (
            lambda: toy(8, model=replace(SHARDED, init=double_init)),
            "the model's parameters are initialized differently",
        ),
    ],
)
def test_a_breaking_change_is_described(change: Callable[[], Recipe], message: str) -> None:
    (difference,) = (
        change for change in find_changes(origin(toy(8)), origin(change())) if change.breaking
    )
    assert message in difference.text


def origin(recipe: Recipe) -> dict[str, Any]:
    """Return the record of a run's origin without running it."""
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        state = abstract_state(recipe, mesh)
        batch = BatchLoader(recipe.data, mesh, recipe.model.batch_spec()).shapes()
        traced = trace_loss(recipe.model, state.params, batch).jaxpr
        recorded = provenance(recipe, mesh, state, traced)
    assert json.loads(json.dumps(recorded)) == recorded
    return recorded


def test_a_changed_recipe_is_refused_and_changes_no_file(six_steps: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in six_steps.glob("[0-9]*/*")}
    with pytest.raises(UserError) as raised:
        fit(replace(toy(8, seed=1), optimizer=optax.adam(0.01)), checkpoint=six_steps)
    assert str(raised.value) == (
        f"checkpoint: step 6 in {six_steps} comes from another recipe (seed 0 → 1; the "
        "optimizer's numbers 0.02 → 0.01), and resuming would give the result of neither; change "
        "it back, name another folder, or allow it with --allow-changes or "
        "fit(…, allow_changes=True)"
    )
    assert {path: path.stat().st_mtime_ns for path in six_steps.glob("[0-9]*/*")} == before


def small_mlp(**sizes: Any) -> Recipe:
    columns = {"image": np.zeros((8, 4), np.float32), "label": np.zeros(8, np.int32)}
    model = MLP(input_dim=4, num_classes=2, **{"hidden_sizes": (8,), **sizes})
    return replace(toy(8, mesh=4), model=model, data=data.arrays(columns, batch=8))


def test_models_are_compared_by_their_sizes_but_not_their_layout() -> None:
    before = origin(small_mlp())
    (size_change,) = find_changes(before, origin(small_mlp(hidden_sizes=(16,))))
    assert size_change.text == "model hidden_sizes (8,) → (16,)"
    assert size_change.breaking
    (layout_change,) = find_changes(before, origin(small_mlp(layout="fsdp")))
    assert layout_change.text == "model layout data → fsdp"
    assert not layout_change.breaking


def test_a_new_option_of_a_model_is_no_change_until_it_is_used() -> None:
    after, before = origin(small_mlp()), origin(small_mlp())
    # Remove the fields that an older version without the option and its default did not write.
    del before["model"]["sizes"]["compute_dtype"], before["model"]["defaults"]
    assert find_changes(before, after) == ()
    assert find_changes(after, before) == (), "the older version can also resume"
    after["model"]["sizes"]["compute_dtype"] = "bfloat16"
    (option_change,) = find_changes(before, after)
    assert (option_change.text, option_change.breaking) == (
        "model compute_dtype float32 → bfloat16",
        True,
    )


def test_pretrained_parameters_are_resumed() -> None:
    weights = jax.tree.map(np.asarray, SHARDED.init(jax.random.key(0)))
    shifted_weights = jax.tree.map(lambda array: array + 1, weights)
    before = origin(toy(8, model=replace(SHARDED, init=lambda _: weights)))
    after = origin(toy(8, model=replace(SHARDED, init=lambda _: shifted_weights)))
    assert find_changes(before, after) == ()


def test_a_checkpoint_without_a_record_of_the_initialization_is_resumed() -> None:
    before, after = origin(toy(8)), origin(toy(8))
    del before["model"]["init"]
    assert find_changes(before, after) == ()


def test_the_same_recipe_resumes_on_other_chips() -> None:
    after = origin(toy(8))
    # The model's trace may differ on other chips. It is still the same model.
    model = {**after["model"], "loss": "as traced for a TPU"}
    before = {**after, "devices": "TPU v4", "hosts": 2, "model": model}
    texts = [change.text for change in find_changes(before, after) if not change.breaking]
    assert texts == [
        f"devices TPU v4 → {after['devices']}, so losses agree to rounding",
        "hosts 2 → 1, so losses agree to rounding",
    ]
    assert not any(change.breaking for change in find_changes(before, after))


def test_across_versions_of_jax_programs_are_not_compared() -> None:
    before, after = origin(toy(8)), origin(replace(toy(8), optimizer=optax.adam(0.01)))
    old = {**before, "versions": {**before["versions"], "jax": "0.9.0"}}
    changes = find_changes(old, after)
    assert not any(change.breaking for change in changes)
    assert "the optimizer, which cannot be compared across versions" in [c.text for c in changes]
    assert any(change.text.startswith("jax 0.9.0 → ") for change in changes)


def test_a_harmless_change_is_logged_and_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(toy(2), checkpoint=tmp_path)
    capsys.readouterr()
    fit(toy(3, mesh=2, save_every=1, log_every=3), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "since that checkpoint: mesh data=1 → data=2, so losses agree to rounding" in output
    assert "steps 2 → 3" in output
    fit(toy(3, mesh=2), checkpoint=tmp_path)
    assert "since that checkpoint" not in capsys.readouterr().out


def batch_sums(recipe: Recipe, folder: Path, **options: Any) -> list[int]:
    """Return the sum of the record numbers in each batch of the run so far."""
    fit(recipe, checkpoint=folder, **options)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [int(json.loads(line)["numbers"]) for line in lines]


def test_with_another_batch_size_no_record_is_skipped_or_used_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_order = {"shuffle": False}
    batch_sums(with_data(3, **in_order), tmp_path)
    capsys.readouterr()
    sums = batch_sums(with_data(7, batch=8, **in_order), tmp_path, allow_changes=True)
    assert "the recipe changes here, as allowed: batch 16 → 8" in capsys.readouterr().out
    starts = [(0, 16), (16, 16), (32, 16), (48, 8), (56, 8), (64, 8), (72, 8)]
    assert sums == [sum(range(start, start + size)) for start, size in starts]
    # The first batch starts off a multiple of its size, and the change is now part of the recipe.
    sums = batch_sums(with_data(9, batch=32, **in_order), tmp_path, allow_changes=True)
    assert sums[7:] == [sum(range(80, 112)), sum(range(112, 144))]
    capsys.readouterr()
    fit(with_data(9, batch=32, **in_order), checkpoint=tmp_path)
    assert "the recipe changes" not in capsys.readouterr().out


def test_a_run_resumes_from_a_checkpoint_of_version_0_1_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = fit(toy(5), checkpoint=None)
    # Version 0.1 wrote the position as a number of batches, and no mark.
    monkeypatch.setattr(checkpoint, "RECORDS", checkpoint.OLD_POSITION)
    monkeypatch.setattr(checkpoint, "_to_words", lambda array: np.asarray(array // 16, np.int32))
    fit(toy(3), checkpoint=tmp_path)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "drumline")
    capsys.readouterr()
    result = fit(toy(5), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "this checkpoint does not record its recipe and data; no changes are assumed" in output
    assert fingerprint(result.state) == fingerprint(undisturbed.state)


def test_a_flipped_bit_in_a_mark_is_not_a_change_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(toy(2), checkpoint=tmp_path)
    mark = tmp_path / "drumline" / "2.json"
    mark.write_text(mark.read_text().replace('"batch": 16', '"batch": 17'))
    capsys.readouterr()
    assert fit(toy(3), checkpoint=tmp_path).step == 3
    assert "does not record its recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.adam(0.02, mu_dtype="bfloat16"),
            "opt_state.0.mu.body has type float32 there and bfloat16 in the recipe",
        ),
        (
            optax.sgd(0.02, momentum=0.9),
            "it is of another optimizer: only it has opt_state.0.count and 4 more and only the "
            "recipe has opt_state.0.trace.body and 1 more",
        ),
    ],
)
def test_a_different_optimizer_is_described(
    six_steps: Path, optimizer: optax.GradientTransformation, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        fit(replace(toy(8), optimizer=optimizer), checkpoint=six_steps)
    assert f"checkpoint 6 does not fit the recipe ({message})" in str(raised.value)
    assert "damaged" not in str(raised.value)


def test_records_that_are_not_reproducible_have_no_hash() -> None:
    rng = np.random.default_rng(0)

    class Augmented:
        def __len__(self) -> int:
            return 5

        def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": rng.normal(size=len(numbers))}

    assert hash_records(Data(Augmented(), batch=1)) is None
    record_hash = hash_records(data.arrays(ROWS, batch=16))
    assert record_hash == hash_records(data.arrays(ROWS, batch=8, shuffle=False))
    assert record_hash != hash_records(data.arrays(OTHER_ROWS, batch=16))


def test_a_schedule_of_another_length_is_a_breaking_change() -> None:
    def made(steps: int) -> Recipe:
        optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))
        return replace(toy(steps), optimizer=optimizer)

    first, second = find_changes(origin(made(2)), origin(made(4)))
    assert first.text == "the optimizer's numbers 2 → 4"
    assert first.breaking
    assert second.text == "steps 2 → 4"


def test_a_learning_rate_in_the_optimizer_state_is_compared() -> None:
    def made(rate: float) -> Recipe:
        injected = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return replace(toy(8), optimizer=injected)

    (change,) = find_changes(origin(made(0.1)), origin(made(0.2)))
    assert change.text == "the optimizer's numbers 0.1 → 0.2"
