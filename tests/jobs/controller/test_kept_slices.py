"""A cancelled job keeps its slice for a resume, at a cost that ends."""

import asyncio
from pathlib import Path

import pytest

from drumline.jobs.spec import SpecError, validate
from tests.jobs.pretend import HOUR, Office, play


def test_a_kept_slice_is_released_after_an_hour(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        answer = await office.desk.verb(job, "cancel", {})
        assert "is kept for 60 min for a resume, which costs about $" in answer["text"]
        await office.reaches(job, "CANCELLED")
        await asyncio.sleep(HOUR - 300)
        shown = office.show(job)
        assert shown["slice"]["kept_for"] == pytest.approx(300, abs=30)
        assert "kept for a resume" in shown["reason"]
        assert " min left, about $" in shown["reason"]
        assert office.cloud.held
        await office.until(lambda: not office.cloud.held, within=400)
        shown = office.show(job)
        assert (shown["status"], shown["slice"]) == ("CANCELLED", None)
        assert shown["reason"] == "not resumed within 60 min"

    play(tmp_path, story)


def test_the_job_file_says_how_long_it_is_kept_and_0_keeps_nothing(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        short = await office.create(keep="10m")
        none = await office.create(keep=0)
        for job in (short, none):
            await office.reaches(job, "RUNNING")
            answer = await office.desk.verb(job, "cancel", {})
            await office.reaches(job, "CANCELLED")
        assert answer["text"].endswith("is released")
        await office.until(lambda: len(office.cloud.held) == 1, within=60)
        await asyncio.sleep(500)
        assert len(office.cloud.held) == 1
        await office.until(lambda: not office.cloud.held, within=200)

    play(tmp_path, story)


def test_a_resume_in_time_keeps_the_slice_for_good(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create(keep="10m")
        await office.reaches(job, "RUNNING")
        await office.desk.verb(job, "cancel", {})
        await office.reaches(job, "CANCELLED")
        await asyncio.sleep(500)
        await office.desk.verb(job, "resume", {})
        await office.reaches(job, "RUNNING")
        await asyncio.sleep(HOUR)
        assert office.status(job) == "RUNNING"
        assert office.cloud.count("ask") == 1

    play(tmp_path, story)


@pytest.mark.parametrize("wrong", ["forever", -1, "8000h", [1]])
def test_a_time_that_is_none_is_refused_with_what_it_takes(wrong: object) -> None:
    with pytest.raises(SpecError, match=r"keep: is .*; expected"):
        validate({"accelerator": "v4-8", "run": "true", "workdir": None, "keep": wrong})


def test_a_cancel_that_starts_the_server_stops_the_program(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        await office.restart()
        await office.desk.verb(job, "cancel", {})
        await office.reaches(job, "CANCELLED")
        assert office.starts(job)[-1].stopped
        assert office.cloud.held, "kept for a resume"

    play(tmp_path, story)


def test_a_cancel_while_the_cloud_cannot_be_reached_waits_until_it_can(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        from tests.jobs.pretend import UNAVAILABLE

        job = await office.create()
        await office.reaches(job, "RUNNING")
        await office.restart()
        office.cloud.trouble = UNAVAILABLE
        await office.desk.verb(job, "cancel", {})
        await asyncio.sleep(600)
        assert office.show(job)["ended"] is None, "the program may be running on"
        office.cloud.trouble = None
        await office.reaches(job, "CANCELLED", within=120)
        assert office.starts(job)[-1].stopped

    play(tmp_path, story)
