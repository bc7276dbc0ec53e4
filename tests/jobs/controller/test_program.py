"""The set-up steps of the program that hosts run."""

from pathlib import Path

import pytest

from tests.jobs.fakes import ServerHarness, run_scenario


@pytest.mark.parametrize(
    ("python", "steps"),
    [
        ({"kind": "docker", "image": "lab/x"}, ["setup", "docker"]),
        ({"kind": "venv"}, ["venv", "setup"]),
    ],
)
def test_a_set_up_runs_before_the_pull_of_an_image_and_inside_other_environments(
    tmp_path: Path, python: dict[str, str], steps: list[str]
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(python=python, setup="docker login registry.example")
        await harness.reaches(job, "RUNNING")
        assert [step.name for step in harness.starts(job)[0].program.steps] == steps

    run_scenario(tmp_path, scenario)
