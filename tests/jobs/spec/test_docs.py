"""The documentation of the job file agrees with the schema, and its examples are valid."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from drumline.jobs.spec import JobSpec, parse
from drumline.jobs.spec.model import SUBMODELS

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = JobSpec.model_json_schema()


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_jobs", DOCS / "build_jobs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    page = (DOCS / "jobs.md").read_text(encoding="utf-8")
    assert load_builder().build(page) == page, "run: python docs/build_jobs.py"


def test_the_page_has_every_key() -> None:
    page = (DOCS / "jobs.md").read_text(encoding="utf-8")
    for key in JobSpec.model_fields:
        assert f"### `{key}`" in page


@pytest.mark.parametrize("key", JobSpec.model_fields)
def test_the_examples_of_a_key_are_valid(key: str, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "jobs" / "deploy").mkdir(parents=True)
    (tmp_path / "jobs" / "configs").mkdir()
    for name in ("deploy/test_key.pem", "train.py"):
        (tmp_path / "jobs" / name).write_text("x")
    for example in SCHEMA["properties"][key]["examples"]:
        job = {"accelerator": ["v4-8", "v5p-8"], "run": "x", key: example}
        if key == "reservation":
            job["capacity"] = "reserved"
        assert parse(yaml.safe_dump(job), source="job.yaml", folder=tmp_path / "jobs")


@pytest.mark.parametrize("key", SUBMODELS)
def test_the_examples_of_inner_keys_are_valid(key: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("jax")
    for inner, field in SUBMODELS[key].model_json_schema()["properties"].items():
        for example in field["examples"]:
            value = {"kind": "docker" if inner == "image" else "uv"} if key == "python" else {}
            value |= {"source": "imagenet"} if key == "data_disks" else {}
            value |= {"image": "us-docker.pkg.dev/lab/images/llama"} if key == "docker" else {}
            value |= {inner: example}
            job = {
                "accelerator": "v4-8",
                "run": "x",
                key: [value] if key == "data_disks" else value,
            }
            assert parse(yaml.safe_dump(job), source="job.yaml", folder=tmp_path)


def test_the_job_files_in_the_page_are_valid(tmp_path: Path) -> None:
    page = (DOCS / "jobs.md").read_text(encoding="utf-8")
    (tmp_path / "requirements.txt").write_text("jax")
    files = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "# a job" in text]
    assert files
    for text in files:
        assert parse(text, source="job.yaml", folder=tmp_path)
