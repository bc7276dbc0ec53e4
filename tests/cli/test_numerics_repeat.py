"""`drumline numerics repeat`."""

import json
from pathlib import Path

import jax
import pytest

from tests.cli.test_chips import run

SCRIPT = """
import itertools
import jax, jax.numpy as jnp, numpy as np

calls = itertools.count()

def inputs():
    return jnp.linspace(0, 1, 8),

def others():
    return (jnp.ones(3),)

def clean(x):
    return {"y": jnp.sin(x)}

def talking(x):
    print("hello from the function")
    return x

def empty(x):
    return None

def raising(x):
    raise ValueError("no such thing")

def noisy(x):
    count = jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), "float32"))
    return {"y": x, "noise": x[2:4] + count}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "sampler_of_this_test.py"
    path.write_text(SCRIPT)
    return path


def test_a_clean_function(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("numerics", "repeat", f"{script}:clean", "--runs", "2") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["DEVICE", "RUNS", "REPEATS", "AGREES"]
    assert out[1].split() == ["cpu:0", "2", "yes", "yes"]
    device_count = len(jax.local_devices())
    assert out[-1] == f"identical: 2 runs on each of {device_count} devices gave the same bits"


def test_a_function_that_does_not_repeat(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("numerics", "repeat", f"{script}:noisy", "--runs", "2", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is False
    assert report["devices"][0]["among_runs"][0]["leaf"] == "noise"
    assert report["devices"][0]["odd_runs"] == [1]
    assert run("numerics", "repeat", f"{script}:noisy", "--inputs", "others") == 1
    out = capsys.readouterr().out
    assert "no, 2 of 3 differ" in out
    assert "from the others" not in out
    assert "cpu:0, run 1: noise: 1 of 1 elements" in out


@pytest.mark.parametrize(
    ("target", "options", "output"),
    [
        ("nowhere.py:clean", [], "nowhere.py: there is no such file"),
        ("clean", [], "clean: write it as MODULE:FUNCTION"),
        ("{script}:missing", [], "{script} has no missing"),
        ("{script}:clean", ["--runs", "0"], "repeat: there are 0 runs"),
        ("{script}:clean", ["--inputs", "nothing"], "{script} has no nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    target: str,
    options: list[str],
    output: str,
    script: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("numerics", "repeat", target.format(script=script), *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(output.format(script=script))
    assert len(captured.err.splitlines()) == 1


def test_the_report_does_not_contain_what_a_function_prints(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("numerics", "repeat", f"{script}:talking", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["identical"] is True
    assert "hello from the function" in captured.err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty", "repeat: the function returns no array"),
        ("raising", "repeat: the function cannot be run: ValueError: no such thing"),
    ],
)
def test_a_function_that_cannot_be_compared_is_one_sentence(
    name: str, sentence: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("numerics", "repeat", f"{script}:{name}") == 2
    assert capsys.readouterr().err.startswith(sentence)
