"""The code in docs/own-model.md runs, as it stands there."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.spec import parse
from drumline.train import Evaluation, fit
from drumline.train.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "own-model.md").read_text(encoding="utf-8")
FIRST, *REST = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_config_trains_is_evaluated_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(FIRST)
    words = [str(tmp_path / "train.py"), "--checkpoint", str(tmp_path / "run")]
    assert main([*words, "--set", "steps=150"]) == 0
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "going on from step 150" in said
    (accuracy,) = re.findall(r"done: step 300 .* eval accuracy (\S+)", said)
    assert float(accuracy) > 0.95
    assert main([*words, "--set", "batch=32", "--set", "learning_rate=0.003"]) == 2
    refused = capsys.readouterr().err
    told = "(batch 64 → 32; the optimizer's numbers 0.01 → 0.003)"
    assert told in refused
    assert told in PAGE


def test_what_comes_after_it_runs_too() -> None:
    page: dict[str, Any] = {}
    for block in (FIRST, *REST):
        exec(compile(block, "docs/own-model.md", "exec"), page)  # noqa: S102
    made = page["recipe"](steps=1)
    with_squares = Evaluation(replace(page["squares"], batch=8), page["measure"])
    result = fit(replace(made, model=page["sharded"], evaluation=with_squares))
    assert {"eval_error", "eval_square", "eval_far"} <= result.metrics.keys()
    assert fit(replace(made, model=page["module"], evaluation=None)).metrics["loss"] > 0


def test_the_job_file_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    assert parse(text, source="job.yaml", folder=tmp_path)


def test_the_page_can_be_found() -> None:
    assert "(docs/own-model.md)" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert "(own-model.md)" in (DOCS / "training.md").read_text(encoding="utf-8")
