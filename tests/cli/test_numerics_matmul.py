"""`drumline numerics matmul`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drumline.cli import app, main

SMALL = ["--sizes", "8,16", "--squares", "8"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["numerics", "matmul", *arguments])


def test_it_prints_a_table_and_a_verdict_and_plots(tmp_path: Path) -> None:
    result = run(*SMALL, "--plot", str(tmp_path / "m.svg"))
    assert result.exit_code == 0
    assert "[d,4] × [4,d]" in result.output
    assert "JAX highest" in result.output
    assert "multiplies float32 as float32" in result.output
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_it_prints_json() -> None:
    survey = json.loads(run(*SMALL, "--inner", "2", "--json").output)
    assert survey["inner"] == 2
    assert {measurement["size"] for measurement in survey["products"]} == {8, 16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "ten"], "--sizes ten: write whole numbers with commas"),
        (["--sizes", "0"], "--sizes 0: use 1 to 16384"),
        (["--squares", "99999"], "--squares 99999: use 1 to 16384"),
        (["--inner", "0"], "--inner 0: use 1 to 16384"),
        (["--plot", "m.png"], "--plot m.png: plots are SVG files; name it m.svg"),
    ],
)
def test_a_bad_option_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_error:
        main(["numerics", "matmul", *arguments])
    assert exit_error.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1
