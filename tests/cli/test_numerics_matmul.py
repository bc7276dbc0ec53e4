"""`drumline numerics matmul`, as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drumline.cli import app, main

SMALL = ["--sizes", "8,16", "--squares", "8"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["numerics", "matmul", *words])


def test_it_prints_a_table_a_verdict_and_draws(tmp_path: Path) -> None:
    done = run(*SMALL, "--plot", str(tmp_path / "m.svg"))
    assert done.exit_code == 0
    assert "[d,4] × [4,d]" in done.output
    assert "JAX highest" in done.output
    assert "multiplies float32 as float32" in done.output
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_it_prints_json() -> None:
    found = json.loads(run(*SMALL, "--inner", "2", "--json").output)
    assert found["inner"] == 2
    assert {product["size"] for product in found["products"]} == {8, 16}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sizes", "ten"], "--sizes ten: write whole numbers with commas"),
        (["--sizes", "0"], "--sizes 0: it can be 1 to 16384"),
        (["--squares", "99999"], "--squares 99999: it can be 1 to 16384"),
        (["--inner", "0"], "--inner 0: it can be 1 to 16384"),
        (["--plot", "m.png"], "--plot m.png: it is drawn as SVG; name it m.svg"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["numerics", "matmul", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1
