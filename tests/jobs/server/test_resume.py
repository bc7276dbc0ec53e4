"""Resume reads the job file again and continues with its current values."""

import re
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.client import Client
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.spec import SpecError, amend, changes, validate
from tests.jobs.fakes import ZONE, ServerHarness, run_scenario

BASE: dict[str, Any] = {"accelerator": "v4-16", "zones": [ZONE], "run": "a", "workdir": None}


def dumped(**keys: Any) -> dict[str, Any]:
    return validate(BASE | keys).model_dump(mode="json")


def test_changes_are_listed_by_key() -> None:
    before = dumped(retry={"failures": 3}, environment={"A": "1"})
    after = dumped(
        retry={"failures": 0},
        environment={"B": "2"},
        run="b\nc",
        accelerator="v5p-16",
        zones=["us-east5-a"],
    )
    assert sorted(changes(before, after)) == [
        'accelerator: ["v4-16"] → ["v5p-16"]',
        "environment.A: 1 → none",
        "environment.B: none → 2",
        "retry.failures: 3 → 0",
        "run: a → b ⏎ c",
        'zones: ["us-central2-b"] → ["us-east5-a"]',
    ]
    assert changes(before, before) == []


def test_a_change_in_a_truncated_text_is_listed() -> None:
    (line,) = changes(dumped(run="x" * 200 + "1"), dumped(run="x" * 200 + "2"))
    assert line.startswith("run: xxx")
    assert line.endswith("…, changed after the part shown")


def test_overrides_without_a_file_are_checked() -> None:
    assert amend(dumped(), ["retry.failures=1"]).retry.failures == 1
    with pytest.raises(SpecError, match="did you mean retry"):
        amend(dumped(), ["retri.failures=1"])


async def cancelled(harness: ServerHarness, **keys: Any) -> str:
    job = await harness.create(**keys)
    await harness.reaches(job, "RUNNING")
    await harness.service.verb(job, "cancel", {})
    await harness.reaches(job, "CANCELLED")
    return job


def test_a_resume_uses_the_new_file_and_the_kept_slice(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await cancelled(harness, run="a", name="first")
        spec = dumped(run="b", name="second", retry={"failures": 0}, stop_grace=7)
        answer = await harness.service.verb(job, "resume", {"spec": spec})
        assert "on the slice kept in us-central2-b" in answer["text"]
        assert "run: a → b" in answer["changes"]
        assert "name: first → second" in answer["changes"]
        await harness.until(lambda: len(harness.starts(job)) == 2)
        program = harness.starts(job)[1].program
        assert (program.run, program.name) == ("b", "second")
        job_now = harness.supervisor.records[job].job
        assert (job_now.allowance.failures, job_now.grace) == (0, 7)
        assert harness.service.overview()[0]["name"] == "second"
        notes = [e["text"] for e in harness.show(job)["events"] if e["kind"] == "note"]
        assert any("changed in the job file:" in note and "run" in note for note in notes)

    run_scenario(tmp_path, scenario)


def test_a_slice_that_does_not_fit_the_new_file_is_released(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await cancelled(harness)
        (slice_name,) = harness.cloud.held
        other = dumped(accelerator="v5p-16", zones=["us-east5-a"])
        answer = await harness.service.verb(job, "resume", {"spec": other})
        assert "on a new slice (the one in us-central2-b does not" in answer["text"]
        await harness.until(lambda: len(harness.starts(job)) == 2)
        assert slice_name not in harness.cloud.held
        assert harness.show(job)["zone"] == "us-east5-a"

    run_scenario(tmp_path, scenario)


def test_a_change_of_capacity_is_rejected_while_a_slice_is_kept(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await cancelled(harness)
        with pytest.raises(RequestError, match=f"capacity: .*drumline delete {job}"):
            await harness.service.verb(job, "resume", {"spec": dumped(capacity="on-demand")})
        assert harness.status(job) == "CANCELLED"
        assert harness.show(job)["spec"]["capacity"] == "spot"

    run_scenario(tmp_path, scenario)


def test_an_invalid_file_changes_nothing(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await cancelled(harness)
        with pytest.raises(RequestError, match="accelerator"):
            await harness.service.verb(job, "resume", {"spec": BASE | {"accelerator": "v4-17"}})
        assert harness.status(job) == "CANCELLED"

    run_scenario(tmp_path, scenario)


CHECKPOINT = "gs://lab/runs"


async def create_from(harness: ServerHarness, other: str, **keys: Any) -> str:
    made = await harness.service.create(BASE | keys, {}, "lab", {"from": other})
    return str(made["id"])


def test_two_running_jobs_never_share_checkpoints(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        first = await harness.create(checkpoint=CHECKPOINT)
        await harness.reaches(first, "RUNNING")
        with pytest.raises(
            RequestError, match=f"{first} is RUNNING.*drumline cancel {first} first"
        ):
            await create_from(harness, first)
        await harness.service.verb(first, "delete", {})
        await harness.reaches(first, "CANCELLED")
        second = await create_from(harness, first.lstrip("0"))
        await harness.reaches(second, "RUNNING")
        folder = harness.show(first)["checkpoint"]
        assert re.fullmatch(rf"{CHECKPOINT}/[0-9a-f]{{8}}-{first}", folder)
        begun, again = harness.starts(first)[0].program, harness.starts(second)[0].program
        assert begun.checkpoint == again.checkpoint == folder
        assert begun.owner == again.owner == harness.service.store.owner
        assert 0 < begun.fence < again.fence
        with pytest.raises(RequestError, match=f"{second} is RUNNING"):
            await harness.service.verb(first, "resume", {})
        await harness.service.verb(second, "delete", {})
        await harness.reaches(second, "CANCELLED")
        third = await create_from(harness, second, checkpoint="gs://lab/elsewhere")
        await harness.reaches(third, "RUNNING")
        assert harness.show(third)["checkpoint"] == folder

    run_scenario(tmp_path, scenario)


def test_a_job_cannot_start_from_a_job_without_checkpoints(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await cancelled(harness)
        with pytest.raises(RequestError, match="no checkpoints to start from"):
            await create_from(harness, job)
        with pytest.raises(RequestError, match="there is no job 000077"):
            await create_from(harness, "77")

    run_scenario(tmp_path, scenario)


class Remembering(Client):
    """A client whose server has one job and records the requests."""

    def __init__(self, home: Path, **known: Any) -> None:
        super().__init__(home)
        self.asked: dict[str, Any] = {}
        self._known = {"status": "FAILED", "spec": dumped(), "origin": None} | known
        self._server.call = self._ask  # type: ignore[method-assign]

    def _ask(self, method: str, path: str, body: Any = None, timeout: object = None) -> Any:
        del path, timeout
        if method == "GET":
            return self._known
        self.asked = body
        return {"text": "it goes on"}


def test_a_missing_job_file_is_reported_and_the_stored_one_used(tmp_path: Path) -> None:
    client = Remembering(tmp_path, origin={"file": "/gone/job.yaml", "overrides": []})
    assert "/gone/job.yaml no longer exists" in client.resume(1)["text"]
    assert "spec" not in client.asked


def test_a_new_file_is_used_for_later_resumes(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("accelerator: v4-8\nrun: other\n")
    client = Remembering(tmp_path, origin={"file": "/old.yaml", "overrides": ["run=old"]})
    client.resume(1, file=new, overrides=["stop_grace=3"])
    assert (client.asked["spec"]["run"], client.asked["spec"]["stop_grace"]) == ("other", 3)
    assert client.asked["origin"] == {"file": str(new), "overrides": ["stop_grace=3"]}


def test_set_needs_no_file(tmp_path: Path) -> None:
    client = Remembering(tmp_path)
    client.resume(1, overrides=["run=python better.py"])
    assert client.asked["spec"]["run"] == "python better.py"
    assert client.asked["spec"]["accelerator"] == ["v4-16"]
