"""The key `docker`, and its older form in `python`."""

from pathlib import Path

import pytest

from drumline.hosts.environment import is_google_registry, registry_of
from drumline.jobs.spec import JobSpec, amend, parse, validate
from drumline.jobs.store.specs import StoredSpec

IMAGE = "us-docker.pkg.dev/lab/images/llama:v3"


def read(text: str, folder: Path) -> JobSpec:
    return parse(f"accelerator: v4-8\nrun: x\n{text}", source="job.yaml", folder=folder)


def test_the_older_form_is_the_same_container(tmp_path: Path) -> None:
    older = read(f"python: {{kind: docker, image: '{IMAGE}'}}", tmp_path)
    assert older.docker is None
    for text in (
        f"docker: {IMAGE}",
        f"docker: {IMAGE}\npython: docker",
        f"docker: {{image: '{IMAGE}'}}",
    ):
        assert read(text, tmp_path).python == older.python


def test_a_job_comes_back_from_the_server_with_its_login(tmp_path: Path) -> None:
    spec = read(f"docker: {{image: '{IMAGE}', login: service-account}}", tmp_path)
    sent = spec.model_dump(mode="json")
    assert validate(sent) == spec
    stored = StoredSpec.from_json(sent)
    assert (stored.python.kind, stored.python.image) == ("docker", IMAGE)
    assert stored.docker is not None
    assert (stored.docker.login, stored.docker.shm_size) == ("service-account", "16g")


def test_a_resume_can_change_the_image(tmp_path: Path) -> None:
    saved = read(f"docker: '{IMAGE}'", tmp_path).model_dump(mode="json")
    changed = amend(saved, ["docker.image=python:3.13-slim"])
    assert changed.python.image == "python:3.13-slim"
    assert changed == validate(changed.model_dump(mode="json"))


def test_a_secret_can_be_the_login(tmp_path: Path) -> None:
    spec = read("secrets: [GHCR]\ndocker: {image: ghcr.io/lab/llama, login: GHCR}", tmp_path)
    assert spec.docker is not None
    assert spec.docker.login == "GHCR"


@pytest.mark.parametrize(
    ("image", "registry", "google"),
    [
        ("python:3.12-slim", "", False),
        ("lab/llama", "", False),
        ("ghcr.io/lab/llama", "ghcr.io", False),
        ("localhost:5000/llama", "localhost:5000", False),
        (IMAGE, "us-docker.pkg.dev", True),
        ("europe-west4-docker.pkg.dev/p/r/i@sha256:ab", "europe-west4-docker.pkg.dev", True),
        ("gcr.io/p/i", "gcr.io", True),
        ("eu.gcr.io/p/i", "eu.gcr.io", True),
        ("evil-gcr.io.example.org/i", "evil-gcr.io.example.org", False),
    ],
)
def test_the_registry_of_an_image(image: str, registry: str, google: bool) -> None:
    assert registry_of(image) == registry
    assert is_google_registry(registry) is google
