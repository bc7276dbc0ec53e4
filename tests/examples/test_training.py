"""The configs and the quickstart run as their docstrings say, and the job files are valid."""

# mypy: allow-untyped-calls

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import jax
import pytest

from drumline.cli import main as command_line
from drumline.train.__main__ import make_parser
from drumline.train.config import load_config
from drumline.train.mesh import make_mesh
from drumline.train.state import abstract_state
from tests.cases import rare
from tests.compiling import quick_flags
from tests.jobs.installation import Installation, temporary_installation

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINED = ("digits", "vit_digits", "lm_tiny", "lm_moe")
LARGE = {"vit_b16": 86_567_656, "llama_350m": 373_867_520, "llama_1b3": 1_345_423_360}
JOBS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
ON_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags(1)}


def docstring(name: str) -> str:
    text = (EXAMPLES / f"{name}.py").read_text()
    return ast.get_docstring(ast.parse(text), clean=False) or ""


def python(*words: str, **environment: str) -> str:
    """Run Python and return its output. It must succeed."""
    process = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **ON_CPU, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def figures(text: str) -> dict[str, float]:
    """Parse `eval accuracy 0.98  eval loss 0.05`."""
    return {name: float(value) for name, value in re.findall(r"(\w[a-z ]*\w) ([\d.]+)", text)}


@pytest.mark.long
def test_the_quickstart_trains_twice_and_reports_the_result_of_digits(
    tmp_path: Path,
) -> None:
    heartbeat_file = tmp_path / "heartbeat.json"
    log = python(
        str(EXAMPLES / "quickstart.py"),
        DRUMLINE_CHECKPOINT=str(tmp_path / "run"),
        DRUMLINE_HEARTBEAT=str(heartbeat_file),
        DRUMLINE_ATTEMPT="1",
    )
    stated = figures(docstring("digits"))
    heartbeat = json.loads(heartbeat_file.read_text())
    accuracy, verdict = heartbeat["result"].splitlines()
    assert verdict == "parameters identical to an undisturbed run: yes"
    assert figures(accuracy)["test accuracy"] == pytest.approx(100 * stated["eval accuracy"], abs=1)
    assert heartbeat["step"] == stated["step"]
    last = figures(log.rpartition("/200  ")[2].splitlines()[0])
    assert last["eval loss"] == pytest.approx(stated["eval loss"], rel=0.05)


@pytest.mark.every_case
@pytest.mark.long
@pytest.mark.parametrize("names", [TRAINED[-1:], *rare((TRAINED[1:-1],))])
def test_every_other_config_runs(names: tuple[str, ...]) -> None:
    # Use one process, because starting JAX takes as long as a config.
    arguments = [[str(EXAMPLES / f"{name}.py"), "--set", "steps=2"] for name in names]
    log = python(
        "-c",
        f"import sys; from drumline.train.__main__ import main;"
        f"sys.exit(max(map(main, {arguments!r})))",
    )
    assert re.findall(r"^done: step (\d+)  loss \d", log, re.MULTILINE) == ["2"] * len(arguments)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_has_the_stated_size_and_fits_eight_devices(name: str) -> None:
    config = load_config(str(EXAMPLES / f"{name}.py"))
    settings = ["model=4"] if "model" in config.types else []
    recipe = config.make_recipe(["batch=8", *settings])
    mesh = make_mesh(recipe.mesh)
    assert mesh.size == jax.device_count() == 8
    with jax.set_mesh(mesh):
        state = abstract_state(recipe, mesh)
    sizes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    assert sum(map(prod, sizes)) == LARGE[name]
    on_one = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.params)]
    # All parameters but norms and biases are sharded over eight devices.
    assert sum(map(prod, on_one)) < 1.03 * LARGE[name] / 8


@pytest.mark.parametrize("name", [*TRAINED, *LARGE])
def test_the_docstring_has_a_valid_command_and_its_result(name: str) -> None:
    config = load_config(str(EXAMPLES / f"{name}.py"))
    command, *_ = re.findall(r"^    (python .*)$", docstring(name), re.MULTILINE)
    start, arguments = command.split(" ", 3)[:3], shlex.split(command)[3:]
    assert start == ["python", "-m", "drumline.train"]
    options = make_parser().parse_args(arguments)
    assert options.config == f"examples/{name}.py"
    assert {assignment.partition("=")[0] for assignment in options.set} <= set(config.types)
    results = re.findall(r"^    done: step \d+  loss \d.*$", docstring(name), re.MULTILINE)
    assert len(results) == (name in TRAINED)
    assert ("Measured on one H200: see docs/training.md." in docstring(name)) == (name in LARGE)


# Job files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with temporary_installation(tmp_path_factory.mktemp("jobs")) as new:
        yield new


@pytest.mark.every_case
@pytest.mark.long
def test_the_example_of_init_resumes_after_a_preemption(
    installation: Installation, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line(["init", "--example", str(tmp_path / "first")])
    assert not ended.value.code
    longer = "run=python -m drumline.train train.py --set steps=2000"
    job = str(installation.client.create(tmp_path / "first" / "job.yaml", [longer])["id"])

    def has_checkpoint() -> bool:
        return (installation.saved(job) / "100").exists()

    installation.until(has_checkpoint, 240, "a checkpoint")
    installation.emulator("preempt", target=job)
    ended_job = installation.end(job)
    log = b"".join(installation.client.logs(job, attempt="all")).decode()
    assert (ended_job["status"], ended_job["preemptions"]) == ("SUCCEEDED", 1), log
    assert not re.search(r"warning|\[Gloo\]|^[WE]\d{4} ", log, re.IGNORECASE | re.MULTILINE), log
    (resumed_from,) = re.findall(r"resuming from step ([\d,]+)", log)
    assert int(resumed_from.replace(",", "")) >= 100
    (accuracy,) = re.findall(r"done: step 2,000 .* eval accuracy (\S+)", log)
    assert float(accuracy) > 0.95


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_is_valid(installation: Installation, name: str) -> None:
    plan = installation.client.plan(EXAMPLES / name)
    assert plan[0].startswith("would request v")
    assert plan[-1].startswith("would run: ")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_has_its_command(name: str) -> None:
    assert f"#   drumline create examples/{name} --follow\n" in (EXAMPLES / name).read_text()
