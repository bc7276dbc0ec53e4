"""Slices of a lost database are found and released."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.google.placements import ListedNode, ListedRequest
from drumline.jobs.controller.slices import DatabaseIds
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import UNAVAILABLE, ZONE, ServerHarness, run_scenario

Cloud = tuple[dict[str, ListedRequest], dict[str, ListedNode]]


def lose_database(home: Path) -> None:
    for path in home.glob("jobs.db*"):
        path.unlink()


def first_life(home: Path, jobs: int = 1) -> Cloud:
    """Create running jobs, and return the cloud's resources at the end."""
    snapshots: list[Cloud] = []

    async def scenario(harness: ServerHarness) -> None:
        for _ in range(jobs):
            job = await harness.create()
            await harness.reaches(job, "RUNNING")
        snapshots.append((dict(harness.cloud.requested), dict(harness.cloud.held)))

    run_scenario(home, scenario)
    return snapshots[0]


def second_life(home: Path, cloud: Cloud, scenario: Any) -> None:
    async def with_slices(harness: ServerHarness) -> None:
        harness.cloud.requested.update(cloud[0])
        harness.cloud.held.update(cloud[1])
        await scenario(harness)

    run_scenario(home, with_slices)


def test_slices_of_a_lost_database_are_listed_and_kept_until_the_user_decides(
    tmp_path: Path,
) -> None:
    cloud = first_life(tmp_path)
    (name,) = cloud[1]
    lose_database(tmp_path)

    async def scenario(harness: ServerHarness) -> None:
        await asyncio.sleep(1000)
        assert name in harness.cloud.held, "nothing is released unasked"
        (orphan,) = (await harness.service.orphans.find())["strays"]
        assert (orphan["name"], orphan["zone"], orphan["job"]) == (name, ZONE, "000001")
        assert [one["name"] for one in harness.service.status()["strays"]] == [name]
        answer = await harness.service.orphans.apply("release", [], "lab")
        assert answer["text"] == [f"{name} in {ZONE} is being released"]
        await harness.until(lambda: name not in harness.cloud.held)
        assert (await harness.service.orphans.find())["strays"] == []

    second_life(tmp_path, cloud, scenario)


def test_a_job_of_the_new_database_does_not_take_a_slice_of_the_lost_one_for_its_own(
    tmp_path: Path,
) -> None:
    cloud = first_life(tmp_path)
    (name,) = cloud[1]
    lose_database(tmp_path)

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        assert job == "000002", "the lost database has given 000001"
        assert harness.show(job)["slice"]["name"] != name
        await harness.service.verb(job, "clean", {})
        assert name in harness.cloud.held

    second_life(tmp_path, cloud, scenario)


def test_an_adopted_orphan_belongs_to_a_job_and_runs_its_file(tmp_path: Path) -> None:
    cloud = first_life(tmp_path)
    (name,) = cloud[1]
    lose_database(tmp_path)

    async def scenario(harness: ServerHarness) -> None:
        (text,) = (await harness.service.orphans.apply("adopt", [name], "lab"))["text"]
        assert "drumline resume 000002 --file FILE" in text
        (row,) = harness.service.overview()
        assert (row["status"], row["zone"], row["chips_held"]) == ("CANCELLED", ZONE, 8)
        assert harness.service.status()["strays"] == []
        with pytest.raises(RequestError, match="--file FILE"):
            await harness.service.verb("2", "resume", {})
        spec = {"accelerator": "v4-16", "zones": [ZONE], "run": "python go_on.py", "workdir": None}
        answer = await harness.service.verb("2", "resume", {"spec": spec})
        assert "on the slice kept" in answer["text"]
        await harness.reaches("000002", "RUNNING")
        assert harness.show("000002")["slice"]["name"] == name
        assert harness.starts("000002")[0].program.run == "python go_on.py"
        assert harness.cloud.count("ask") == 0
        await harness.service.verb("2", "delete", {})
        await harness.until(lambda: not harness.cloud.held)

    second_life(tmp_path, cloud, scenario)


def test_an_adopted_slice_that_is_not_resumed_can_be_deleted(tmp_path: Path) -> None:
    cloud = first_life(tmp_path)
    lose_database(tmp_path)

    async def scenario(harness: ServerHarness) -> None:
        await harness.service.orphans.apply("adopt", [], "lab")
        await harness.service.verb("2", "delete", {})
        await harness.until(lambda: not harness.cloud.held)

    second_life(tmp_path, cloud, scenario)


def test_an_older_copy_of_the_database_neither_releases_nor_reuses_later_slices(
    tmp_path: Path,
) -> None:
    first_life(tmp_path)
    shutil.copy(tmp_path / "jobs.db", tmp_path / "copy.db")
    cloud = first_life(tmp_path)
    newer = [name for name in cloud[1] if "-000002-" in name]
    assert newer
    lose_database(tmp_path)
    shutil.move(tmp_path / "copy.db", tmp_path / "jobs.db")

    async def scenario(harness: ServerHarness) -> None:
        await asyncio.sleep(700)
        assert newer[0] in harness.cloud.held
        assert [one["name"] for one in harness.service.status()["strays"]] == newer
        assert await harness.create() == "000003"

    second_life(tmp_path, cloud, scenario)


def test_slices_missing_in_the_current_database_are_still_released(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        labels = {"drumline-owner": harness.service.store.owner, "drumline-job": job}
        harness.cloud.requested["dl-x"] = ListedRequest("dl-x", ZONE, "ACTIVE", "v4-16", labels)
        await harness.until(lambda: "dl-x" not in harness.cloud.requested, within=400)
        assert harness.status(job) == "RUNNING"

    run_scenario(tmp_path, scenario)


def test_a_slice_that_is_not_an_orphan_is_an_error(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        with pytest.raises(RequestError, match="dl-other is not an orphan slice"):
            await harness.service.orphans.apply("release", ["dl-other"], "lab")

    run_scenario(tmp_path, scenario)


def test_zones_that_could_not_be_polled_are_listed(tmp_path: Path) -> None:
    cloud = first_life(tmp_path)
    lose_database(tmp_path)

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.error = UNAVAILABLE
        listing = await harness.service.orphans.find()
        assert listing["strays"] == []
        assert ZONE in listing["not_seen"], "the zone is known though the database is new"

    second_life(tmp_path, cloud, scenario)


def test_the_ids_are_the_owners_alone_and_survive_a_file_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "owners.json"
    DatabaseIds(path).update("ab12", 7, ["z"])
    assert path.stat().st_mode & 0o777 == 0o600
    again = DatabaseIds(path)
    assert (again.last_jobs, again.zones) == ({"ab12": 7}, {"z"})
    again.update("cd34")
    assert set(json.loads(path.read_text())["last_jobs"]) == {"ab12", "cd34"}
    path.write_text("{")
    broken = DatabaseIds(path)
    broken.update("ef56", 1)
    assert DatabaseIds(path).last_jobs == {"ef56": 1}


def test_a_full_disk_raises_no_error_and_the_database_ids_are_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = DatabaseIds(tmp_path / "owners.json")
    with monkeypatch.context() as full:

        def no_space(_: DatabaseIds) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(DatabaseIds, "_save", no_space)
        owners.update("ab12", 7)
    owners.update("ab12", 7)
    assert DatabaseIds(tmp_path / "owners.json").last_jobs == {"ab12": 7}
