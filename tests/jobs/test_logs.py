"""Reading logs while they appear, host by host."""

from pathlib import Path

import pytest

from drumline.jobs.logs import stream_logs
from drumline.jobs.verbs import Mistake
from tests.jobs.pretend import Office, play


async def read(office: Office, job: str, host: str, follow: bool = False) -> bytes:
    pieces = stream_logs(office.desk, job, host=host, attempt=None, follow=follow)
    return b"".join([piece async for piece in pieces])


def test_a_host_that_has_not_written_yet_is_no_mistake_and_one_that_is_not_there_is(
    tmp_path: Path,
) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        assert await read(office, job, "0") == b""
        await office.reaches(job, "RUNNING")
        log = tmp_path / "logs" / job / "1" / "host-1.log"
        log.parent.mkdir(parents=True)
        log.write_text("up\n")
        assert await read(office, job, "0") == b""
        assert await read(office, job, "1") == b"up\n"
        with pytest.raises(Mistake, match="has no host 2; it has hosts 0 to 1"):
            await read(office, job, "2")

    play(tmp_path, story)


def test_following_a_host_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.given = ("WAITING_FOR_RESOURCES", None)
        job = await office.create()
        await office.reaches(job, "WAITING")
        with pytest.raises(Mistake, match="has no host 7; it has hosts 0 to 1"):
            await read(office, job, "7", follow=True)
        (name,) = office.cloud.requested
        await office.cloud.release("", name)
        office.cloud.given = ("ACTIVE", "READY")
        await office.reaches(job, "RUNNING", within=1200)
        with pytest.raises(Mistake, match="has no host 7; it has hosts 0 to 1"):
            await read(office, job, "7", follow=True)

    play(tmp_path, story)


def test_after_the_end_the_logs_say_which_hosts_there_were(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        folder = tmp_path / "logs" / job / "1"
        folder.mkdir(parents=True)
        for host in (0, 1):
            (folder / f"host-{host}.log").write_text(f"{host}\n")
        office.starts(job)[0].ends(0)
        await office.reaches(job, "SUCCEEDED")
        assert await read(office, job, "all") == b"[host 0] 0\n[host 1] 1\n"
        with pytest.raises(Mistake, match="has no host 2; it has hosts 0 to 1"):
            await read(office, job, "2")

    play(tmp_path, story)
