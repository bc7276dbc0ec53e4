"""Fix the job, then resume: what the job file says now is what goes on."""

import re
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.client import Client
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.spec import SpecError, amend, changes, validate
from tests.jobs.pretend import ZONE, Office, play

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


async def cancelled(office: Office, **keys: Any) -> str:
    job = await office.create(**keys)
    await office.reaches(job, "RUNNING")
    await office.desk.verb(job, "cancel", {})
    await office.reaches(job, "CANCELLED")
    return job


def test_a_resume_uses_the_new_file_and_the_kept_slice(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await cancelled(office, run="a", name="first")
        spec = dumped(run="b", name="second", retry={"failures": 0}, stop_grace=7)
        answer = await office.desk.verb(job, "resume", {"spec": spec})
        assert "on the slice kept in us-central2-b" in answer["text"]
        assert "run: a → b" in answer["changes"]
        assert "name: first → second" in answer["changes"]
        await office.until(lambda: len(office.starts(job)) == 2)
        program = office.starts(job)[1].program
        assert (program.run, program.name) == ("b", "second")
        job_now = office.supervisor.records[job].job
        assert (job_now.allowance.failures, job_now.grace) == (0, 7)
        assert office.desk.overview()[0]["name"] == "second"
        notes = [e["text"] for e in office.show(job)["events"] if e["kind"] == "note"]
        assert any("changed in the job file:" in note and "run" in note for note in notes)

    play(tmp_path, story)


def test_a_slice_that_does_not_fit_the_new_file_is_released(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await cancelled(office)
        (held,) = office.cloud.held
        other = dumped(accelerator="v5p-16", zones=["us-east5-a"])
        answer = await office.desk.verb(job, "resume", {"spec": other})
        assert "on a new slice (the one in us-central2-b does not" in answer["text"]
        await office.until(lambda: len(office.starts(job)) == 2)
        assert held not in office.cloud.held
        assert office.show(job)["zone"] == "us-east5-a"

    play(tmp_path, story)


def test_a_change_of_capacity_is_rejected_while_a_slice_is_kept(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await cancelled(office)
        with pytest.raises(RequestError, match=f"capacity: .*drumline delete {job}"):
            await office.desk.verb(job, "resume", {"spec": dumped(capacity="on-demand")})
        assert office.status(job) == "CANCELLED"
        assert office.show(job)["spec"]["capacity"] == "spot"

    play(tmp_path, story)


def test_an_invalid_file_changes_nothing(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await cancelled(office)
        with pytest.raises(RequestError, match="accelerator"):
            await office.desk.verb(job, "resume", {"spec": BASE | {"accelerator": "v4-17"}})
        assert office.status(job) == "CANCELLED"

    play(tmp_path, story)


CHECKPOINT = "gs://lab/runs"


async def create_from(office: Office, other: str, **keys: Any) -> str:
    made = await office.desk.create(BASE | keys, {}, "lab", {"from": other})
    return str(made["id"])


def test_two_running_jobs_never_share_checkpoints(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.buckets["lab"] = "US-CENTRAL2"
        first = await office.create(checkpoint=CHECKPOINT)
        await office.reaches(first, "RUNNING")
        with pytest.raises(
            RequestError, match=f"{first} is RUNNING.*drumline cancel {first} first"
        ):
            await create_from(office, first)
        await office.desk.verb(first, "delete", {})
        await office.reaches(first, "CANCELLED")
        second = await create_from(office, first.lstrip("0"))
        await office.reaches(second, "RUNNING")
        folder = office.show(first)["checkpoint"]
        assert re.fullmatch(rf"{CHECKPOINT}/[0-9a-f]{{8}}-{first}", folder)
        begun, again = office.starts(first)[0].program, office.starts(second)[0].program
        assert begun.checkpoint == again.checkpoint == folder
        assert begun.owner == again.owner == folder.split("/")[-1][:8]
        assert 0 < begun.fence < again.fence
        with pytest.raises(RequestError, match=f"{second} is RUNNING"):
            await office.desk.verb(first, "resume", {})
        await office.desk.verb(second, "delete", {})
        await office.reaches(second, "CANCELLED")
        third = await create_from(office, second, checkpoint="gs://lab/elsewhere")
        await office.reaches(third, "RUNNING")
        assert office.show(third)["checkpoint"] == folder

    play(tmp_path, story)


def test_a_job_cannot_start_from_a_job_without_checkpoints(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await cancelled(office)
        with pytest.raises(RequestError, match="no checkpoints to start from"):
            await create_from(office, job)
        with pytest.raises(RequestError, match="there is no job 000077"):
            await create_from(office, "77")

    play(tmp_path, story)


class Remembering(Client):
    """A client whose server has one job, and keeps what it is asked."""

    def __init__(self, home: Path, **known: Any) -> None:
        super().__init__(home)
        self.asked: dict[str, Any] = {}
        self._known = {"status": "FAILED", "spec": dumped(), "origin": None} | known
        self._server.ask = self._ask  # type: ignore[method-assign]

    def _ask(self, method: str, path: str, body: Any = None, timeout: object = None) -> Any:
        del path, timeout
        if method == "GET":
            return self._known
        self.asked = body
        return {"text": "it goes on"}


def test_a_missing_job_file_is_reported_and_the_stored_one_used(tmp_path: Path) -> None:
    client = Remembering(tmp_path, origin={"file": "/gone/job.yaml", "overrides": []})
    assert "/gone/job.yaml is not there any more" in client.resume(1)["text"]
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
