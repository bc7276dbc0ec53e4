"""The sampler that drops its most probable token does so, and its mends mend it."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from drumline.cli import main
from drumline.numerics import precision
from drumline.numerics.rounding.execution import ExecutionMode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "numerics"


@pytest.fixture(scope="module")
def sampler() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("dropped_token")


def test_it_prints_what_its_docstring_promises(
    sampler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler.main()
    lines = capsys.readouterr().out.splitlines()
    lost = [int(re.search(r": (\d+) of 64 rows lose", line)[1]) for line in lines]  # type: ignore[index]
    assert lost[1:] == [0, 0, 0]
    assert lost[0] > 0
    docstring = sampler.__doc__ or ""
    assert f"as compiled, {lost[0]} of 64 rows lose" in " ".join(docstring.split())


def test_the_command_in_its_docstring_names_the_flips_and_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "dropped_token.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    [command] = re.findall(r"^    (drumline .*)$", docstring, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main(command.split()[1:])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    lines = text.splitlines()
    compared = 1 + next(i for i, line in enumerate(lines) if "kept = " in line)
    assert f"convert_element_type at examples/numerics/dropped_token.py:{compared}\n" in out
    divided = 1 + next(i for i, line in enumerate(lines) if "/ TEMPERATURE" in line)
    assert f"the rounding at examples/numerics/dropped_token.py:{divided} never happened" in out
    [flips] = re.findall(r"^no excess precision +scores +(\d+) of 64 +[\d.]+ \(", out, re.MULTILINE)
    assert f"{flips} of 64 decisions flip" in " ".join(docstring.split())


def test_every_flip_is_a_token_that_changed(sampler: Any) -> None:
    report = precision(sampler.sample, *sampler.inputs(), argmax=True)
    strict = next(variant for variant in report.variants if variant.mode is ExecutionMode.NO_EXCESS)
    [flips] = strict.flips
    tokens = strict.outputs[1].change
    assert flips.flipped == tokens.differing > 0
    compiled = jax.jit(sampler.sample)(*sampler.inputs())
    mended = jax.jit(sampler.sample_rounded)(*sampler.inputs())
    assert int((compiled["token"] != mended["token"]).sum()) == flips.flipped


def test_a_rounding_that_is_spelled_out_flips_nothing(sampler: Any) -> None:
    report = precision(sampler.sample_rounded, *sampler.inputs(), output="scores")
    assert [flips.flipped for variant in report.variants for flips in variant.flips] == [0, 0, 0]
