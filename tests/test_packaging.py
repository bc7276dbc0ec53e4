"""The help of the Makefile, and the description of the package on an index."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    command = ["make", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split() for line in shown.stdout.splitlines() if line.startswith("  make ")]
    assert targets <= {words[1] for words in listed if len(words) > 2}


def test_a_package_index_can_describe_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"jax", "tpu"} <= set(project["keywords"])
    assert "Programming Language :: Python :: 3.11" in project["classifiers"]
    assert project["classifiers"] == sorted(project["classifiers"])
    assert project["description"]
    assert project["readme"]
