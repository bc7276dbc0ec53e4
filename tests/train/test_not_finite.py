"""Non-finite losses and gradients: the policies, and the reported source."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.train import Ending, Functions, Recipe, data, fingerprint, fit
from drumline.train.steps.bad_batches import find_host
from tests.train.toy import ROWS, toy

BATCH, BAD = 16, 5


def with_rows(rows: dict[str, np.ndarray], steps: int, **settings: Any) -> Recipe:
    """Return the toy on these rows, in their own order."""
    source = data.arrays(rows, batch=BATCH, shuffle=False)
    recipe_made = toy(steps, **{"save_every": 2, **settings})
    model = Functions(recipe_made.model.init, without_dropout, specs=recipe_made.model.specs)
    return replace(recipe_made, data=source, model=model)


def without_dropout(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """Return the loss independent of the step number, so that different runs are comparable."""
    del key
    error = jnp.tanh(batch["x"] @ params["body"]) @ params["head"] - batch["y"]
    return jnp.mean(error**2), {}


def rows_with_nan(value: float = np.nan) -> dict[str, np.ndarray]:
    """Return rows with one NaN, in batch 5."""
    rows = {name: column.copy() for name, column in ROWS.items()}
    rows["x"][BAD * BATCH + 3, 2] = value
    return rows


def without_the_bad_batch() -> dict[str, np.ndarray]:
    bad_rows = slice(BAD * BATCH, (BAD + 1) * BATCH)
    return {name: np.delete(column, bad_rows, axis=0) for name, column in ROWS.items()}


def test_stop_ends_the_run_with_the_last_good_state_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(with_rows(rows_with_nan(), 12), checkpoint=tmp_path)
    assert result.ending is Ending.NOT_FINITE
    assert result.ending.exit_code == 1
    message = "step 6: non-finite value from batch 5, first on host 0 of 1, in parameter group body"
    assert result.report == f"{message} and 1 more"
    assert message in capsys.readouterr().out
    assert result.step == 5
    clean_run = fit(with_rows(ROWS, 5), checkpoint=None)
    assert fingerprint(result.state) == fingerprint(clean_run.state)
    assert {path.name for path in tmp_path.iterdir() if path.name.isdigit()} == {"2", "4"}


def test_skip_keeps_the_state_from_before_the_step(tmp_path: Path) -> None:
    result = fit(with_rows(rows_with_nan(np.inf), 12, nan="skip"), checkpoint=tmp_path)
    assert result.ending is Ending.DONE
    assert result.step == 12
    expected = fit(with_rows(without_the_bad_batch(), 11)).state
    assert fingerprint(result.state.params) == fingerprint(expected.params)
    assert fingerprint(result.state.opt_state) == fingerprint(expected.opt_state)
    assert "step 6: non-finite value from batch 5" in result.report


def test_rollback_gives_the_same_bits_as_data_without_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = fit(with_rows(without_the_bad_batch(), 8)).state
    capsys.readouterr()
    result = fit(with_rows(rows_with_nan(), 8, nan="rollback"), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert result.ending is Ending.DONE
    assert "resuming from step 4" in output
    assert "leaving out batch 5" in output
    assert fingerprint(result.state) == fingerprint(expected)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    # A skipped batch stays skipped after the run is stopped and resumed.
    resumed = fit(with_rows(rows_with_nan(), 9, nan="rollback"), checkpoint=tmp_path)
    assert "non-finite value" not in capsys.readouterr().out
    assert resumed.report == ""
    assert fingerprint(resumed.state) == fingerprint(
        fit(with_rows(without_the_bad_batch(), 9)).state
    )


def test_rollback_gives_up_after_three_failures_at_one_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {**ROWS, "y": ROWS["y"].copy()}
    rows["y"][4 * BATCH :] = np.nan
    result = fit(with_rows(rows, 12, nan="rollback"))
    assert result.ending is Ending.NOT_FINITE
    assert result.step == 4
    output = capsys.readouterr().out
    assert output.count("leaving out batch") == 3
    assert "rolled back 3 times without getting past step 5" in output


def test_a_non_finite_gradient_alone_is_reported_with_its_group() -> None:
    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        value, metrics = without_dropout(params, batch, key)
        # The square root of zero is zero, but its gradient is not finite.
        return value + jnp.sqrt(jnp.sum(params["head"] ** 2) * batch["number"].min()), metrics

    rows = {**ROWS, "number": ROWS["number"] + 1}
    rows["number"][2 * BATCH + 1] = 0
    recipe_made = with_rows(rows, 6)
    result = fit(replace(recipe_made, model=replace(toy().model, loss=loss)))  # type: ignore[type-var]
    assert result.ending is Ending.NOT_FINITE
    assert result.report == (
        "step 3: non-finite value from batch 2, first on host 0 of 1, in parameter group head"
    )


def test_the_reported_host_is_the_first_whose_own_rows_are_bad() -> None:
    hosts = {0: np.arange(0, 4), 1: np.arange(4, 8), 2: np.arange(8, 12)}

    def host_of(*bad: int) -> int | None:
        def finite(rows: np.ndarray) -> jax.Array:
            assert len(rows) == 12
            return jnp.asarray(not set(bad) & set(rows.tolist()))

        return find_host(finite, 12, hosts)

    assert host_of(6, 9) == 1
    assert host_of(0) == 0
    assert host_of() is None
    shared = {0: np.arange(12), 1: np.arange(12)}
    assert find_host(lambda rows: jnp.asarray(len(rows) == 0), 12, shared) is None


def early_non_finite_loss(params: Any, batch: Any, key: Any) -> jax.Array:
    """Return a non-finite loss for a marked row with early parameters.

    With later parameters the same batch has a finite loss.
    """
    del key
    error = jnp.tanh(batch["x"] @ params["body"]) @ params["head"] - batch["y"]
    parameter_change = jnp.abs(params["head"] - 0.3).max()
    is_marked = batch["number"].min() == BAD * BATCH
    is_early = parameter_change < 0.02 * (BAD + 0.5)
    return jnp.mean(error**2) + jnp.where(is_marked & is_early, jnp.nan, 0.0)


def test_a_skipped_batch_is_recomputed_with_the_parameters_with_which_it_failed() -> None:
    recipe_made = replace(with_rows(ROWS, 12, nan="skip", save_every=100), mesh={"data": 1})
    model = Functions(recipe_made.model.init, early_non_finite_loss)
    result = fit(replace(recipe_made, model=model))
    assert result.ending is Ending.DONE
    assert result.step == 12
    assert result.report.startswith("step 6: non-finite value from batch 5, first on host 0 of 1")
    assert "hardware" not in result.report


def test_many_skipped_batches_give_the_same_bits_as_data_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 36 batches of four rows, every third has a NaN row: twelve in all.
    rows = {name: column.copy() for name, column in ROWS.items()}
    rows["x"][8:144:12] = np.nan
    without_nan = np.delete(np.arange(144), [n for n in range(144) if n // 4 % 3 == 2])

    def recipe_made(columns: dict[str, np.ndarray], steps: int) -> Recipe:
        source = data.arrays(columns, batch=4, shuffle=False)
        recipe = with_rows(columns, steps, nan="skip", save_every=100)
        return replace(recipe, data=source, mesh={"data": 1})

    result = fit(recipe_made(rows, 36), checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert output.count("non-finite value from batch") == 12
    assert output.count("first on host 0 of 1") == 10
    assert "step 36: non-finite value from batch 35\n" in output
    expected = fit(
        recipe_made({name: column[without_nan] for name, column in ROWS.items()}, 24)
    ).state
    assert fingerprint(result.state.params) == fingerprint(expected.params)
    assert result.step == 36
    # A run that resumes from its last step takes no batch.
    assert fit(recipe_made(rows, 36), checkpoint=tmp_path).step == 36


class Augmented:
    """Rows with an unseeded augmentation that divides by zero the first time."""

    def __init__(self, columns: dict[str, np.ndarray], row: int) -> None:
        self.columns, self.row, self.readings = columns, row, 0

    def __len__(self) -> int:
        return len(self.columns["x"])

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        rows = {name: column[numbers].copy() for name, column in self.columns.items()}
        if self.row in numbers:
            self.readings += 1
            if self.readings == 1:
                rows["x"][numbers == self.row] = np.nan
        return rows


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_rows_that_are_not_reproducible_are_not_a_hardware_fault(policy: str) -> None:
    recipe_made = with_rows(ROWS, 8, nan=policy)
    records = Augmented(ROWS, row=BAD * BATCH + 3)
    result = fit(replace(recipe_made, data=data.Data(records, batch=BATCH, shuffle=False)))
    assert result.report.startswith("step 6: non-finite value from batch 5, first on host 0 of 1")
    assert "hardware" not in result.report
