"""A temporarily full disk: nothing is decided that cannot be saved, and no program ends."""

import asyncio
import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from drumline.jobs.server.api import _storage_error
from tests.jobs.fakes import HOUR, ServerHarness, run_scenario

WRITES = ("save", "gone", "note", "adopt_stray", "check_writable")


def full(*_: Any, **__: Any) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def fill_disk(harness: ServerHarness) -> None:
    for name in WRITES:
        setattr(harness.supervisor.store, name, full)
    harness.supervisor.store.metrics.save = full  # type: ignore[method-assign]


def empty_disk(harness: ServerHarness) -> None:
    for name in WRITES:
        delattr(harness.supervisor.store, name)
    del harness.supervisor.store.metrics.save


def test_a_full_disk_with_a_release_pending_is_reported(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        going, staying = await harness.create(), await harness.create()
        for job in (going, staying):
            await harness.reaches(job, "RUNNING")
        harness.cloud.ignores_deletes = True
        await harness.service.verb(going, "delete", {})
        await harness.reaches(going, "CANCELLED", within=120)
        fill_disk(harness)
        harness.cloud.ignores_deletes = False
        harness.starts(staying)[0].send_heartbeat(step=1)
        await asyncio.sleep(HOUR)
        assert not harness.running.done(), "the supervision goes on"
        assert "nothing can be written" in harness.show(staying)["reason"]
        assert "disk is full" in harness.service.status()["trouble"]["disk"]
        empty_disk(harness)
        await harness.until(lambda: not harness.supervisor.store.releasing(), within=180)
        await harness.until(lambda: harness.show(staying)["reason"] == "", within=180)
        assert "disk" not in harness.service.status()["trouble"]
        harness.starts(staying)[0].ends(0)
        await harness.reaches(staying, "SUCCEEDED")

    run_scenario(tmp_path, scenario)


def test_events_during_a_full_disk_are_decided_afterwards(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (name,) = harness.cloud.held
        fill_disk(harness)
        harness.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await asyncio.sleep(HOUR)
        assert harness.cloud.count("ask") == 1, "nothing is asked for that was not written down"
        empty_disk(harness)
        await harness.until(lambda: len(harness.starts(job)) == 2, within=180)
        assert harness.show(job)["preemptions"] == 1
        await harness.until(lambda: name not in harness.cloud.held)

    run_scenario(tmp_path, scenario)


def test_an_end_that_is_saved_before_its_metrics_deletes_the_secrets(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.supervisor.folders.save_secrets(job, {"TOKEN": "x"})
        harness.starts(job)[0].send_heartbeat(step=1)
        await asyncio.sleep(1)
        metrics = harness.supervisor.store.metrics
        saved = metrics.save
        metrics.save = full  # type: ignore[method-assign]
        harness.starts(job)[0].send_heartbeat(step=2, loss=0.5)
        harness.starts(job)[0].ends(0)
        await harness.reaches(job, "SUCCEEDED")
        await asyncio.sleep(60)
        assert harness.supervisor.folders.secrets(job) == {}
        metrics.save = saved  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert [point.step for point in metrics.points(job)] == [1, 2], "the metrics are not lost"

    run_scenario(tmp_path, scenario)


def test_secrets_that_cannot_be_deleted_now_are_deleted_later(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        def read_only(*_: Any) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.supervisor.folders.save_secrets(job, {"TOKEN": "x"})
        folders = harness.supervisor.folders
        folders.forget_secrets = read_only  # type: ignore[assignment, method-assign]
        harness.starts(job)[0].ends(0)
        await harness.reaches(job, "SUCCEEDED")
        del folders.forget_secrets
        await harness.until(lambda: folders.secrets(job) == {}, within=180)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_gives_callers_a_message(error: Exception) -> None:
    answer = asyncio.run(_storage_error(Request({"type": "http"}), error))
    assert answer.status_code == 507
    assert b"free disk space and try again" in bytes(answer.body)


def test_another_fault_is_not_called_a_full_disk() -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(_storage_error(Request({"type": "http"}), FileNotFoundError(2, "no such file")))
