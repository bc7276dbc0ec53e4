"""`drumline numerics topk`."""

import json
from typing import Any

import pytest
from jax import lax

from drumline.numerics import topk_survey
from tests.cli.test_chips import run

QUICK = ("numerics", "topk", "--length", "200", "--k", "10")


def test_an_exact_device_shows_no_recall(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*QUICK) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == 1 + len(topk_survey.DISTRIBUTIONS) + 2
    assert "exact at every target recall" in lines[-1]
    assert "it is approximate only on TPUs" in lines[-1]


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*QUICK, "--recall", "0.5,0.99", "--json") == 0
    survey = json.loads(capsys.readouterr().out)
    assert survey["exact"] is True
    assert {case["recall_asked"] for case in survey["cases"]} == {0.5, 0.99}
    assert all(case["recall_worst"] == 1.0 for case in survey["cases"])


def test_a_broken_contract_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loses_the_maximum(x: Any, k: int, recall_target: float) -> Any:
        del recall_target
        values, indices = lax.top_k(x, k + 1)
        return values[..., 1:], indices[..., 1:]

    topk_survey._compile_approx_max_k.cache_clear()
    monkeypatch.setattr(lax, "approx_max_k", loses_the_maximum)
    try:
        assert run(*QUICK, "--recall", "0.9") == 1
    finally:
        topk_survey._compile_approx_max_k.cache_clear()
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "broke its contract" in verdict
    assert "maximum missing at" in verdict


def test_rows_with_nan_have_their_own_verdict() -> None:
    good = topk_survey.TopKCase("normal", "bfloat16", 200, 10, 0.95, 1.0, 1.0, ())
    nan = topk_survey.TopKCase("nan", "bfloat16", 200, 10, 0.95, 0.8, 0.4, ("maximum missing",) * 7)
    assert topk_survey.TopKSurvey("cpu", (good, nan)).verdict == (
        "approx_max_k cannot order rows with NaN on cpu: 7 violations there "
        "(bfloat16: maximum missing); it was exact on all other rows"
    )


def test_an_approximate_device_shows_its_recall() -> None:
    near = topk_survey.TopKCase("ties", "float32", 200, 10, 0.95, 0.953, 0.9, ())
    far = topk_survey.TopKCase("normal", "float32", 200, 10, 0.95, 0.99, 0.9, ())
    assert topk_survey.TopKSurvey("TPU v4", (near, far)).verdict == (
        "no violation: approx_max_k kept its recall on TPU v4; nearest to its target was ties, "
        "0.9530 for 0.95"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "300", "--length", "200"], "k: rows have 200 elements, so 300 is out of range"),
        (["--k", "0"], "k: rows have 8192 elements, so 0 is out of range"),
        (["--k", "ten"], "--k: 'ten' is not made of whole numbers"),
        (["--k", "1.5"], "--k: '1.5'"),
        (["--length", ""], "--length: ''"),
        (["--recall", "0"], "recall: 0.0"),
        (["--recall", "nan"], "recall: nan"),
        (["--recall", "1.1"], "recall: 1.1"),
        (["--dtype", "int8"], "dtype: 'int8'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("numerics", "topk", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert len(captured.err.splitlines()) == 1
