"""The bundled Drumline package, in the dry run and on the hosts."""

from pathlib import Path

import pytest

from drumline import __version__
from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.jobs.spec import SpecError, parse
from tests.jobs.fakes import ServerHarness, run_scenario


def test_the_dry_run_shows_the_bundled_package(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("from drumline.train import fit\n")

    async def scenario(harness: ServerHarness) -> None:
        spec = {"accelerator": "v4-16", "zones": ["us-central2-b"], "run": "python train.py"}
        spec["workdir"] = str(folder)
        sent = (await harness.service.plan(spec | {"python": "uv"}))["lines"]
        assert sent[1] == f"would send 1 file (1 kB), Drumline {__version__} with them, set up uv"
        assert not any(line.startswith("!") for line in sent)
        off_spec = spec | {"python": {"kind": "uv", "drumline": False}}
        off = (await harness.service.plan(off_spec))["lines"]
        assert off[1] == "would send 1 file (1 kB), set up uv"
        assert off[-1].startswith("! the code imports drumline, and python.drumline: false keeps")
        docker_spec = spec | {"python": {"kind": "docker", "image": "lab/x"}}
        docker = (await harness.service.plan(docker_spec))["lines"]
        assert docker[-1].startswith("! the code trains with drumline, which is sent along; jax")

    run_scenario(tmp_path / "home", scenario)


def test_the_program_finds_the_bundled_package(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create("python -m drumline.train x.py", python={"kind": "uv"})
        await harness.reaches(job, "RUNNING")
        program = harness.starts(job)[-1].program
        assert f'PYTHONPATH="$PWD/{PACKAGE_FOLDER}' in program.wrap[2]
        assert program.archive is not None
        assert program.archive.is_file()
        assert "orbax-checkpoint" in program.steps[0].script
        other = await harness.create("python train.py", python={"kind": "uv"})
        await harness.reaches(other, "RUNNING")
        assert "PYTHONPATH" not in harness.starts(other)[-1].program.wrap[2]

    run_scenario(tmp_path, scenario)


def test_the_key_takes_three_values(tmp_path: Path) -> None:
    job = "accelerator: v4-8\nrun: x\npython: {kind: uv, drumline: %s}\n"
    for word, kept in (("true", True), ("false", False), ("auto", "auto")):
        assert parse(job % word, source="job.yaml", folder=tmp_path).python.drumline == kept
    with pytest.raises(SpecError, match=r"python\.drumline: is 'maybe'; expected auto, true"):
        parse(job % "maybe", source="job.yaml", folder=tmp_path)
