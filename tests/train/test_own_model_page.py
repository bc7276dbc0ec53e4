"""The code in docs/own-model.md runs unchanged."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from drumline.cli.init import EXAMPLE
from drumline.jobs.spec import parse
from drumline.train import Evaluation, data, fit
from drumline.train.__main__ import main
from drumline.train.checkpoints.provenance import find_changes
from tests.train.checkpoints.test_changed_recipe import origin

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "own-model.md").read_text(encoding="utf-8")
FIRST, *REST = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_config_trains_evaluates_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(FIRST)
    arguments = [str(tmp_path / "train.py"), "--checkpoint", str(tmp_path / "run")]
    assert main([*arguments, "--set", "steps=10"]) == 0
    assert main([*arguments, "--set", "steps=200"]) == 0
    output = capsys.readouterr().out
    assert "resuming from step 10" in output
    (accuracy,) = re.findall(r"done: step 200 .* eval accuracy (\S+)", output)
    assert float(accuracy) > 0.95


def test_init_writes_the_program_of_the_page() -> None:
    assert f"# train.py\n{(EXAMPLE / 'train.py').read_text()}" == FIRST


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return the definitions of the page, from its first block to its last."""
    names: dict[str, Any] = {}
    for block in (FIRST, *REST):
        exec(compile(block, "docs/own-model.md", "exec"), names)  # noqa: S102
    return names


def test_the_other_code_on_the_page_runs(page: dict[str, Any]) -> None:
    recipe_made = replace(page["recipe"](steps=1), mesh={"data": 1})
    with_squares = Evaluation(page["squares"], page["measure"])
    result = fit(replace(recipe_made, model=page["sharded"], evaluation=with_squares))
    assert {"eval_error", "eval_square", "eval_far"} <= result.metrics.keys()
    x, y = page["rows"](10, seed=2).values()
    weighted = {"x": x, "y": y, "weight": np.array([1, 0, 1, 1, 0, 0, 2, 0, 0, 1], np.float32)}
    masked = replace(recipe_made, model=page["masked"], optimizer=optax.sgd(0.0))
    batches = (data.arrays(weighted, batch=size) for size in (10, 4))
    whole, parts = (fit(replace(masked, data=d, evaluation=Evaluation(d))) for d in batches)
    assert whole.metrics["eval_loss"] == pytest.approx(parts.metrics["eval_loss"], rel=1e-6)
    assert whole.metrics["eval_loss"] == pytest.approx(whole.metrics["loss"], rel=1e-6)
    assert origin(replace(recipe_made, model=page["module"]))["model"]["kind"] == "Functions"


def test_the_page_shows_the_actual_message_about_a_change(page: dict[str, Any]) -> None:
    recipe = page["recipe"]
    before, after = origin(recipe()), origin(recipe(batch=32, learning_rate=0.003))
    assert f"({'; '.join(change.text for change in find_changes(before, after))})" in PAGE


def test_the_job_file_on_the_page_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    assert parse(text, source="job.yaml", folder=tmp_path)


def test_the_page_is_linked() -> None:
    assert "(docs/own-model.md)" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert "(own-model.md)" in (DOCS / "training.md").read_text(encoding="utf-8")
