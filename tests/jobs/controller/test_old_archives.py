"""Archives of jobs from older versions are checked for secrets before they are sent again."""

import json
import sqlite3
from pathlib import Path

from tests.hosts.packing_table import openssh_key
from tests.hosts.test_repack import old_archive
from tests.jobs.fakes import ServerHarness, run_scenario


def as_an_older_version_packed_it(harness: ServerHarness, job: str, archive: Path) -> None:
    """Replace the job's archive by an old one, without the version of the rules."""
    sha, home = "ab" * 32, harness.supervisor.config.home
    archive.rename(home / "code" / f"{sha}.tar.gz")
    with sqlite3.connect(home / "jobs.db") as database:
        ((text,),) = database.execute("SELECT spec FROM jobs WHERE number = ?", (int(job),))
        spec = json.loads(text)
        spec["archive"] = {"sha": sha, "files": 2, "bytes": 100, "drumline": "none"}
        database.execute("UPDATE jobs SET spec = ? WHERE number = ?", (json.dumps(spec), int(job)))
    database.close()


async def restarted(harness: ServerHarness, job: str) -> None:
    """Start another server and wait for its connection to the hosts."""
    count = len(harness.starts(job))
    await harness.restart()
    await harness.until(lambda: len(harness.starts(job)) > count)


def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("x = 1")
    return folder


def test_a_job_of_an_older_version_continues_without_the_secrets_in_its_archive(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(workdir=str(workdir(tmp_path)))
        await harness.reaches(job, "RUNNING")
        old = old_archive(tmp_path / "old", {"train.py": "x = 1", "deploy": openssh_key()})
        as_an_older_version_packed_it(harness, job, old)
        await restarted(harness, job)
        program = harness.starts(job)[-1].program
        assert program.archive is not None
        assert program.archive.is_file()
        assert program.archive_sha not in {None, "ab" * 32}
        shown = harness.show(job)
        assert shown["code"]["left_out"] == [{"path": "deploy", "reason": "private key"}]
        assert "left out: deploy (private key)" in str(shown["events"])
        # It happens once: the next server changes nothing.
        await restarted(harness, job)
        assert harness.show(job)["code"] == shown["code"]

    run_scenario(tmp_path / "home", scenario)


def test_an_old_archive_without_secrets_keeps_its_name(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(workdir=str(workdir(tmp_path)))
        await harness.reaches(job, "RUNNING")
        old = old_archive(tmp_path / "old", {"train.py": "x = 1"})
        as_an_older_version_packed_it(harness, job, old)
        await restarted(harness, job)
        assert harness.starts(job)[-1].program.archive_sha == "ab" * 32
        assert harness.show(job)["code"]["rules"] == 1

    run_scenario(tmp_path / "home", scenario)


def test_an_old_archive_that_cannot_be_read_is_not_sent(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(workdir=str(workdir(tmp_path)))
        await harness.reaches(job, "RUNNING")
        old = old_archive(tmp_path / "old", {"train.py": "x = 1"})
        old.write_bytes(b"no archive")
        as_an_older_version_packed_it(harness, job, old)
        await harness.restart()
        count = len(harness.starts(job))
        await harness.until(
            lambda: "packs it again" in str(harness.show(job)["reason"]), within=600
        )
        assert len(harness.starts(job)) == count

    run_scenario(tmp_path / "home", scenario)
