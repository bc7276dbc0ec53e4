"""Reading the logs that the server keeps of every host and attempt.

A log may be larger than memory, and all callers share the server's event loop: so logs are read in
pieces, by threads, and a piece is read when the last one has been sent. With `follow`, reading
goes on through preemptions and failures until the job has ended.
"""

import asyncio
import heapq
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.jobs.core.state import Job
from drumline.jobs.folders import TRIMMED
from drumline.jobs.server.log_tail import LogTail, Timed, line_since

if TYPE_CHECKING:
    from drumline.jobs.server.service import JobService

BATCH = 1 << 18
"""The least bytes of a batch of merged lines."""
POLL = 0.2

_MOMENT = itemgetter(0)


@dataclass(frozen=True)
class Wanted:
    """The part of a job's logs that a caller wants."""

    host: str = "0"
    """The number of a host, or `all`."""
    attempt: str = ""
    """The number of an attempt, `all`, or empty for the last."""
    follow: bool = False
    tail: int | None = None
    """How many of the last lines; None is all."""
    since: float | None = None
    """The time from which on lines are wanted, in any attempt."""
    times: bool = False
    """Whether each line begins with the time it was written."""
    json: bool = False
    """Whether each line is an object of attempt, host, time and text."""


def wanted_of(query: Mapping[str, str]) -> Wanted:
    """What a caller asked for. Raises Mistake where it makes no sense."""
    from drumline.jobs.server.verbs import Mistake

    host, attempt = query.get("host", "0"), query.get("attempt", "")
    tail, since = query.get("tail"), query.get("since")
    if host != "all" and not _is_number(host):
        raise Mistake(f"host: {host!r} is neither a number nor all")
    if attempt not in {"", "all"} and not (_is_number(attempt) and int(attempt) > 0):
        raise Mistake(f"attempt: {attempt!r} is neither a number from 1 on nor all")
    if tail is not None and not _is_number(tail):
        raise Mistake(f"tail: {tail!r} is no number of lines")
    try:
        moment = None if since is None else float(since)
    except ValueError:
        raise Mistake(f"since: {since!r} is no time") from None
    return Wanted(
        host=host if host == "all" else str(int(host)),
        attempt=attempt,
        follow=query.get("follow") == "1",
        tail=None if tail is None else int(tail),
        since=moment,
        times=query.get("times") == "1",
        json=query.get("json") == "1",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def stream_logs(service: "JobService", job_id: str, wanted: Wanted) -> AsyncIterator[bytes]:
    """The log of one host, or of all with the host's number before each line, merged by time.

    Raises Mistake at once for an attempt or a host that does not exist.
    """
    from drumline.jobs.server.verbs import Mistake

    job = service.record(job_id).job
    folder = service.folders.logs(job.id)
    latest = max(job.attempts, 1)
    first, last = latest, latest
    if wanted.attempt.isdecimal():
        first = last = int(wanted.attempt)
        if first > job.attempts:
            raise Mistake(f"{job.id} has {job.attempts} attempts, not {first}", 404)
        if (folder / wanted.attempt / TRIMMED).exists():
            raise Mistake(
                f"the logs of attempt {first} of {job.id} were removed to keep the job within"
                " log_megabytes; those of the first and the newest attempts are kept",
                404,
            )
    elif wanted.attempt == "all" or wanted.since is not None:
        first = 1
    hosts = _hosts(job, last, folder / str(last))
    if wanted.host != "all" and int(wanted.host) >= hosts:
        has = "one host, 0" if hosts == 1 else f"hosts 0 to {hosts - 1}"
        raise Mistake(f"host: {job.id} has no host {int(wanted.host)}; it has {has}", 404)
    return _stream(service, job.id, wanted, range(first, last + 1))


async def _stream(
    service: "JobService", job_id: str, wanted: Wanted, attempts: range
) -> AsyncIterator[bytes]:
    folder = service.folders.logs(job_id)
    readings = await asyncio.to_thread(_opened, folder, wanted, attempts)
    for reading in readings:
        if len(readings) > 1 and not wanted.json:
            reading.heading = _heading(reading.attempt)
        pieces = reading.pieces(ended=reading is not readings[-1] or not wanted.follow)
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece
    if not wanted.follow:
        return
    reading = readings[-1]
    goes_on = not wanted.attempt.isdecimal()
    while True:
        latest, over = _standing(service, job_id)
        # Read once more after the attempt was over, for what was written until then.
        done = over or latest > reading.attempt
        while piece := await asyncio.to_thread(reading.news, done):
            yield piece
        if done and goes_on and latest > reading.attempt:
            number = reading.attempt + 1
            [reading] = await asyncio.to_thread(
                _opened, folder, replace(wanted, tail=None, since=None), range(number, number + 1)
            )
            reading.heading = b"" if wanted.json else _heading(number)
        elif done:
            return
        else:
            await asyncio.sleep(POLL)


def _heading(attempt: int) -> bytes:
    return b"--- attempt %d\n" % attempt


def _standing(service: "JobService", job_id: str) -> tuple[int, bool]:
    """The number of the newest attempt, and whether the job has ended or is gone."""
    from drumline.jobs.server.verbs import Mistake

    try:
        job = service.record(job_id).job
    except Mistake:
        return 0, True
    return job.attempts, job.status.ended


def _opened(folder: Path, wanted: Wanted, attempts: range) -> "list[_Reading]":
    """The attempts to read, each from the offset where reading begins. Blocks: for threads."""
    readings: list[_Reading] = []
    lines = wanted.tail
    for number in reversed(attempts):
        reading = _Reading(folder / str(number), number, wanted)
        if lines is not None:
            lines = reading.begin_at_tail(lines)
        readings.insert(0, reading)
        if lines == 0:
            break
    return readings


class _Reading:
    """The logs of one attempt as they are read."""

    def __init__(self, folder: Path, attempt: int, wanted: Wanted) -> None:
        self.attempt = attempt
        self.heading = b""
        """What goes before the first bytes, where one attempt follows another."""
        self._folder = folder
        self._wanted = wanted
        self._tails: dict[Path, LogTail] = {}
        self._skip = 0
        self._all()

    def _all(self) -> "list[LogTail]":
        """Every log that exists by now."""
        for path in _files(self._folder, self._wanted.host):
            if path not in self._tails:
                since = self._wanted.since
                self._tails[path] = LogTail(path, 0 if since is None else line_since(path, since))
        return list(self._tails.values())

    def begin_at_tail(self, lines: int) -> int:
        """Begin with the last `lines` lines; returns how many an earlier attempt must add."""
        found = [tail.begin_at_tail(lines) for tail in self._all()]
        self._skip = max(sum(found) - lines, 0)
        return max(lines - sum(found), 0)

    def pieces(self, ended: bool) -> Iterator[bytes]:
        """All there is now; with `ended`, also an unfinished last line."""
        for text in self._pieces(ended):
            yield self._headed(text)

    def _headed(self, text: bytes) -> bytes:
        heading, self.heading = (self.heading, b"") if text else (b"", self.heading)
        return heading + text

    def _pieces(self, ended: bool) -> Iterator[bytes]:
        tails = self._all()
        if self._plain and len(tails) == 1:
            while data := tails[0].raw():
                yield data
            return
        if len(tails) == 1 and not self._skip:
            while lines := tails[0].lines():
                yield b"".join(line for _, line in self._mark(tails[0], lines))
            if ended and (lines := tails[0].rest()):
                yield b"".join(line for _, line in self._mark(tails[0], lines))
            return
        batch: list[bytes] = []
        size = 0
        for _, line in heapq.merge(*(self._marked(tail) for tail in tails), key=_MOMENT):
            if self._skip:
                self._skip -= 1
                continue
            batch.append(line)
            size += len(line)
            if size >= BATCH:
                yield b"".join(batch)
                batch, size = [], 0
        if ended:
            batch += (line for tail in tails for _, line in self._mark(tail, tail.rest()))
        if batch:
            yield b"".join(batch)

    def news(self, ended: bool) -> bytes:
        """What was written since the last call; with `ended`, also an unfinished last line."""
        tails = self._all()
        if self._plain:
            text = b"".join(tail.raw() for tail in tails)
        else:
            lines = [line for tail in tails for line in self._mark(tail, tail.lines())]
            if ended and not lines:
                lines = [line for tail in tails for line in self._mark(tail, tail.rest())]
            text = b"".join(line for _, line in sorted(lines, key=_MOMENT))
        return self._headed(text)

    @property
    def _plain(self) -> bool:
        """Whether the bytes are passed on as they are."""
        single = self._wanted.host != "all" or not self._several
        return single and not self._wanted.times and not self._wanted.json

    @property
    def _several(self) -> bool:
        return len(self._tails) > 1 or len(_files(self._folder, "all")) > 1

    def _marked(self, tail: "LogTail") -> Iterator[Timed]:
        while lines := tail.lines():
            yield from self._mark(tail, lines)

    def _mark(self, tail: "LogTail", lines: list[Timed]) -> list[Timed]:
        """The lines with time and host before each, as far as they are wanted."""
        if self._wanted.json:
            return [(at, _object(self.attempt, tail.number, at, line)) for at, line in lines]
        several = self._wanted.host == "all" and self._several
        host = b"[host %d] " % tail.number if several else b""
        if not self._wanted.times:
            return [(at, host + line) for at, line in lines]
        return [(at, _clock(at) + b" " + host + line) for at, line in lines]


@lru_cache(maxsize=1024)
def _clock(moment: float) -> bytes:
    """`2026-03-01T14:02:11.250+01:00`, or a dash for what was written before times were kept."""
    if not moment:
        return b"-"
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="milliseconds").encode()


def _object(attempt: int, host: int, at: float, line: bytes) -> bytes:
    text = line.decode("utf-8", "replace").removesuffix("\n")
    entry = {"attempt": attempt, "host": host, "time": at or None, "text": text}
    return json.dumps(entry).encode() + b"\n"


def _hosts(job: Job, attempt: int, folder: Path) -> int:
    """How many hosts may have a log of this attempt, or of a later one that goes on from it.

    While the job holds its slice, the slice says so, since a host may not have written yet.
    """
    under_way = attempt == job.attempts and job.attempt is not None
    if under_way and job.placement is not None:
        return job.placement.hosts
    written = len(_files(folder, "all"))
    most = max(choice.hosts for choice in job.choices)
    gone = attempt < job.attempts or job.status.ended
    return (written or most) if gone else most


def _files(folder: Path, host: str) -> list[Path]:
    if host != "all":
        path = folder / f"host-{int(host)}.log"
        return [path] if path.exists() else []
    return sorted(folder.glob("host-*.log"), key=lambda p: int(p.stem.rpartition("-")[2]))
