"""A program that imports drumline finds it on the hosts, in every kind of environment."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.hosts.bundled_package import PACKAGE, choose_package, find_use, training_requirements
from drumline.hosts.code import pack
from drumline.hosts.environment import python_steps, run_wrap, setup_step
from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.protocol import PythonEnvironment
from tests.hosts.test_environment import BASH, bash

TRAINS = "from drumline.train import fit\n"
BEATS = "import os\nfrom drumline import heartbeat\nheartbeat(step=1)\n"
SETTLES: dict[str, Any] = {"kind": "uv", "requirements": None, "drumline": "auto"}


def code(folder: Path, text: str, name: str = "train.py") -> Path:
    """A code folder with one additional file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "script", "use"),
    [
        ("import numpy\n# like drumline.train\n", "python train.py", "none"),
        ("import drumliner\n", "echo drumline", "none"),
        (BEATS, "python train.py", "package"),
        (TRAINS, "python train.py", "training"),
        ("if True:\n    import drumline.models as m\n", "python train.py", "training"),
        ("from drumline import distributed\n", "python train.py", "training"),
        ("", "python -m drumline.train config.py", "training"),
        ("", "python - <<'E'\nimport drumline\nE", "package"),
    ],
)
def test_imports_of_drumline_are_found(tmp_path: Path, text: str, script: str, use: str) -> None:
    folder = code(tmp_path, text, "a/b.py")
    assert find_use(folder, ["a/b.py", "gone.py"], [script]) == use


@pytest.mark.parametrize(
    ("python", "local", "use", "warning"),
    [
        ({}, False, "training", ""),
        ({"drumline": False}, False, "none", "python.drumline: false keeps it off the hosts"),
        ({"requirements": ["drumline[jax]==0.1.0"]}, False, "none", ""),
        ({"requirements": ["drumline-extras"]}, False, "training", ""),
        ({"requirements": ["drumline"], "drumline": True}, False, "training", ""),
        ({"kind": "docker", "image": "x"}, False, "training", "must be in the image"),
        ({"kind": "system"}, False, "training", "3.11 or newer"),
        ({"kind": "system"}, True, "none", ""),
        ({"kind": "venv"}, True, "training", ""),
    ],
)
def test_the_package_is_bundled_if_needed_and_missing_packages_are_a_warning(
    tmp_path: Path, python: dict[str, Any], local: bool, use: str, warning: str
) -> None:
    choice = choose_package(code(tmp_path, TRAINS), ["x"], SETTLES | python, local=local)
    assert choice.use == use
    assert bool(choice.warning) == bool(warning)
    assert warning in choice.warning
    assert (choice.package is None) == (use == "none")


def test_no_package_is_bundled_if_the_code_has_it_or_does_not_need_it(tmp_path: Path) -> None:
    own = code(code(tmp_path / "own", TRAINS), "", "src/drumline/__init__.py")
    assert choose_package(own, ["x"], SETTLES, local=False).use == "none"
    other = code(tmp_path / "other", "import jax\n")
    assert choose_package(other, ["x"], SETTLES, local=False).use == "none"
    assert choose_package(other, ["x"], SETTLES | {"drumline": True}, local=False).use == "training"
    assert choose_package(None, ["python -m drumline.train x.py"], SETTLES, local=False).package
    (other / "requirements.txt").write_text("# all\nnumpy\nDrumline>=0.1\n")
    environment = SETTLES | {"requirements": "requirements.txt"}
    assert choose_package(code(other, TRAINS), ["x"], environment, local=False).use == "none"


def unpacked(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work


def test_the_bundled_package_is_not_counted_as_code(tmp_path: Path) -> None:
    folder = code(tmp_path / "code", BEATS)
    plain = pack(folder, tmp_path / "out")
    both = pack(folder, tmp_path / "out", package=PACKAGE)
    assert (both.files, both.bytes) == (plain.files, plain.bytes) == (1, len(BEATS))
    assert both.sha256 != plain.sha256
    # Files of an earlier working copy in the folder are not packed as the user's.
    stale = folder / PACKAGE_FOLDER / "drumline" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    assert pack(folder, tmp_path / "out", package=PACKAGE).sha256 == both.sha256
    alone = unpacked(pack(None, tmp_path / "out", package=PACKAGE).path, tmp_path / "alone")
    assert (alone / PACKAGE_FOLDER / "drumline" / "train" / "loop.py").is_file()
    assert not list(alone.rglob("__pycache__"))


SEEN = "python3 -c 'import drumline; print(drumline.__version__, drumline.__file__)'"


@pytest.mark.parametrize("kind", ["system", "venv", "docker"])
def test_the_program_imports_the_bundled_package(tmp_path: Path, kind: Any) -> None:
    image = "lab/train" if kind == "docker" else None
    python = PythonEnvironment(kind, image=image, drumline="package")
    work = unpacked(pack(None, tmp_path / "out", package=PACKAGE).path, tmp_path / "work")
    tools = tmp_path / "bin"
    tools.mkdir()
    # A Python without Drumline, and a docker that runs the command after the image.
    bare = shutil.which(f"python3.{sys.version_info.minor}", path=f"{sys.base_prefix}/bin")
    assert bare is not None
    (tools / "python3").symlink_to(bare)
    (tools / "docker").write_text(
        '#!/bin/bash\nwhile [ "$1" != lab/train ]; do shift; done\n"${@:2}"'
    )
    (tools / "docker").chmod(0o755)
    path = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "users")}
    without = bash(SEEN, work, (), **path)
    assert "No module named 'drumline'" in without.stderr
    if kind == "venv":
        (step,) = python_steps(python, "1")
        script = step.script.replace("-m venv", "-m venv --without-pip")
        assert bash(script, work, (), **path).returncode == 0
    seen = bash(f'{SEEN}; echo "$PYTHONPATH"', work, run_wrap(python), **path)
    version, file, search = seen.stdout.split()
    assert version == drumline.__version__
    assert Path(file) == work / PACKAGE_FOLDER / "drumline" / "__init__.py"
    assert search == f"{work / PACKAGE_FOLDER}:{tmp_path / 'users'}"
    if kind != "docker":
        own = setup_step(python, SEEN)
        assert bash(own.script, work, (), **path).stdout == f"{version} {file}\n"


def test_requirements_of_training_are_installed_if_drumline_makes_the_environment() -> None:
    requirements = training_requirements()
    names = {entry.split(">")[0].split("<")[0].split("=")[0] for entry in requirements}
    assert names == {
        "equinox", "grain", "jax", "jaxtyping", "mpmath", "optax", "orbax-checkpoint", "rich",
        "safetensors",
    }  # fmt: skip
    for kind in ("uv", "venv", "conda"):
        environment = PythonEnvironment(kind, requirements=("jax[tpu]",), drumline="training")
        (step,) = python_steps(environment, "1")
        (line,) = (line for line in step.script.splitlines() if "pip install" in line)
        assert "'jax[tpu]'" in line
        assert "'orbax-checkpoint" in line
        (step,) = python_steps(PythonEnvironment(kind, drumline="package"), "1")
        assert "optax" not in step.script
    (step,) = python_steps(PythonEnvironment("uv", drumline="training"), "1")
    assert step.script.index("uv sync --locked") < step.script.index("uv pip install")
    assert python_steps(PythonEnvironment("system", drumline="training"), "1") == ()
    checked = subprocess.run([BASH, "-n"], input=step.script, text=True, check=False)
    assert checked.returncode == 0
