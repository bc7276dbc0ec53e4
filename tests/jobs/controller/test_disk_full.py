"""A disk that is full for a while: nothing is decided that cannot be written, and nothing ends."""

import asyncio
import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from drumline.jobs.server.api import _storage_error
from tests.jobs.pretend import HOUR, Office, play

WRITES = ("save", "gone", "note", "adopt_stray", "check_writable")


def fill_disk(office: Office) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    for name in WRITES:
        setattr(office.supervisor.store, name, full)
    office.supervisor.store.metrics.save = full  # type: ignore[method-assign]


def empty_disk(office: Office) -> None:
    for name in WRITES:
        delattr(office.supervisor.store, name)
    del office.supervisor.store.metrics.save


def test_a_full_disk_with_a_release_pending_ends_nothing_and_is_told(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        going, staying = await office.create(), await office.create()
        for job in (going, staying):
            await office.reaches(job, "RUNNING")
        office.cloud.deaf = True
        await office.desk.verb(going, "delete", {})
        await office.reaches(going, "CANCELLED", within=120)
        fill_disk(office)
        office.cloud.deaf = False
        office.starts(staying)[0].tells(step=1)
        await asyncio.sleep(HOUR)
        assert not office.running.done(), "the supervision goes on"
        assert "nothing can be written" in office.show(staying)["reason"]
        assert "disk is full" in office.desk.status()["trouble"]["disk"]
        empty_disk(office)
        await office.until(lambda: not office.supervisor.store.releasing(), within=180)
        await office.until(lambda: office.show(staying)["reason"] == "", within=180)
        assert "disk" not in office.desk.status()["trouble"]
        office.starts(staying)[0].ends(0)
        await office.reaches(staying, "SUCCEEDED")

    play(tmp_path, story)


def test_what_happens_while_the_disk_is_full_is_decided_afterwards(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        (name,) = office.cloud.held
        fill_disk(office)
        office.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await asyncio.sleep(HOUR)
        assert office.cloud.count("ask") == 1, "nothing is asked for that was not written down"
        empty_disk(office)
        await office.until(lambda: len(office.starts(job)) == 2, within=180)
        assert office.show(job)["preemptions"] == 1
        await office.until(lambda: name not in office.cloud.held)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_caller_is_told_in_a_sentence_that_nothing_can_be_written(error: Exception) -> None:
    answer = asyncio.run(_storage_error(Request({"type": "http"}), error))
    assert answer.status_code == 507
    assert b"free disk space and try again" in bytes(answer.body)


def test_another_fault_is_not_called_a_full_disk() -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(_storage_error(Request({"type": "http"}), FileNotFoundError(2, "no such file")))
