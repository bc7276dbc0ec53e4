"""Stored job files of every version are read as values."""

import json
from pathlib import Path

import pytest

from drumline.jobs.core.state import Candidate, Job
from drumline.jobs.spec import validate
from drumline.jobs.store.records import Store
from drumline.jobs.store.specs import Origin, PackedCode, StoredSpec

FULL = {
    "name": "llama",
    "accelerator": ["v4-16"],
    "zones": ["us-central2-b"],
    "capacity": "on-demand",
    "workdir": None,
    "setup": "make data",
    "environment": {"RATE": "3e-4"},
    "python": {"kind": "uv", "version": "3.12", "requirements": ["optax"]},
    "mounts": {"/data": "gs://lab/c4"},
    "run": "python train.py",
    "hosts": [0],
    "checkpoint": "gs://lab/run/",
    "progress": r"step (?P<step>\d+)",
}
CODE = {"sha": "ab12", "files": 3, "bytes": 4096, "drumline": "package"}


def test_a_job_file_that_was_accepted_comes_back_key_by_key() -> None:
    file = validate(FULL).model_dump(mode="json")
    spec = StoredSpec.from_json(json.loads(json.dumps(file | {"archive": CODE, "origin": None})))
    assert (spec.name, spec.run, spec.setup) == ("llama", "python train.py", "make data")
    assert (spec.capacity, spec.hosts, spec.progress) == ("on-demand", (0,), FULL["progress"])
    assert (spec.python.kind, spec.python.version, spec.python.requirements) == (
        "uv",
        "3.12",
        ("optax",),
    )
    assert (dict(spec.environment), dict(spec.mounts)) == (FULL["environment"], FULL["mounts"])
    assert spec.archive == PackedCode("ab12", 3, 4096, "package")
    assert spec.file == file, "what is shown and compared is the file, and the file alone"


def test_keys_missing_in_an_older_version_have_their_default() -> None:
    spec = StoredSpec.from_json({"run": "python train.py"})
    assert (spec.capacity, spec.hosts, spec.python.kind) == ("spot", "all", "system")
    assert (spec.archive, spec.origin, spec.checkpoints_of("000001")) == (None, None, None)


def test_a_stored_job_that_new_rules_reject_still_runs() -> None:
    spec = StoredSpec.from_json(FULL | {"accelerator": ["v99-8"], "a key of next year": 1})
    assert spec.run == "python train.py"
    assert spec.file["a key of next year"] == 1


def test_checkpoints_are_a_jobs_own_or_those_it_took_over() -> None:
    assert StoredSpec.from_json(FULL).checkpoints_of("000012") == "gs://lab/run/000012"
    stored_spec = StoredSpec.from_json(
        FULL | {"origin": {"from": "000007", "checkpoint": "gs://lab/run/7"}}
    )
    assert stored_spec.origin == Origin(checkpoint="gs://lab/run/7")
    assert stored_spec.checkpoints_of("000012") == "gs://lab/run/7"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ('"text"', "spec: not a mapping"),
        ('{"run": 7}', "run: input should be a valid string"),
        ('{"hosts": "some"}', "hosts"),
        ('{"archive": {"files": 1, "bytes": 2}}', "archive.sha: field required"),
    ],
)
def test_a_row_that_makes_no_sense_is_set_aside_with_the_reason(
    tmp_path: Path, wrong: str, why: str
) -> None:
    store = Store(tmp_path / "jobs.db")
    store.add("lab", "a", FULL, lambda job_id: Job(job_id, "me", (Candidate("v4-16", "z"),), 1.0))
    store._db.execute("UPDATE jobs SET spec = ?", (wrong,))
    assert store.living() == []
    (aside,) = store.unreadable_jobs()
    assert why in aside.reason
    store.close()


@pytest.mark.parametrize(
    "odd",
    [
        {"mounts": None, "environment": None, "python": None, "hosts": None, "capacity": None},
        {"archive": {}, "origin": {}},
        {"archive": False},
        {"environment": {"SEED": 1, "FAST": True}},
    ],
)
def test_empty_and_loosely_written_values_stay_readable(odd: dict[str, object]) -> None:
    spec = StoredSpec.from_json({"run": "python train.py", **odd})
    assert (spec.run, spec.capacity, spec.archive) == ("python train.py", "spot", None)
    assert set(spec.environment.values()) <= {"1", "true"}


@pytest.mark.parametrize(
    "odd", [{"run": None}, {"run": False}, {"hosts": 0}, {"environment": {"A": None}}]
)
def test_values_that_were_never_valid_are_rejected(odd: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(odd))):
        StoredSpec.from_json({"run": "python train.py", **odd})
