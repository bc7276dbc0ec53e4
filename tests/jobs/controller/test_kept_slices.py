"""A cancelled job keeps its slice for a resume, for a limited time."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.spec import SpecError, validate
from tests.jobs.fakes import HOUR, ServerHarness, run_scenario


def test_a_kept_slice_is_released_after_an_hour(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        answer = await harness.service.verb(job, "cancel", {})
        assert "is kept for 60 min for a resume, about $" in answer["text"]
        await harness.reaches(job, "CANCELLED")
        await asyncio.sleep(HOUR - 300)
        shown = harness.show(job)
        assert shown["slice"]["kept_for"] == pytest.approx(300, abs=30)
        assert "kept for a resume" in shown["reason"]
        assert re.search(r"kept for a resume until \d\d:\d\d, about \$", shown["reason"])
        assert harness.cloud.held
        await harness.until(lambda: not harness.cloud.held, within=400)
        shown = harness.show(job)
        assert (shown["status"], shown["slice"]) == ("CANCELLED", None)
        assert shown["reason"] == "not resumed within 60 min"

    run_scenario(tmp_path, scenario)


async def failed(harness: ServerHarness, **keys: Any) -> str:
    """Create a job whose program has failed without retries left."""
    job = await harness.create(retry={"failures": 0}, **keys)
    await harness.reaches(job, "RUNNING")
    harness.starts(job)[-1].ends(3)
    await harness.reaches(job, "FAILED", within=120)
    return job


def test_a_failed_job_keeps_its_slice_for_five_minutes(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await failed(harness)
        shown = harness.show(job)
        assert re.search(
            r"1 failure of the program on host 0 .*; slice v4-16 in us-central2-b"
            r" kept until \d\d:\d\d for a resume, about \$\d",
            shown["reason"],
        )
        assert shown["slice"]["kept_for"] == pytest.approx(300, abs=30)
        await harness.service.verb(job, "resume", {})
        await harness.reaches(job, "RUNNING")
        assert harness.cloud.count("ask") == 1
        harness.starts(job)[-1].ends(3)
        await harness.reaches(job, "FAILED", within=120)
        await asyncio.sleep(200)
        assert harness.cloud.held
        await harness.until(lambda: not harness.cloud.held, within=200)
        shown = harness.show(job)
        assert "1 failure of the program" in shown["reason"]
        assert "kept" not in shown["reason"]

    run_scenario(tmp_path, scenario)


def test_the_job_file_sets_how_long_a_failed_job_keeps_its_slice(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        long = await failed(harness, keep="1h")
        await failed(harness, keep=0)
        await harness.until(lambda: len(harness.cloud.held) == 1, within=60)
        await asyncio.sleep(HOUR - 300)
        assert len(harness.cloud.held) == 1
        answer = await harness.service.verb(long, "delete", {})
        assert answer["text"] == f"8 chips in us-central2-b of {long} are being released"
        await harness.until(lambda: not harness.cloud.held, within=60)

    run_scenario(tmp_path, scenario)


def test_the_job_file_sets_how_long_a_slice_is_kept(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        short = await harness.create(keep="10m")
        none = await harness.create(keep=0)
        for job in (short, none):
            await harness.reaches(job, "RUNNING")
            answer = await harness.service.verb(job, "cancel", {})
            await harness.reaches(job, "CANCELLED")
        assert answer["text"].endswith("is released")
        await harness.until(lambda: len(harness.cloud.held) == 1, within=60)
        await asyncio.sleep(500)
        assert len(harness.cloud.held) == 1
        await harness.until(lambda: not harness.cloud.held, within=200)

    run_scenario(tmp_path, scenario)


def test_a_resume_in_time_keeps_the_slice_for_good(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(keep="10m")
        await harness.reaches(job, "RUNNING")
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        await asyncio.sleep(500)
        await harness.service.verb(job, "resume", {})
        await harness.reaches(job, "RUNNING")
        await asyncio.sleep(HOUR)
        assert harness.status(job) == "RUNNING"
        assert harness.cloud.count("ask") == 1

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("wrong", ["forever", -1, "8000h", [1]])
def test_an_invalid_duration_is_rejected_with_the_valid_form(wrong: object) -> None:
    with pytest.raises(SpecError, match=r"keep: is .*; expected"):
        validate({"accelerator": "v4-8", "run": "true", "workdir": None, "keep": wrong})


def test_a_cancel_that_starts_the_server_stops_the_program(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        await harness.restart()
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        assert harness.starts(job)[-1].stopped
        assert harness.cloud.held, "kept for a resume"

    run_scenario(tmp_path, scenario)


def test_a_cancel_while_the_cloud_cannot_be_reached_waits_until_it_can(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        from tests.jobs.fakes import UNAVAILABLE

        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        await harness.restart()
        harness.cloud.error = UNAVAILABLE
        await harness.service.verb(job, "cancel", {})
        await asyncio.sleep(600)
        assert harness.show(job)["ended"] is None, "the program may be running on"
        harness.cloud.error = None
        await harness.reaches(job, "CANCELLED", within=120)
        assert harness.starts(job)[-1].stopped

    run_scenario(tmp_path, scenario)


def test_a_job_is_cancelled_only_when_every_host_confirmed_it(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.unreachable = (1,)
        await harness.service.verb(job, "cancel", {})
        await harness.until(
            lambda: harness.show(job)["reason"] == "stopping: host 1 cannot be reached",
            within=90,
        )
        await asyncio.sleep(120)
        assert harness.status(job) == "RUNNING"
        session.unreachable = ()
        await harness.reaches(job, "CANCELLED", within=90)
        assert session.stopped

    run_scenario(tmp_path, scenario)


def test_a_deleted_job_ends_with_its_slice_when_a_host_cannot_be_reached(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.starts(job)[0].unreachable = (0,)
        harness.cloud.ignores_deletes = True
        await harness.service.verb(job, "delete", {})
        await harness.until(lambda: harness.cloud.count("release") > 0, within=90)
        await asyncio.sleep(120)
        assert harness.status(job) == "RUNNING"
        assert "waiting for its slice to be deleted" in harness.show(job)["reason"]
        harness.cloud.ignores_deletes = False
        await harness.reaches(job, "CANCELLED", within=90)
        assert not harness.cloud.held

    run_scenario(tmp_path, scenario)
