"""`drumline inspect` with typed arguments."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_chips import run

LAYER = """\
import jax
import jax.numpy as jnp

print("this module prints")

LAYERS = 3

def inputs():
    return jnp.ones((64, 32)), jnp.ones((32, 16))

def others():
    return jnp.ones((8, 8)), jnp.ones((8, 8))

def broken():
    raise RuntimeError("no data here")

def product(x, w):
    return x @ w

def nothing():
    return jnp.zeros((256, 256)) @ jnp.ones((256, 256))

def raising(x, w):
    raise ValueError("no such thing\\nand more of it")
"""
CHAPTER = (
    "--shapes",
    "bf16[1024,2048]@X,Y",
    "--shapes",
    "bf16[2048,8192]@-,Y",
    "--mesh",
    "X=2,Y=4",
)
ON_CPU = ("--compiler", "cpu")


@pytest.fixture(autouse=True)
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "layer", raising=False)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    (tmp_path / "layer.py").write_text(LAYER)
    return tmp_path


def read(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_the_communication_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "layer.py:product", *CHAPTER, *ON_CPU) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].startswith("product sends ")
    assert "1 all-gather over Y" in lines[0]
    assert "on X=2,Y=4" in lines[1]
    assert any(line.startswith("all-gather  Y     bfloat16") for line in lines)
    assert "layer.py:18" in output.out
    assert "this module prints" not in output.out
    assert "this module prints" in output.err


def test_the_communication_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "layer.py:product", *CHAPTER, *ON_CPU, "--json") == 0
    report = read(capsys)
    (collective,) = report["collectives"]
    # Three shards of 512×512 bfloat16.
    assert (collective["kind"], collective["axes"], collective["sent"]) == (
        "all-gather",
        ["Y"],
        3 * 512 * 1024,
    )
    assert report["mesh"] == {"X": 2, "Y": 4}


def test_program_is_the_command_that_need_not_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "program", "layer.py:product", *CHAPTER, *ON_CPU, "--json") == 0
    named = read(capsys)
    assert run("inspect", "layer.py:product", *CHAPTER, *ON_CPU, "--json") == 0
    assert read(capsys) == named


def test_an_estimate_for_a_slice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "layer.py:product", *CHAPTER, *ON_CPU, "--on", "v5litepod-8") == 0
    estimate, _, communication = capsys.readouterr().out.partition("\n\n")
    assert len(estimate.splitlines()) <= 10
    assert "a call on v5litepod-8 on X=2,Y=4" in estimate
    assert "X line of 2; Y line of 4" in estimate
    assert communication.startswith("product sends ")


def test_an_estimate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("layer.py:product", *CHAPTER, *ON_CPU, "--on", "v5litepod-8", "--json")
    assert run("inspect", *words) == 0
    report = read(capsys)
    assert set(report) == {"communication", "estimate"}
    assert report["estimate"]["flops"] == 2 * 512 * 2048 * 2048
    assert report["estimate"]["exposed_seconds"] > 0


def test_it_draws_and_writes_a_trace(layer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--png", "t.png", "--trace", "t.json.gz")
    words = ("layer.py:product", *CHAPTER, *ON_CPU, "--on", "v5litepod-8", *files)
    assert run("inspect", *words) == 0
    assert "wrote t.png\nwrote t.json.gz\n" in capsys.readouterr().err
    assert (layer / "t.png").read_bytes().startswith(b"\x89PNG")
    content = (layer / "t.json.gz").read_bytes()
    events = json.loads(gzip.decompress(content))["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)


def test_inputs_of_the_module_are_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "layer.py:product", *ON_CPU, "--on", "v5litepod-1", "--json") == 0
    assert read(capsys)["estimate"]["flops"] == 2 * 64 * 32 * 16
    words = ("layer.py:product", "--inputs", "others", *ON_CPU, "--on", "v5litepod-1", "--json")
    assert run("inspect", *words) == 0
    assert read(capsys)["estimate"]["flops"] == 2 * 8 * 8 * 8


def test_a_function_without_arguments_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "layer.py:nothing", *ON_CPU) == 0
    assert capsys.readouterr().out.startswith("nothing does not communicate.")


def test_several_slices_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("layer.py:product", *CHAPTER, *ON_CPU)
    places = ("--on", "v5litepod-8", "--on", "v6e-8", "--on", "v5litepod-4")
    assert run("inspect", *words, *places) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["LAYOUT", "ON", "MESH"]
    assert [line.split()[2] for line in lines[1:3]] == ["v6e-8", "v5litepod-8"]
    assert "as given on v5litepod-4: the mesh X=2,Y=4 has 8 devices" in lines[3]
    assert run("inspect", *words, *places, "--json") == 0
    assert [choice["on"] for choice in read(capsys)["choices"]] == [
        "v6e-8", "v5litepod-8", "v5litepod-4",
    ]  # fmt: skip


PRODUCT = "layer.py:product"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "name a function as MODULE:FUNCTION"),
        ([PRODUCT, "--list"], "name a function as MODULE:FUNCTION"),
        ([PRODUCT, "--example", "matmul"], "layer.py has no matmul"),
        (["layer.py"], "write it as MODULE:FUNCTION"),
        (["nowhere.py:f"], "nowhere.py: there is no such file"),
        (["nowhere:f"], "nowhere: there is no such module here"),
        (["layer.py:f"], "layer.py has no f"),
        (["layer.py:LAYERS"], "layer.py:LAYERS is not a function"),
        ([PRODUCT, "--inputs", "many"], "has no many"),
        ([PRODUCT, "--inputs", "broken"], "broken() fails: RuntimeError: no data here"),
        (["layer.py:raising"], "raising does not trace: ValueError: no such thing"),
        ([PRODUCT, "--shapes", "bf16[8,8]"], "product does not trace"),
        ([PRODUCT, "--shapes", "8x8"], "--shapes '8x8': write it as TYPE[SIZES]@AXES"),
        ([PRODUCT, "--shapes", "bf17[8,8]"], "bf17 is not a type of arrays"),
        ([PRODUCT, "--shapes", "f32[8,8]@X"], "names the axis X: give the mesh with --mesh"),
        ([PRODUCT, "--shapes", "f32[8,8]@Z", "--mesh", "X=2"], "the mesh X=2 has no axis Z"),
        ([PRODUCT, "--shapes", "f32[8]@X,Y", *CHAPTER[-2:]], "names 2 axes for 1 dimensions"),
        (
            [PRODUCT, "--shapes", "f32[9,8]@X", "--shapes", "f32[8,8]", "--mesh", "X=2"],
            "argument 1 of shape (9, 8): dimension 0 of 9 does not divide",
        ),
        ([PRODUCT, "--mesh", "2x4"], "the mesh '2x4': write each axis as NAME=SIZE"),
        ([PRODUCT, "--mesh", "X=2,X=4"], "names the axis X twice"),
        ([PRODUCT, "--mesh", "X=0"], "the mesh axis 'X' has the size 0"),
        ([PRODUCT, *CHAPTER, "--on", "v9-8"], "v9-8"),
        ([PRODUCT, *CHAPTER, "--on", "v5litepod-8", "--on", "v9-8"], "v9-8"),
        (
            [PRODUCT, *CHAPTER, *ON_CPU, "--on", "v5litepod-16"],
            "the mesh X=2,Y=4 has 8 devices and v5litepod-16 has 16",
        ),
        ([PRODUCT, "--compiler", "gcc"], "--compiler gcc: it can be auto, cpu, tpu or here"),
        ([PRODUCT, "--compiler", "tpu"], "the TPU's compiler needs a slice"),
        ([PRODUCT, "--png", "a.png"], "--png and --trace draw an estimate"),
        (
            [PRODUCT, "--trace", "a.json", "--on", "v6e-8", "--on", "v6e-4"],
            "--png and --trace draw an estimate: name one slice with --on",
        ),
        (["profile", "nowhere"], "nowhere"),
        (["profile", "."], "."),
        (["profile", "layer.py"], "layer.py"),
        (["profile", ".", "--estimate", "none.json"], "none.json"),
        (["profile", ".", "--estimate", "layer.py"], "layer.py"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line != "this module prints"]
    assert len(lines) == 1
    assert output in lines[0]
    assert "Traceback" not in captured.err


def test_a_picture_that_cannot_be_written_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--png", "--trace"):
        words = (PRODUCT, *ON_CPU, "--on", "v5litepod-1", option, "nowhere/t.png")
        assert run("inspect", *words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert "nowhere/t.png" in lines[-1]
        assert not any("Traceback" in line for line in lines)


def test_prices_are_those_of_the_zones_in_the_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_HOME", str(tmp_path))
    settings = "cloud: google\nproject: lab-tpu-1\nzones: [europe-west4-a]\n"
    (tmp_path / "config.yaml").write_text(settings)
    slices = ("--on", "v5litepod-8", "--on", "v6e-8")
    assert run("inspect", PRODUCT, *CHAPTER, *ON_CPU, *slices, "--json") == 0
    choices = read(capsys)["choices"]
    assert {choice["zone"] for choice in choices} == {"europe-west4-a"}


def test_the_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("inspect", "--help"), ("inspect", "program", "--help")):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert "  drumline inspect --example models/lm-1b3-fsdp --on v6e-8\n" in out
        assert "--shapes 'bf16[1024,2048]@X,Y'" in out


def test_the_help_names_the_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--help") == 0
    output = capsys.readouterr().out
    assert "profile" in output
    assert run("inspect", "program", "--help") == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("--mesh", "--on", "--shapes", "--png", "--trace"))
