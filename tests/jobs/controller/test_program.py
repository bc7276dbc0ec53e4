"""The program that hosts run: its set-up steps and its environment."""

import asyncio
from pathlib import Path

import pytest

from drumline.hosts.values import Address, HostAssignment, ShellProgram, program_message
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


def variables(program: ShellProgram) -> dict[str, str]:
    assignment = HostAssignment(0, Address("10.0.0.1", 22, "10.0.0.1"), rank=0, ranks=1)
    environment: dict[str, str] = program_message(program, assignment).program["variables"]
    return environment


def test_a_program_knows_how_long_slices_of_its_zone_have_lived(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (name,) = harness.cloud.held
        assert "DRUMLINE_SLICE_LIFETIME" not in variables(harness.starts(job)[0].program)
        await asyncio.sleep(3600)
        harness.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await harness.until(lambda: len(harness.starts(job)) == 2, within=600)
        # A slice that lived for an hour, and one that was lost after the usual two hours.
        lifetime = float(variables(harness.starts(job)[1].program)["DRUMLINE_SLICE_LIFETIME"])
        assert lifetime == pytest.approx(1.5 * 3600, rel=0.35)
        await harness.restart()
        await harness.until(lambda: len(harness.starts(job)) == 3, within=600)
        again = float(variables(harness.starts(job)[2].program)["DRUMLINE_SLICE_LIFETIME"])
        assert again == pytest.approx(lifetime, rel=0.01)

    run_scenario(tmp_path, scenario)
