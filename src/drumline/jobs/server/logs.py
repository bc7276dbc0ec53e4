"""Reading the logs that the server keeps of every host and attempt.

A log may be longer than memory, and everybody shares the server's event loop: so logs are read in
pieces, by threads, and a piece is read when the one before it has been sent. With `follow`, reading
goes on through preemptions and failures until the job has ended.
"""

import asyncio
import contextlib
import heapq
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.hosts.kept_log import Moments, parts_of, place_since, read
from drumline.jobs.core.state import Job

if TYPE_CHECKING:
    from drumline.jobs.server.service import Desk

CHUNK = 1 << 18
"""Bytes that are read at once, of one host."""
BATCH = 1 << 18
"""Bytes that are sent at once."""
LONGEST_LINE = 1 << 16
"""A longer line is shown as several, where lines are put in order or given a prefix."""
POLL = 0.2
TRIMMED = "trimmed"
"""Stands in the folder of an attempt whose logs were removed to keep a job within its limit."""

Timed = tuple[float, bytes]
_MOMENT = itemgetter(0)


@dataclass(frozen=True)
class Wanted:
    """Which part of a job's logs."""

    host: str = "0"
    """A number, or all."""
    attempt: str = ""
    """A number, all, or nothing for the last."""
    follow: bool = False
    tail: int | None = None
    """The last so many lines."""
    since: float | None = None
    """What was written from this moment on, in any attempt."""
    times: bool = False
    """Whether each line begins with when it was written."""
    json: bool = False
    """Whether each line is an object of attempt, host, time and text."""


def wanted_of(query: Mapping[str, str]) -> Wanted:
    """What a caller asked for; Mistake where it makes no sense."""
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


def stream_logs(desk: "Desk", job_id: str, wanted: Wanted) -> AsyncIterator[bytes]:
    """The log of one host, or of all with the host's number before each line, merged by time.

    Raises Mistake at once for an attempt or a host there is not.
    """
    from drumline.jobs.server.verbs import Mistake

    job = desk.record(job_id).job
    folder = desk.folders.logs(job.id)
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
    return _stream(desk, job.id, wanted, range(first, last + 1))


async def _stream(
    desk: "Desk", job_id: str, wanted: Wanted, attempts: range
) -> AsyncIterator[bytes]:
    folder = desk.folders.logs(job_id)
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
        latest, over = _standing(desk, job_id)
        # What was written before it was over is read after we knew that it was.
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


def _standing(desk: "Desk", job_id: str) -> tuple[int, bool]:
    """The number of the newest attempt, and whether the job has ended or is gone."""
    from drumline.jobs.server.verbs import Mistake

    try:
        job = desk.record(job_id).job
    except Mistake:
        return 0, True
    return job.attempts, job.status.ended


def _opened(folder: Path, wanted: Wanted, attempts: range) -> "list[_Reading]":
    """The attempts to read, each from the place where reading begins; in threads only."""
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
    """The logs of one attempt, read onward."""

    def __init__(self, folder: Path, attempt: int, wanted: Wanted) -> None:
        self.attempt = attempt
        self.heading = b""
        """Goes before the first bytes, where one attempt follows another."""
        self._folder = folder
        self._wanted = wanted
        self._tails: dict[Path, _Tail] = {}
        self._skip = 0
        self._all()

    def _all(self) -> "list[_Tail]":
        """Every log there is by now."""
        for path in _files(self._folder, self._wanted.host):
            if path not in self._tails:
                since = self._wanted.since
                self._tails[path] = _Tail(path, 0 if since is None else _line_since(path, since))
        return list(self._tails.values())

    def begin_at_tail(self, lines: int) -> int:
        """Begin with the last so many lines; how many more an earlier attempt has to give."""
        found = [tail.begin_at_tail(lines) for tail in self._all()]
        self._skip = max(sum(found) - lines, 0)
        return max(lines - sum(found), 0)

    def pieces(self, ended: bool) -> Iterator[bytes]:
        """All there is now; with `ended`, also the last line where it is not whole."""
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
        """What was written since; with `ended`, also the last line where it is not whole."""
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
        one = self._wanted.host != "all" or not self._several
        return one and not self._wanted.times and not self._wanted.json

    @property
    def _several(self) -> bool:
        return len(self._tails) > 1 or len(_files(self._folder, "all")) > 1

    def _marked(self, tail: "_Tail") -> Iterator[Timed]:
        while lines := tail.lines():
            yield from self._mark(tail, lines)

    def _mark(self, tail: "_Tail", lines: list[Timed]) -> list[Timed]:
        """Put the time and the host before each line, as far as they are wanted."""
        if self._wanted.json:
            return [(at, _object(self.attempt, tail.number, at, line)) for at, line in lines]
        several = self._wanted.host == "all" and self._several
        host = b"[host %d] " % tail.number if several else b""
        if not self._wanted.times:
            return [(at, host + line) for at, line in lines]
        return [(at, _clock(at) + b" " + host + line) for at, line in lines]


class _Tail:
    """One host's log, read as far as it has come."""

    def __init__(self, path: Path, place: int) -> None:
        self.number = int(path.stem.rpartition("-")[2])
        self._path = path
        self._place = place
        """Where reading goes on."""
        self._rest = b""
        self._rest_at = 0.0
        self._moments: Moments | None = None
        self._latest = 0.0
        self._whole = True
        """Whether what was read last ended a line."""

    def begin_at_tail(self, lines: int) -> int:
        """Move on to the last so many lines; how many there are."""
        self._place, found = _last_lines(self._path, lines, self._place)
        return found

    def raw(self) -> bytes:
        """Some bytes as they were written, none at the end."""
        stretch = read(self._path, self._place, CHUNK)
        if not stretch.data:
            return b""
        gap = self._gap(stretch.start)
        self._place = stretch.start + len(stretch.data)
        self._whole = stretch.data.endswith(b"\n")
        return gap + stretch.data

    def _gap(self, start: int) -> bytes:
        """What is said in the place of bytes that were not kept."""
        left_out = start - self._place
        if left_out <= 0:
            return b""
        told = b"--- %d bytes are not kept: the log has reached its limit\n"
        return (b"" if self._whole else b"\n") + told % left_out

    def lines(self) -> list[Timed]:
        """Whole lines, each with when it was begun; none at the end."""
        found: list[Timed] = []
        while not found:
            stretch = read(self._path, self._place, CHUNK)
            if stretch.part is None or not stretch.data:
                break
            if self._moments is None or self._moments.part.start != stretch.part.start:
                self._moments = Moments(stretch.part)
            self._whole = not self._rest
            if gap := self._gap(stretch.start):
                found += [*self.rest(), (self._at(stretch.start), gap.lstrip(b"\n"))]
            found += self._split(stretch.data, stretch.start)
            self._place = stretch.start + len(stretch.data)
        return found

    def _split(self, data: bytes, place: int) -> list[Timed]:
        """The lines that begin or end in these bytes; one that does not end is held back."""
        found: list[Timed] = []
        at, until = self._at(place), self._moments.next_place if self._moments else 0
        *whole, last = data.split(b"\n")
        for line in whole:
            # Most lines were written in the same moment as the one before.
            if place >= until:
                at, until = self._at(place), self._moments.next_place if self._moments else 0
            place += len(line) + 1
            if self._rest:
                found.append((self._rest_at, self._rest + line + b"\n"))
                self._rest = b""
            else:
                found.append((at, line + b"\n"))
        if last:
            if not self._rest:
                self._rest_at = self._at(place)
            self._rest += last
        if len(self._rest) > LONGEST_LINE:
            found += self.rest()
        return found

    def rest(self) -> list[Timed]:
        """The last line, where nothing ended it."""
        rest, self._rest = self._rest, b""
        return [(self._rest_at, rest + b"\n")] if rest else []

    def _at(self, place: int) -> float:
        """When a byte was written; never before one that stands before it."""
        found = self._moments.at(place) if self._moments else None
        self._latest = max(self._latest, found or 0.0)
        return self._latest


@lru_cache(maxsize=1024)
def _clock(moment: float) -> bytes:
    """`2026-03-01T14:02:11.250+01:00`, or a dash for what was written before times were kept."""
    if not moment:
        return b"-"
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="milliseconds").encode()


def _object(attempt: int, host: int, at: float, line: bytes) -> bytes:
    text = line.decode("utf-8", "replace").removesuffix("\n")
    told = {"attempt": attempt, "host": host, "time": at or None, "text": text}
    return json.dumps(told).encode() + b"\n"


def _line_since(path: Path, moment: float) -> int:
    """Where the first line begins that was begun at or after a moment."""
    place = place_since(path, moment)
    if place == 0 or read(path, place - 1, 1).data == b"\n":
        return place
    while (stretch := read(path, place, CHUNK)).data:
        end = stretch.data.find(b"\n")
        if end >= 0:
            return stretch.start + end + 1
        place = stretch.start + len(stretch.data)
    return place


def _last_lines(path: Path, lines: int, first: int) -> tuple[int, int]:
    """Where the last so many lines begin, not before `first`, and how many they are."""
    place, found = first, 0
    end = True
    for part in reversed(parts_of(path)):
        stop = max(part.start, first)
        upper = part.end
        with contextlib.suppress(FileNotFoundError), part.path.open("rb") as file:
            while upper > stop:
                lower = max(upper - CHUNK, stop)
                file.seek(lower - part.start)
                block = file.read(upper - lower)
                at = len(block)
                if end:
                    # What nothing has ended yet is a line too.
                    end = False
                    found += not block.endswith(b"\n")
                    if lines == 0:
                        return upper, 0
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    found += 1
                    if found > lines:
                        return lower + at + 1, lines
                upper = lower
    return place, found


def trim(folder: Path, newest: int, most: int) -> None:
    """Remove logs of attempts between the first and the newest until a job's take up no more.

    Why a job failed shows at both ends: how it began, and how it went at last.
    """
    kept = {}
    for number in range(1, newest):
        files = [file for file in (folder / str(number)).glob("host-*") if file.is_file()]
        kept[number] = sum(file.stat().st_size for file in files)
    for number in range(2, newest - 1):
        if sum(kept.values()) <= most:
            return
        if kept[number]:
            shutil.rmtree(folder / str(number), ignore_errors=True)
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / str(number) / TRIMMED).touch()
            kept[number] = 0


def _hosts(job: Job, attempt: int, folder: Path) -> int:
    """How many hosts may have a log of this attempt, or of a later one that goes on from it.

    While the slice is there it says so itself, since a host may not have written yet.
    """
    under_way = attempt == job.attempts and job.attempt is not None
    if under_way and job.slice is not None:
        return job.slice.hosts
    written = len(_files(folder, "all"))
    most = max(choice.hosts for choice in job.choices)
    gone = attempt < job.attempts or job.status.ended
    return (written or most) if gone else most


def _files(folder: Path, host: str) -> list[Path]:
    if host != "all":
        path = folder / f"host-{int(host)}.log"
        return [path] if path.exists() else []
    return sorted(folder.glob("host-*.log"), key=lambda p: int(p.stem.rpartition("-")[2]))
