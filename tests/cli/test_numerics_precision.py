"""`drumline numerics precision`."""

import json
import sys
from pathlib import Path

import pytest

from drumline.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "numerics" / "dropped_token.py"
SAMPLER = """\
import jax.numpy as jnp
import numpy as np

def inputs():
    return np.linspace(-3, 3, 4096, dtype=np.float32).reshape(8, 512), np.float32(3.1)

def few():
    return np.ones((2, 2), np.float32), np.float32(2)

def rounded(x, scale):
    short = x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return {"scores": short.astype(jnp.float32) + 1, "shape": jnp.array(x.shape)}

def sums(x, scale):
    return x + scale
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_error:
        main(["numerics", "precision", *arguments])
    code = exit_error.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sampler", raising=False)
    (tmp_path / "sampler.py").write_text(SAMPLER)
    return "sampler.py"


def test_a_change_is_printed_with_its_first_operation_and_the_setting(
    sampler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{sampler}:rounded") == 1
    out = capsys.readouterr().out
    assert "sampler.py:rounded · " in out
    assert "no excess precision first differs at operation 4 of 5: convert_element_type at " in out
    assert "at sampler.py:12\n" in out
    assert "bfloat16[8,512] → float32[8,512]" in out
    assert "the rounding at sampler.py:11 never happened" in out
    assert "compiler_options={'xla_allow_excess_precision': False}" in out


def test_json(sampler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{sampler}:rounded", "--json", "--argmax", "--output", "scores") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["function"] == "sampler.py:rounded"
    no_excess = report["variants"][0]
    assert no_excess["variant"] == "no excess precision"
    assert no_excess["changes"] == no_excess["outputs"][0]["change"]["differing"] > 0
    assert no_excess["first_operation"]["operation"]["line"] == 12
    assert no_excess["flips"][0]["decisions"] == 8


def test_no_change_is_exit_code_0(sampler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{sampler}:sums", "--inputs", "few") == 0
    assert "nothing changes on this device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:rounded"], "there is no such file"),
        (["sampler.py:sums", "--inputs", "many"], "has no many"),
        (["sampler.py:rounded", "--argmax", "--output", "logits"], "there is scores, shape"),
        (["sampler.py:rounded", "--argmax", "--output", "shape"], "argmax takes rows of floats"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    sampler: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del sampler
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
