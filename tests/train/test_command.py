"""`python -m drumline.train`: its arguments, messages and exit codes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from drumline.errors import UserError
from drumline.train.__main__ import main
from drumline.train.config import load_config, parse_value

CONFIG = '''"""A config.

    python -m drumline.train config.py
"""

from typing import Literal
from pathlib import Path
from drumline.train import Recipe

def recipe(
    *, steps: int = 300, rate: float = 1e-3, policy: Literal["stop", "skip"] = "stop",
    folder: Path | None = None, quick: bool = False, table: dict[str, int] = {},
) -> Recipe:
    from drumline.errors import UserError
    raise UserError(f"{steps} {rate} {policy} {folder} {quick}")
'''


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error message of a rejected command."""
    assert main(list(arguments)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "stps=5"], "--set stps: config.py has no such setting; did you mean steps?"),
        (["--set", "zzz=5"], "--set zzz: config.py has no such setting; it has steps, rate,"),
        (["--set", "steps=many"], "--set steps=many: 'many' is not a whole number"),
        (["--set", "steps=1.5"], "--set steps=1.5: '1.5' is not a whole number"),
        (["--set", "rate=fast"], "--set rate=fast: 'fast' is not a number"),
        (["--set", "quick=maybe"], "--set quick=maybe: 'maybe' is not yes or no"),
        (["--set", "policy=skp"], "--set policy=skp: the value is not allowed; did you mean skip?"),
        (["--set", "steps"], "--set steps: write it as name=value"),
        (["--set", "table=1"], "--set table: a dict[str, int] cannot be set here"),
        (["--stops", "5"], "unrecognized arguments: --stops 5"),
        (
            ["--set", "steps=1e3", "--set", "quick=yes", "--set", "folder=/tmp/x=y"],
            "1000 0.001 stop /tmp/x=y True",
        ),
        (["--set", "rate=3", "--set", "policy=skip", "--set", "folder=none"], "300 3.0 skip None"),
    ],
)
def test_settings_are_parsed_as_annotated_or_rejected_with_a_message(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in rejected(capsys, config, *arguments)


DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_run_without_steps_is_rejected_before_its_schedule_divides_by_them(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = rejected(capsys, DIGITS, "--set", f"steps={steps}")
    assert output == f"steps: {steps} is too few; use 1 or more"


def test_a_batch_larger_than_the_data_set_is_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert rejected(capsys, DIGITS, "--set", "batch=99999999") == (
        "data: a batch of 99,999,999 rows is larger than the data set of 1,500 records; "
        "use 1,500 or fewer"
    )


def test_invalid_config_files_are_rejected_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the file does not exist" in rejected(capsys, str(tmp_path / "none.py"))
    for name, content, message in (
        ("empty.py", "", "the file does not define a function recipe(*, …) -> Recipe"),
        ("loose.py", "def recipe(steps: int = 3): ...", "write def recipe(*, steps, …)"),
        ("wrong.py", "def recipe(*, steps: int = 3): return 5", "recipe returns int, not a Recipe"),
        ("open.py", "def recipe(*, steps: int): ...", "steps has no default; --set steps=…"),
        ("config.txt", "", "its name must end in .py"),
    ):
        (tmp_path / name).write_text(content)
        assert message in rejected(capsys, str(tmp_path / name))
    assert "CONFIG.py is missing" in rejected(capsys)


def test_help_shows_the_docstring_and_every_setting(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([config, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("A config.\n\n    python -m drumline.train config.py\n")
    assert "  steps: int = 300\n" in output
    assert "  policy: Literal['stop', 'skip'] = 'stop'\n" in output
    assert main(["--help"]) == 0
    assert "--checkpoint FOLDER" in capsys.readouterr().out


def test_an_error_of_a_model_is_a_message_and_other_errors_have_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("drumline.models")
    path = tmp_path / "broken.py"
    path.write_text("from drumline.models import MLP\ndef recipe(*, n: int = 0): return MLP(n)")
    assert rejected(capsys, str(path)).startswith("MLP: ")
    path.write_text("def recipe(*, n: int = 0): return int('x')")
    with pytest.raises(ValueError, match="invalid literal"):
        main([str(path)])


@pytest.mark.parametrize(
    ("text", "value_type", "value"),
    [
        ("1_000", int, 1000),
        ("7", int | str, 7),
        ("seven", int | str, "seven"),
        ("2", Literal[1, 2], 2),
        ("None", float | None, None),
        ("0.5", float | None, 0.5),
        ("no", bool, False),
    ],
)
def test_values_are_parsed_as_their_type(text: str, value_type: Any, value: object) -> None:
    assert parse_value("x", text, value_type) == value


def test_a_value_that_fits_no_member_of_a_union_is_rejected() -> None:
    with pytest.raises(UserError, match=re.escape("--set x=y: 'y' is not a number")):
        parse_value("x", "y", int | float)


def test_settings_without_annotation_are_text(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("def recipe(*, name='a'): ...")
    assert load_config(str(path)).types == {"name": str}


WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
import runpy
sys.argv = ["-m", *sys.argv[1:]]
runpy.run_module("drumline.train", run_name="__main__", alter_sys=True)
"""


def test_without_jax_the_command_names_the_extra_to_install(config: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, config], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "training needs jax: pip install 'drumline[jax]'\n"
    code = "import sys; sys.modules['optax'] = None; from drumline.train import fit"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    output = run.stderr.splitlines()[-1]
    assert output == "ImportError: training needs optax: pip install 'drumline[jax]'"


def test_a_changed_recipe_is_refused_or_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "changing.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from tests.train.toy import toy\n"
        "def recipe(*, batch: int = 16):\n"
        "    made = toy(2)\n"
        "    return replace(made, data=replace(made.data, batch=batch))\n"
    )
    folder = ["--checkpoint", str(tmp_path / "run")]
    assert main([str(path), *folder]) == 0
    capsys.readouterr()
    assert "(batch 16 → 8)" in rejected(capsys, str(path), *folder, "--set", "batch=8")
    assert main([str(path), *folder, "--set", "batch=8", "--allow-changes"]) == 0
    assert "as allowed: batch 16 → 8" in capsys.readouterr().out
