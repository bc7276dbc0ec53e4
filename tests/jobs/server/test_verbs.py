"""Concurrent commands: none overwrites the changes of another one."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.protocol import CloudError
from drumline.hosts.code import CodeError
from drumline.jobs.server.job_files import PackingOptions
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import ServerHarness, run_scenario


class Door:
    """A door that blocks callers until it is opened."""

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


async def do(harness: ServerHarness, job: str, verb: str, **body: Any) -> str:
    return str((await harness.service.verb(job, verb, body))["text"])


async def running(harness: ServerHarness, **keys: Any) -> str:
    job = await harness.create(**keys)
    await harness.reaches(job, "RUNNING")
    return job


def slow_to_stop(harness: ServerHarness, job: str) -> Door:
    """Create a job whose program ends only after the door is opened."""
    session, door = harness.starts(job)[-1], Door()
    ends = session.stop

    async def stop(grace: float) -> tuple[int, ...]:
        await door.passed()
        return await ends(grace)

    session.stop = stop  # type: ignore[method-assign]
    return door


def slow_to_pack(harness: ServerHarness) -> Door:
    door = Door()

    async def pack(*_: object) -> None:
        await door.passed()

    harness.service.files.pack = pack  # type: ignore[method-assign,assignment]
    return door


async def holding(harness: ServerHarness, **keys: Any) -> str:
    """Create a cancelled job that keeps its slice."""
    job = await running(harness, **keys)
    await do(harness, job, "cancel")
    await harness.reaches(job, "CANCELLED")
    assert harness.cloud.held
    return job


async def slice_goes(harness: ServerHarness) -> None:
    await harness.until(lambda: not harness.cloud.held and not harness.cloud.requested)


def test_delete_speaks_of_chips_only_if_the_job_holds_a_slice(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        waiting = await harness.create()
        await harness.reaches(waiting, "WAITING")
        request = "its request for v4-16 in us-central2-b is withdrawn"
        assert await do(harness, waiting, "delete") == f"{waiting} is cancelled; {request}"
        await harness.reaches(waiting, "CANCELLED")
        again = await do(harness, waiting, "delete")
        assert again.startswith(f"{waiting} is CANCELLED; its request dl-")
        assert again.endswith(" in us-central2-b is being withdrawn")
        await harness.until(lambda: not harness.service.store.releasing())
        assert await do(harness, waiting, "delete") == f"{waiting} is CANCELLED; it holds no slice"
        harness.cloud.given = ("ACTIVE", "READY")
        job = await running(harness)
        assert "8 chips in us-central2-b are being released" in await do(harness, job, "delete")

    run_scenario(tmp_path, scenario)


def test_clean_right_after_delete_waits_for_the_program(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        door = slow_to_stop(harness, job)
        await do(harness, job, "delete")
        await door.reached.wait()
        cleaning = asyncio.ensure_future(do(harness, job, "clean"))
        await asyncio.sleep(5)
        assert not cleaning.done()
        door.open()
        assert "are removed" in await cleaning
        assert harness.service.overview() == []
        await slice_goes(harness)

    run_scenario(tmp_path, scenario)


def test_clean_while_the_slice_is_being_deleted_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        [name] = harness.cloud.held
        harness.cloud.no_release = CloudError("try again later", 14)
        await do(harness, job, "delete")
        await harness.reaches(job, "CANCELLED")
        being_deleted = f"its slice {name} in us-central2-b is being deleted"
        assert await do(harness, job, "delete") == f"{job} is CANCELLED; {being_deleted}"
        removed = f"{job} and its logs are removed; {being_deleted}"
        assert await do(harness, job, "clean") == removed
        assert harness.service.overview() == []
        assert harness.cloud.held
        harness.cloud.no_release = None
        await slice_goes(harness)

    run_scenario(tmp_path, scenario)


def test_a_cancel_after_a_delete_does_not_keep_the_slice(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        door = slow_to_stop(harness, job)
        await do(harness, job, "delete")
        await door.reached.wait()
        assert "already being deleted" in await do(harness, job, "cancel")
        door.open()
        await harness.reaches(job, "CANCELLED")
        await slice_goes(harness)

    run_scenario(tmp_path, scenario)


def test_a_resume_during_a_cancel_takes_effect_afterwards_on_the_same_slice(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        name = harness.show(job)["slice"]["name"]
        door = slow_to_stop(harness, job)
        await do(harness, job, "cancel")
        await door.reached.wait()
        assert "after its program has stopped" in await do(harness, job, "resume")
        assert "already resumed" in await do(harness, job, "resume")
        door.open()
        await harness.until(lambda: len(harness.starts(job)) == 2)
        await harness.reaches(job, "RUNNING")
        shown = harness.show(job)
        assert shown["slice"]["name"] == name
        assert [one["outcome"] for one in shown["attempts"]] == ["cancelled", None]
        assert harness.cloud.count("ask") == 1

    run_scenario(tmp_path, scenario)


def test_a_resume_during_a_cancel_survives_the_loss_of_the_slice(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        name = harness.show(job)["slice"]["name"]
        door = slow_to_stop(harness, job)
        await do(harness, job, "cancel")
        await door.reached.wait()
        await do(harness, job, "resume")
        harness.cloud.becomes(name, "SUSPENDED", None)
        await harness.until(lambda: len(harness.starts(job)) == 2, within=120)
        await harness.reaches(job, "RUNNING")
        assert harness.show(job)["slice"]["name"] != name

    run_scenario(tmp_path, scenario)


def test_the_last_of_cancel_resume_cancel_counts(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        door = slow_to_stop(harness, job)
        await do(harness, job, "cancel")
        await door.reached.wait()
        await do(harness, job, "resume")
        await do(harness, job, "cancel")
        door.open()
        await harness.reaches(job, "CANCELLED")
        assert len(harness.starts(job)) == 1

    run_scenario(tmp_path, scenario)


def test_a_resume_during_a_delete_is_rejected(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        door = slow_to_stop(harness, job)
        await do(harness, job, "delete")
        await door.reached.wait()
        with pytest.raises(RequestError, match=f"being deleted.*drumline wait {job}"):
            await do(harness, job, "resume")
        door.open()
        await harness.reaches(job, "CANCELLED")
        await slice_goes(harness)

    run_scenario(tmp_path, scenario)


def test_a_second_delete_during_a_resume_wins_too(tmp_path: Path) -> None:
    """The job is already deleted, so the two deletes differ only in their time."""

    async def scenario(harness: ServerHarness) -> None:
        job = await holding(harness)
        await do(harness, job, "delete")
        await slice_goes(harness)
        door = slow_to_pack(harness)
        resuming = asyncio.ensure_future(do(harness, job, "resume"))
        await door.reached.wait()
        await do(harness, job, "delete")
        door.open()
        with pytest.raises(RequestError, match="deleted in the meantime"):
            await resuming
        assert harness.status(job) == "CANCELLED"

    run_scenario(tmp_path, scenario)


def test_a_delete_during_a_resume_wins(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await holding(harness)
        door = slow_to_pack(harness)
        resuming = asyncio.ensure_future(do(harness, job, "resume"))
        await door.reached.wait()
        await do(harness, job, "delete")
        door.open()
        with pytest.raises(RequestError, match="deleted in the meantime"):
            await resuming
        await slice_goes(harness)
        assert harness.status(job) == "CANCELLED"
        assert "restarts on a new slice" in await do(harness, job, "resume"), "asked for afterwards"
        await harness.reaches(job, "RUNNING")

    run_scenario(tmp_path, scenario)


def test_a_clean_during_a_resume_removes_the_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await holding(harness)
        door = slow_to_pack(harness)
        resuming = asyncio.ensure_future(do(harness, job, "resume"))
        await door.reached.wait()
        assert "are removed" in await do(harness, job, "clean")
        door.open()
        with pytest.raises(RequestError, match="there is no job"):
            await resuming
        assert harness.service.overview() == []
        await slice_goes(harness)

    run_scenario(tmp_path, scenario)


def test_a_resume_during_a_clean_rejects_one_of_them(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await holding(harness)
        harness.running.cancel()  # prevent a round from releasing the slice between the two
        await asyncio.wait({harness.running})
        cleaning = asyncio.ensure_future(do(harness, job, "clean"))
        await asyncio.sleep(0)
        assert "restarts" in await do(harness, job, "resume")
        async with harness.supervisor.changed:
            harness.supervisor.changed.notify_all()
        with pytest.raises(RequestError, match="resumed in the meantime; nothing was removed"):
            await cleaning
        assert harness.show(job)["status"] == "QUEUED"

    run_scenario(tmp_path, scenario)


def test_of_two_concurrent_cleans_one_succeeds(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await running(harness)
        results = await asyncio.gather(
            do(harness, job, "clean"), do(harness, job, "clean"), return_exceptions=True
        )
        assert {type(one) for one in results} == {str, RequestError}

    run_scenario(tmp_path, scenario)


def test_a_create_that_is_cancelled_while_its_code_is_packed_creates_nothing(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        service, door = harness.service, slow_to_pack(harness)
        spec = {"accelerator": "v4-16", "zones": ["us-central2-b"], "run": "x", "workdir": None}
        options = PackingOptions(token="mine")  # noqa: S106 - names a request
        creating = asyncio.ensure_future(service.create(spec, {}, "lab", packing=options))
        await door.reached.wait()
        with pytest.raises(RequestError):
            service.files.cancel("another")
        service.files.cancel("mine")
        door.open()
        with pytest.raises(RequestError, match="interrupted; nothing was changed"):
            await creating
        assert service.overview() == []
        with pytest.raises(RequestError):
            service.files.cancel("mine")

    run_scenario(tmp_path, scenario)


def test_a_resume_that_is_cancelled_while_its_code_is_packed_changes_nothing(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await holding(harness)
        door = slow_to_pack(harness)
        resuming = asyncio.ensure_future(do(harness, job, "resume", packing="mine"))
        await door.reached.wait()
        harness.service.files.cancel("mine")
        door.open()
        with pytest.raises(RequestError, match="interrupted; nothing was changed"):
            await resuming
        assert harness.show(job)["status"] == "CANCELLED"

    run_scenario(tmp_path, scenario)


async def _unpackable(*_: object) -> None:
    raise RequestError(str(CodeError("workdir: /gone is not there")))


async def _overtaken(harness: ServerHarness, job: str) -> None:
    door = slow_to_pack(harness)
    resuming = asyncio.ensure_future(do(harness, job, "resume", secrets={"TOKEN": "s3cret"}))
    await door.reached.wait()
    await do(harness, job, "delete")
    door.open()
    await resuming


async def _not_packed(harness: ServerHarness, job: str) -> None:
    harness.service.files.pack = _unpackable  # type: ignore[method-assign,assignment]
    await do(harness, job, "resume", secrets={"TOKEN": "s3cret"})


async def _disk_full(harness: ServerHarness, job: str) -> None:
    def save(*_: object) -> None:
        raise RequestError("no space left on device")

    harness.supervisor.store.save = save  # type: ignore[method-assign,assignment]
    await do(harness, job, "resume", secrets={"TOKEN": "s3cret"})


@pytest.mark.parametrize("fails", [_not_packed, _overtaken, _disk_full])
def test_a_resume_that_fails_leaves_no_secrets_behind(
    tmp_path: Path, fails: Callable[[ServerHarness, str], Awaitable[None]]
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        spec = {"accelerator": "v4-16", "zones": ["us-central2-b"], "run": "x", "workdir": None}
        secret_values = {"TOKEN": "s3cret"}
        made = await harness.service.create({**spec, "secrets": ["TOKEN"]}, secret_values, "lab")
        job = str(made["id"])
        await harness.reaches(job, "RUNNING")
        assert harness.supervisor.folders.secrets(job) == secret_values
        await do(harness, job, "cancel")
        await harness.reaches(job, "CANCELLED")
        with pytest.raises(RequestError):
            await fails(harness, job)
        assert [*(tmp_path / "secrets").iterdir()] == []

    run_scenario(tmp_path, scenario)


def test_a_create_that_cannot_be_written_leaves_no_secrets_behind(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        def write(*_: object) -> None:
            raise OSError("no space left on device")

        harness.service.store._write_state = write  # type: ignore[method-assign,assignment]
        spec = {"accelerator": "v4-16", "run": "x", "workdir": None, "secrets": ["TOKEN"]}
        with pytest.raises(OSError, match="no space"):
            await harness.service.create(spec, {"TOKEN": "s3cret"}, "lab")
        assert [*(tmp_path / "secrets").iterdir()] == []

    run_scenario(tmp_path, scenario)


def test_a_late_answer_of_the_cloud_to_a_removed_job_changes_nothing(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        door = Door()
        ask = harness.cloud.ask

        async def slow(request: Any) -> str:
            await door.passed()
            return await ask(request)

        harness.cloud.ask = slow  # type: ignore[method-assign]
        job = await harness.create()
        await door.reached.wait()
        await do(harness, job, "clean")
        door.open()
        await harness.until(lambda: harness.cloud.count("ask") == 1)
        await slice_goes(harness)
        assert harness.service.overview() == []

    run_scenario(tmp_path, scenario)
