"""Reading logs of any length while they grow, by host and attempt."""

import asyncio
import json
import time
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from drumline.hosts.log_segments import MIN_LIMIT, LogWriter
from drumline.jobs.core.state import Attempt, Candidate, Job, Placement, PlacementRole, Status
from drumline.jobs.folders import Folders, trim_logs
from drumline.jobs.server.logs import LogQuery, stream_logs
from drumline.jobs.server.service import JobService
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.store.records import Record
from drumline.jobs.store.specs import StoredSpec
from tests.jobs.fakes import ServerHarness, run_scenario


async def read(harness: ServerHarness, job: str, host: str, follow: bool = False) -> bytes:
    pieces = stream_logs(harness.service, job, LogQuery(host=host, follow=follow))
    return b"".join([piece async for piece in pieces])


def test_an_empty_log_is_valid_and_an_unknown_host_is_not(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        assert await read(harness, job, "0") == b""
        await harness.reaches(job, "RUNNING")
        log = tmp_path / "logs" / job / "1" / "host-1.log"
        log.parent.mkdir(parents=True)
        log.write_text("up\n")
        assert await read(harness, job, "0") == b""
        assert await read(harness, job, "1") == b"up\n"
        with pytest.raises(RequestError, match="has no host 2; it has hosts 0 to 1"):
            await read(harness, job, "2")

    run_scenario(tmp_path, scenario)


def test_following_an_unknown_host_is_rejected_at_once(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        job = await harness.create()
        await harness.reaches(job, "WAITING")
        with pytest.raises(RequestError, match="has no host 7; it has hosts 0 to 1"):
            await read(harness, job, "7", follow=True)
        (name,) = harness.cloud.requested
        await harness.cloud.release("", name)
        harness.cloud.given = ("ACTIVE", "READY")
        await harness.reaches(job, "RUNNING", within=1200)
        with pytest.raises(RequestError, match="has no host 7; it has hosts 0 to 1"):
            await read(harness, job, "7", follow=True)

    run_scenario(tmp_path, scenario)


def test_after_the_end_the_logs_define_the_hosts(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        folder = tmp_path / "logs" / job / "1"
        folder.mkdir(parents=True)
        for host in (0, 1):
            (folder / f"host-{host}.log").write_text(f"{host}\n")
        harness.starts(job)[0].ends(0)
        await harness.reaches(job, "SUCCEEDED")
        assert await read(harness, job, "all") == b"[host 0] 0\n[host 1] 1\n"
        with pytest.raises(RequestError, match="has no host 2; it has hosts 0 to 1"):
            await read(harness, job, "2")

    run_scenario(tmp_path, scenario)


# Longer logs, on a desk with one job


@dataclass
class Shelf:
    """The logs of job 000001 on a slice of two hosts, with the desk's record of the job."""

    home: Path
    job: Job = field(
        default_factory=lambda: Job(
            id="000001",
            owner="me",
            choices=(Candidate("v4-16", "local-a"),),
            created_at=0.0,
            status=Status.RUNNING,
            attempts=1,
            attempt=Attempt(1, 0.0),
            placements=(Placement("dl-1", "local-a", "v4-16", 2, 0.0, PlacementRole.ACTIVE, 0.0),),
        )
    )

    @property
    def folders(self) -> Folders:
        return Folders(self.home)

    def record(self, job_id: str) -> Record:
        assert job_id == "000001"
        return Record(self.job, "lab", "digits", StoredSpec())

    def attempt(self, number: int) -> None:
        self.job = replace(self.job, attempts=number, attempt=Attempt(number, 0.0))

    def ends(self) -> None:
        self.job = replace(self.job, status=Status.SUCCEEDED, attempt=None, placements=())

    def path(self, host: int = 0, attempt: int = 1) -> Path:
        return self.folders.logs("000001", attempt) / f"host-{host}.log"

    def write(
        self,
        text: bytes,
        at: float = 1.0,
        host: int = 0,
        attempt: int = 1,
        limit: int | None = None,
    ) -> None:
        log = LogWriter(self.path(host, attempt), limit)
        log.append(text, at)
        log.close()

    def stream(self, **query: Any) -> Any:
        return stream_logs(cast(JobService, self), "000001", LogQuery(**query))

    def read(self, **query: Any) -> bytes:
        async def all_of_it() -> bytes:
            return b"".join([piece async for piece in self.stream(**query)])

        return asyncio.run(all_of_it())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


class Follower:
    """A follower of the logs, in its own task."""

    def __init__(self, shelf: Shelf, **query: Any) -> None:
        self.seen = b""
        self._reading = asyncio.create_task(self._read(shelf.stream(follow=True, **query)))

    async def _read(self, pieces: Any) -> None:
        async for piece in pieces:
            self.seen += piece

    async def sees(self, text: bytes) -> None:
        deadline = time.monotonic() + 10
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            await asyncio.sleep(0.01)

    async def ended(self) -> bytes:
        await asyncio.wait_for(self._reading, 10)
        return self.seen


def test_following_continues_through_a_preemption(shelf: Shelf) -> None:
    async def scenario() -> None:
        shelf.write(b"step 1\n")
        follower = Follower(shelf)
        await follower.sees(b"step 1\n")
        shelf.write(b"last words")
        shelf.attempt(2)
        await follower.sees(b"last words")
        shelf.write(b"step 2\n", attempt=2)
        await follower.sees(b"step 2\n")
        shelf.attempt(3)
        shelf.write(b"step 3\n", attempt=3)
        shelf.ends()
        assert await follower.ended() == (
            b"step 1\nlast words--- attempt 2\nstep 2\n--- attempt 3\nstep 3\n"
        )

    asyncio.run(scenario())


def test_until_the_new_attempt_writes_the_last_one_with_lines_is_shown(shelf: Shelf) -> None:
    async def scenario() -> None:
        shelf.write(b"one\ntwo\n")
        shelf.write(b"", attempt=2)
        shelf.write(b"only host 1\n", host=1, attempt=2)
        shelf.attempt(3)
        expected = b"--- attempt 1 (attempt 3 has no output)\n"
        follower = Follower(shelf, tail=1)
        await follower.sees(expected + b"two\n")
        shelf.write(b"three\n", attempt=3)
        shelf.ends()
        assert await follower.ended() == expected + b"two\n--- attempt 3\nthree\n"

    asyncio.run(scenario())
    assert shelf.read() == b"three\n"
    assert shelf.read(host="1") == b"--- attempt 2 (attempt 3 has no output)\nonly host 1\n"
    assert shelf.read(host="1", json=True).startswith(b'{"attempt": 2, "host": 1')


def test_following_one_attempt_ends_with_it(shelf: Shelf) -> None:
    async def scenario() -> None:
        shelf.write(b"one\n")
        follower = Follower(shelf, attempt="1")
        await follower.sees(b"one\n")
        shelf.attempt(2)
        shelf.write(b"two\n", attempt=2)
        assert await follower.ended() == b"one\n"

    asyncio.run(scenario())


def test_lines_of_all_hosts_are_merged_by_time(shelf: Shelf) -> None:
    for moment in range(100):
        shelf.write(b"%02d %s\n" % (moment, b"." * 60), at=100.0 + moment, host=moment % 3 % 2)
    lines = shelf.read(host="all").splitlines()
    assert [int(line.split()[2]) for line in lines] == list(range(100))
    assert {line[:8] for line in lines} == {b"[host 0]", b"[host 1]"}


def test_followed_hosts_are_merged_line_by_line(shelf: Shelf) -> None:
    async def scenario() -> None:
        shelf.write(b"half of ", at=1.0, host=0)
        shelf.write(b"all of it\n", at=2.0, host=1)
        follower = Follower(shelf, host="all")
        await follower.sees(b"all of it\n")
        shelf.write(b"a line\n", at=3.0, host=0)
        await follower.sees(b"half of a line\n")
        shelf.write(b"unfinished", at=4.0, host=1)
        shelf.ends()
        assert await follower.ended() == (
            b"[host 1] all of it\n[host 0] half of a line\n[host 1] unfinished\n"
        )

    asyncio.run(scenario())


def test_each_line_starts_with_its_time(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shelf.write(b"a" * 70 + b"\n", at=1_700_000_000.0)
    shelf.write(b"b\n", at=1_700_000_001.5)
    first, second = shelf.read(times=True).splitlines()
    assert first == b"2023-11-14T22:13:20.000+00:00 " + b"a" * 70
    assert second == b"2023-11-14T22:13:21.500+00:00 b"
    shelf.write(b"c\n", at=1_700_000_000.7, host=1)
    hosts = [line.split()[1:3] for line in shelf.read(host="all", times=True).splitlines()]
    assert hosts == [[b"[host", b"0]"], [b"[host", b"1]"], [b"[host", b"0]"]]


def test_lines_as_objects(shelf: Shelf) -> None:
    shelf.write(b"caf\xc3\xa9 \x1b[0m\nno end", at=5.0)
    output = [json.loads(line) for line in shelf.read(json=True).splitlines()]
    known = {"attempt": 1, "host": 0, "time": 5.0}
    assert output == [known | {"text": "café \x1b[0m"}, known | {"text": "no end"}]


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_the_last_lines(shelf: Shelf, lines: int, end: bytes) -> None:
    shelf.write(b"one\ntwo\nthree" + end)
    kept = [b"one\n", b"two\n", b"three" + end][max(3 - lines, 0) :]
    assert shelf.read(tail=lines) == b"".join(kept)


def test_the_last_lines_of_a_log_longer_than_a_block(shelf: Shelf) -> None:
    text = b"".join(b"%d %s\n" % (n, b"x" * (n % 300)) for n in range(5000))
    shelf.write(text)
    assert shelf.read(tail=1234) == b"".join(text.splitlines(keepends=True)[-1234:])


def test_the_last_lines_are_the_last_over_all_hosts_and_attempts(shelf: Shelf) -> None:
    for moment in range(10):
        shelf.write(b"%d %s\n" % (moment, b"." * 60), at=float(moment + 1), host=moment % 2)
    output = shelf.read(host="all", tail=3)
    assert [line.split()[2] for line in output.splitlines()] == [b"7", b"8", b"9"]
    shelf.attempt(2)
    shelf.write(b"new\n", attempt=2)
    output = shelf.read(attempt="all", tail=3)
    assert output.startswith(b"--- attempt 1\n6 ")
    assert output.endswith(b"--- attempt 2\nnew\n")
    assert len(output.splitlines()) == 5


def test_since_starts_in_any_attempt(shelf: Shelf) -> None:
    shelf.write(b"early " + b"." * 70 + b"\n", at=100.0)
    shelf.write(b"begun ", at=200.0)
    shelf.write(b"before" + b"." * 70 + b"\n", at=300.0)
    shelf.write(b"late\n", at=400.0)
    shelf.attempt(2)
    shelf.write(b"next\n", at=500.0, attempt=2)
    assert shelf.read(since=250.0) == b"--- attempt 1\nlate\n--- attempt 2\nnext\n"
    assert shelf.read(since=450.0) == b"--- attempt 2\nnext\n"
    assert shelf.read(since=999.0) == b""


def test_missing_bytes_are_reported_in_place(shelf: Shelf) -> None:
    line = b"x" * 99 + b"\n"
    shelf.write(line * 5000, limit=MIN_LIMIT)
    for query in ({}, {"times": True}):
        output = shelf.read(**query)
        assert len(output) < 2 * MIN_LIMIT
        assert output.count(b"bytes are not kept: the log exceeds its limit of size or rate\n") == 1
        assert output.endswith(line)


def memory_and_turns(shelf: Shelf, **query: Any) -> tuple[int, int]:
    """Return the peak memory of the read, and the turns of the event loop meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def scenario() -> int:
        busy = asyncio.create_task(others())
        tracemalloc.start()
        read = 0
        async for piece in shelf.stream(**query):
            read += len(piece)
        assert read >= 8_000_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        busy.cancel()
        return peak

    return asyncio.run(scenario()), turns


@pytest.mark.parametrize("host", ["0", "all"])
def test_a_long_log_is_read_in_bounded_chunks(shelf: Shelf, host: str) -> None:
    line = b"loss 0.123 " * 100 + b"\n"
    for number in (0, 1):
        shelf.write(line * 8_000, host=number)
    memory, turns = memory_and_turns(shelf, host=host)
    assert memory < 4_000_000
    assert turns > 10


def test_an_endless_line_takes_bounded_memory(shelf: Shelf) -> None:
    for host in (0, 1):
        shelf.write(b"." * 8_000_000, host=host)
    memory, _ = memory_and_turns(shelf, host="all")
    assert memory < 4_000_000


def test_beyond_the_limit_the_first_and_the_newest_attempts_are_kept(shelf: Shelf) -> None:
    for number in range(1, 8):
        shelf.write(b"x" * 1000, attempt=number)
    folder = shelf.folders.logs("000001")
    trim_logs(folder, 8, max_bytes=4200)
    kept = [number for number in range(1, 8) if shelf.path(attempt=number).exists()]
    assert kept == [1, 5, 6, 7]
    shelf.attempt(8)
    with pytest.raises(RequestError, match="attempt 3 of 000001 were deleted"):
        shelf.read(attempt="3")
    trim_logs(folder, 8, max_bytes=0)
    kept = [number for number in range(1, 8) if shelf.path(attempt=number).exists()]
    assert kept == [1, 7]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"host": "first"}, "host: 'first' is neither a number nor all"),
        ({"attempt": "0"}, "attempt: '0' is neither a number from 1 nor all"),
        ({"attempt": "-1"}, "attempt: '-1' is neither"),
        ({"tail": "x"}, "tail: 'x' is not a number of lines"),
        ({"since": "noon"}, "since: 'noon' is not a time"),
    ],
)
def test_an_invalid_query_is_rejected(query: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LogQuery.parse(query)
