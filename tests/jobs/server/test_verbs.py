"""Concurrent commands: none overwrites the changes of another one."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.code import CodeError
from drumline.jobs.server.verbs import RequestError
from tests.jobs.pretend import Office, play


class Door:
    """Holds up whoever comes to it until it is opened."""

    def __init__(self, opens: bool = False) -> None:
        self._open = asyncio.Event()
        self.reached = asyncio.Event()
        if opens:
            self.open()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._open.wait()


async def do(office: Office, job: str, verb: str, **body: Any) -> str:
    return str((await office.desk.verb(job, verb, body))["text"])


async def running(office: Office, **keys: Any) -> str:
    job = await office.create(**keys)
    await office.reaches(job, "RUNNING")
    return job


def slow_to_stop(office: Office, job: str) -> Door:
    """Its program takes until the door is opened to end."""
    session, door = office.starts(job)[-1], Door()
    ends = session.stop

    async def stop(grace: float) -> None:
        await door.passed()
        await ends(grace)

    session.stop = stop  # type: ignore[method-assign]
    return door


def slow_to_pack(office: Office) -> Door:
    door = Door()

    async def pack(*_: object) -> None:
        await door.passed()

    office.desk.files.pack = pack  # type: ignore[method-assign,assignment]
    return door


async def holding(office: Office, **keys: Any) -> str:
    """A job that was cancelled and kept its slice."""
    job = await running(office, **keys)
    await do(office, job, "cancel")
    await office.reaches(job, "CANCELLED")
    assert office.cloud.held
    return job


async def slice_goes(office: Office) -> None:
    await office.until(lambda: not office.cloud.held and not office.cloud.requested)


def test_a_cancel_after_a_delete_does_not_keep_the_slice(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        door = slow_to_stop(office, job)
        await do(office, job, "delete")
        await door.reached.wait()
        assert "already being deleted" in await do(office, job, "cancel")
        door.open()
        await office.reaches(job, "CANCELLED")
        await slice_goes(office)

    play(tmp_path, story)


def test_a_resume_during_a_cancel_takes_effect_afterwards_on_the_same_slice(
    tmp_path: Path,
) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        name = office.show(job)["slice"]["name"]
        door = slow_to_stop(office, job)
        await do(office, job, "cancel")
        await door.reached.wait()
        assert "after its program has stopped" in await do(office, job, "resume")
        assert "already resumed" in await do(office, job, "resume")
        door.open()
        await office.until(lambda: len(office.starts(job)) == 2)
        await office.reaches(job, "RUNNING")
        shown = office.show(job)
        assert shown["slice"]["name"] == name
        assert [one["outcome"] for one in shown["attempts"]] == ["cancelled", None]
        assert office.cloud.count("ask") == 1

    play(tmp_path, story)


def test_a_resume_during_a_cancel_survives_the_loss_of_the_slice(
    tmp_path: Path,
) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        name = office.show(job)["slice"]["name"]
        door = slow_to_stop(office, job)
        await do(office, job, "cancel")
        await door.reached.wait()
        await do(office, job, "resume")
        office.cloud.becomes(name, "SUSPENDED", None)
        await office.until(lambda: len(office.starts(job)) == 2, within=120)
        await office.reaches(job, "RUNNING")
        assert office.show(job)["slice"]["name"] != name

    play(tmp_path, story)


def test_the_last_of_cancel_resume_cancel_counts(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        door = slow_to_stop(office, job)
        await do(office, job, "cancel")
        await door.reached.wait()
        await do(office, job, "resume")
        await do(office, job, "cancel")
        door.open()
        await office.reaches(job, "CANCELLED")
        assert len(office.starts(job)) == 1

    play(tmp_path, story)


def test_a_resume_during_a_delete_is_rejected(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        door = slow_to_stop(office, job)
        await do(office, job, "delete")
        await door.reached.wait()
        with pytest.raises(RequestError, match=f"being deleted.*drumline wait {job}"):
            await do(office, job, "resume")
        door.open()
        await office.reaches(job, "CANCELLED")
        await slice_goes(office)

    play(tmp_path, story)


def test_a_delete_during_a_resume_wins(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await holding(office)
        door = slow_to_pack(office)
        resuming = asyncio.ensure_future(do(office, job, "resume"))
        await door.reached.wait()
        await do(office, job, "delete")
        door.open()
        with pytest.raises(RequestError, match="deleted in the meantime"):
            await resuming
        await slice_goes(office)
        assert office.status(job) == "CANCELLED"
        assert "restarts on a new slice" in await do(office, job, "resume"), "asked for afterwards"
        await office.reaches(job, "RUNNING")

    play(tmp_path, story)


def test_a_clean_during_a_resume_removes_the_job(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await holding(office)
        door = slow_to_pack(office)
        resuming = asyncio.ensure_future(do(office, job, "resume"))
        await door.reached.wait()
        assert "are removed" in await do(office, job, "clean")
        door.open()
        with pytest.raises(RequestError, match="there is no job"):
            await resuming
        assert office.desk.overview() == []
        await slice_goes(office)

    play(tmp_path, story)


def test_a_resume_during_a_clean_rejects_one_of_them(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await holding(office)
        office.running.cancel()  # no round may release the slice between the two
        await asyncio.wait({office.running})
        cleaning = asyncio.ensure_future(do(office, job, "clean"))
        await asyncio.sleep(0)
        assert "restarts" in await do(office, job, "resume")
        async with office.supervisor.changed:
            office.supervisor.changed.notify_all()
        with pytest.raises(RequestError, match="resumed in the meantime; nothing was removed"):
            await cleaning
        assert office.show(job)["status"] == "QUEUED"

    play(tmp_path, story)


def test_of_two_concurrent_cleans_one_succeeds(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await running(office)
        results = await asyncio.gather(
            do(office, job, "clean"), do(office, job, "clean"), return_exceptions=True
        )
        assert {type(one) for one in results} == {str, RequestError}

    play(tmp_path, story)


async def _unpackable(*_: object) -> None:
    raise RequestError(str(CodeError("workdir: /gone is not there")))


async def _overtaken(office: Office, job: str) -> None:
    door = slow_to_pack(office)
    resuming = asyncio.ensure_future(do(office, job, "resume", secrets={"TOKEN": "s3cret"}))
    await door.reached.wait()
    await do(office, job, "delete")
    door.open()
    await resuming


async def _not_packed(office: Office, job: str) -> None:
    office.desk.files.pack = _unpackable  # type: ignore[method-assign,assignment]
    await do(office, job, "resume", secrets={"TOKEN": "s3cret"})


async def _disk_full(office: Office, job: str) -> None:
    def save(*_: object) -> None:
        raise RequestError("no space left on device")

    office.supervisor.store.save = save  # type: ignore[method-assign,assignment]
    await do(office, job, "resume", secrets={"TOKEN": "s3cret"})


@pytest.mark.parametrize("fails", [_not_packed, _overtaken, _disk_full])
def test_a_resume_that_fails_leaves_no_secrets_behind(
    tmp_path: Path, fails: Callable[[Office, str], Awaitable[None]]
) -> None:
    async def story(office: Office) -> None:
        spec = {"accelerator": "v4-16", "zones": ["us-central2-b"], "run": "x", "workdir": None}
        given = {"TOKEN": "s3cret"}
        made = await office.desk.create({**spec, "secrets": ["TOKEN"]}, given, "lab")
        job = str(made["id"])
        await office.reaches(job, "RUNNING")
        assert office.supervisor.folders.secrets(job) == given
        await do(office, job, "cancel")
        await office.reaches(job, "CANCELLED")
        with pytest.raises(RequestError):
            await fails(office, job)
        assert [*(tmp_path / "secrets").iterdir()] == []

    play(tmp_path, story)


def test_a_create_that_cannot_be_written_leaves_no_secrets_behind(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        def write(*_: object) -> None:
            raise OSError("no space left on device")

        office.desk.store._write_state = write  # type: ignore[method-assign,assignment]
        spec = {"accelerator": "v4-16", "run": "x", "workdir": None, "secrets": ["TOKEN"]}
        with pytest.raises(OSError, match="no space"):
            await office.desk.create(spec, {"TOKEN": "s3cret"}, "lab")
        assert [*(tmp_path / "secrets").iterdir()] == []

    play(tmp_path, story)


def test_a_late_answer_of_the_cloud_to_a_removed_job_changes_nothing(
    tmp_path: Path,
) -> None:
    async def story(office: Office) -> None:
        door = Door()
        ask = office.cloud.ask

        async def slow(request: Any) -> None:
            await door.passed()
            await ask(request)

        office.cloud.ask = slow  # type: ignore[method-assign]
        job = await office.create()
        await door.reached.wait()
        await do(office, job, "clean")
        door.open()
        await office.until(lambda: office.cloud.count("ask") == 1)
        await slice_goes(office)
        assert office.desk.overview() == []

    play(tmp_path, story)
