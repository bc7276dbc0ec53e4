"""Read the logs that the server keeps of every host and attempt.

A log may be larger than memory, and all callers share the server's event loop. So threads read logs
in chunks, and each chunk is read after the previous one was sent. With `follow`, reading continues
through preemptions and failures until the job has finished.
"""

import asyncio
import contextlib
import heapq
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.hosts.log_segments import (
    TimestampReader,
    offset_at_time,
    read_chunk,
    received_size,
    segments,
)
from drumline.jobs.core.state import Job
from drumline.jobs.folders import TRIMMED
from drumline.jobs.server.verbs import RequestError

if TYPE_CHECKING:
    from drumline.jobs.server.service import JobService

MIN_BATCH_BYTES = 1 << 18
"""The minimum size of a batch of merged lines."""
CHUNK_BYTES = 1 << 18
"""The maximum size of one read."""
MAX_LINE_BYTES = 1 << 16
"""The maximum size of a line that is sorted or prefixed. Longer lines are split."""
POLL_SECONDS = 0.2

TimedLine = tuple[float, bytes]
"""A line with the timestamp of its first byte."""
_TIME = itemgetter(0)


@dataclass(frozen=True)
class LogQuery:
    """The part of a job's logs that a caller requests."""

    host: str = "0"
    """A host index, or `all`."""
    attempt: str = ""
    """An attempt number, `all`, or empty for the last attempt with output."""
    follow: bool = False
    tail: int | None = None
    """The number of last lines, or None for all lines."""
    since: float | None = None
    """The timestamp of the oldest line, in any attempt."""
    times: bool = False
    """True to start each line with its time."""
    json: bool = False
    """True to write each line as an object of attempt, host, time and text."""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "LogQuery":
        """Read the query of an HTTP request. Raise RequestError if it is invalid."""
        host, attempt = query.get("host", "0"), query.get("attempt", "")
        tail, since = query.get("tail"), query.get("since")
        if host != "all" and not _is_number(host):
            raise RequestError(f"host: {host!r} is neither a number nor all")
        if attempt not in {"", "all"} and not (_is_number(attempt) and int(attempt) > 0):
            raise RequestError(f"attempt: {attempt!r} is neither a number from 1 nor all")
        if tail is not None and not _is_number(tail):
            raise RequestError(f"tail: {tail!r} is not a number of lines")
        try:
            start = None if since is None else float(since)
        except ValueError:
            raise RequestError(f"since: {since!r} is not a time") from None
        return cls(
            host=host if host == "all" else str(int(host)),
            attempt=attempt,
            follow=query.get("follow") == "1",
            tail=None if tail is None else int(tail),
            since=start,
            times=query.get("times") == "1",
            json=query.get("json") == "1",
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def stream_logs(service: "JobService", job_id: str, query: LogQuery) -> AsyncIterator[bytes]:
    """Stream the log of one host, or of all hosts merged by time with a prefix for each host.

    Raise RequestError at once for an attempt or a host that does not exist.
    """
    job = service.record(job_id).job
    folder = service.folders.logs(job.id)
    latest = max(job.attempts, 1)
    first, last = latest, latest
    if query.attempt.isdecimal():
        first = last = int(query.attempt)
        if first > job.attempts:
            raise RequestError(f"{job.id} has {job.attempts} attempts, not {first}", 404)
        if (folder / query.attempt / TRIMMED).exists():
            raise RequestError(
                f"the logs of attempt {first} of {job.id} were deleted because the job reached"
                " log_megabytes; those of the first and the newest attempts are kept",
                404,
            )
    elif query.attempt == "all" or query.since is not None:
        first = 1
    note = ""
    if not query.attempt and query.since is None:
        # After a preemption, the new attempt has no output for a while.
        first = _last_with_output(folder, query.host, latest)
        if first < latest:
            note = f" (attempt {latest} has no output)"
    hosts = max(_host_count(job, attempt, folder / str(attempt)) for attempt in {first, last})
    if query.host != "all" and int(query.host) >= hosts:
        existing = "only host 0" if hosts == 1 else f"hosts 0 to {hosts - 1}"
        raise RequestError(f"host: {job.id} has no host {int(query.host)}; it has {existing}", 404)
    return _stream(service, job.id, query, range(first, last + 1), note)


async def _stream(
    service: "JobService", job_id: str, query: LogQuery, attempts: range, note: str
) -> AsyncIterator[bytes]:
    """Stream the logs of the attempts. `note` follows the number of the first attempt."""
    folder = service.folders.logs(job_id)
    readers = await asyncio.to_thread(_open, folder, query, attempts)
    for reader in readers:
        if len(readers) > 1 and not query.json:
            reader.heading = _heading(reader.attempt, note if reader.attempt == attempts[0] else "")
        chunks = reader.chunks(ended=reader is not readers[-1] or not query.follow)
        while chunk := await asyncio.to_thread(next, chunks, b""):
            yield chunk
    if not query.follow:
        return
    reader = readers[-1]
    follow_attempts = not query.attempt.isdecimal()
    while True:
        latest, job_ended = _progress(service, job_id)
        # Read once more after the end of the attempt, for its last lines.
        attempt_ended = job_ended or latest > reader.attempt
        while chunk := await asyncio.to_thread(reader.new_bytes, attempt_ended):
            yield chunk
        if attempt_ended and follow_attempts and latest > reader.attempt:
            attempt = reader.attempt + 1
            rest = replace(query, tail=None, since=None)
            [reader] = await asyncio.to_thread(_open, folder, rest, range(attempt, attempt + 1))
            reader.heading = b"" if query.json else _heading(attempt)
        elif attempt_ended:
            return
        else:
            await asyncio.sleep(POLL_SECONDS)


def _heading(attempt: int, note: str = "") -> bytes:
    return f"--- attempt {attempt}{note}\n".encode()


def _last_with_output(folder: Path, host: str, latest: int) -> int:
    """Return the last attempt of which a host has written something, or the latest if none has."""
    for attempt in range(latest, 0, -1):
        if any(map(received_size, _log_files(folder / str(attempt), host))):
            return attempt
    return latest


def _progress(service: "JobService", job_id: str) -> tuple[int, bool]:
    """Return the number of the newest attempt, and True if the job has finished or was deleted."""
    try:
        job = service.record(job_id).job
    except RequestError:
        return 0, True
    return job.attempts, job.status.ended


def _open(folder: Path, query: LogQuery, attempts: range) -> "list[_AttemptReader]":
    """Open the logs of the attempts at the first byte to read. Blocks, so call it in a thread."""
    readers: list[_AttemptReader] = []
    lines = query.tail
    for attempt in reversed(attempts):
        reader = _AttemptReader(folder / str(attempt), attempt, query)
        if lines is not None:
            lines = reader.seek_tail(lines)
        readers.insert(0, reader)
        if lines == 0:
            break
    return readers


class _AttemptReader:
    """Reads the logs of one attempt."""

    def __init__(self, folder: Path, attempt: int, query: LogQuery) -> None:
        self.attempt = attempt
        self.heading = b""
        """The line before the first bytes, if there are multiple attempts."""
        self._folder = folder
        self._query = query
        self._readers: dict[Path, _HostReader] = {}
        self._skip = 0
        self._host_readers()

    def _host_readers(self) -> "list[_HostReader]":
        """Return a reader for every log that exists now."""
        for path in _log_files(self._folder, self._query.host):
            if path not in self._readers:
                since = self._query.since
                start = 0 if since is None else _line_since(path, since)
                self._readers[path] = _HostReader(path, start)
        return list(self._readers.values())

    def seek_tail(self, lines: int) -> int:
        """Skip to the last lines. Return the number of lines that previous attempts must add."""
        count = sum(reader.seek_tail(lines) for reader in self._host_readers())
        self._skip = max(count - lines, 0)
        return max(lines - count, 0)

    def chunks(self, ended: bool) -> Iterator[bytes]:
        """Yield everything written so far. With `ended`, include an unfinished last line."""
        for text in self._chunks(ended):
            yield self._with_heading(text)

    def _with_heading(self, text: bytes) -> bytes:
        heading, self.heading = (self.heading, b"") if text else (b"", self.heading)
        return heading + text

    def _chunks(self, ended: bool) -> Iterator[bytes]:
        readers = self._host_readers()
        if self._is_raw and len(readers) == 1:
            while chunk := readers[0].raw():
                yield chunk
            return
        if len(readers) == 1 and not self._skip:
            while lines := readers[0].lines():
                yield b"".join(line for _, line in self._format(readers[0], lines))
            if ended and (lines := readers[0].unfinished()):
                yield b"".join(line for _, line in self._format(readers[0], lines))
            return
        batch: list[bytes] = []
        size = 0
        for _, line in heapq.merge(*(self._formatted_lines(r) for r in readers), key=_TIME):
            if self._skip:
                self._skip -= 1
                continue
            batch.append(line)
            size += len(line)
            if size >= MIN_BATCH_BYTES:
                yield b"".join(batch)
                batch, size = [], 0
        if ended:
            batch += (line for r in readers for _, line in self._format(r, r.unfinished()))
        if batch:
            yield b"".join(batch)

    def new_bytes(self, ended: bool) -> bytes:
        """Return the bytes since the last call. With `ended`, include an unfinished last line."""
        readers = self._host_readers()
        if self._is_raw:
            text = b"".join(reader.raw() for reader in readers)
        else:
            lines = [line for r in readers for line in self._format(r, r.lines())]
            if ended and not lines:
                lines = [line for r in readers for line in self._format(r, r.unfinished())]
            text = b"".join(line for _, line in sorted(lines, key=_TIME))
        return self._with_heading(text)

    @property
    def _is_raw(self) -> bool:
        """True if the bytes are passed on without changes."""
        single = self._query.host != "all" or not self._has_several_hosts
        return single and not self._query.times and not self._query.json

    @property
    def _has_several_hosts(self) -> bool:
        return len(self._readers) > 1 or len(_log_files(self._folder, "all")) > 1

    def _formatted_lines(self, reader: "_HostReader") -> Iterator[TimedLine]:
        while lines := reader.lines():
            yield from self._format(reader, lines)

    def _format(self, reader: "_HostReader", lines: list[TimedLine]) -> list[TimedLine]:
        """Return the lines as JSON or with the prefixes that the query asks for."""
        if self._query.json:
            return [(at, _as_json(self.attempt, reader.host, at, line)) for at, line in lines]
        several = self._query.host == "all" and self._has_several_hosts
        prefix = b"[host %d] " % reader.host if several else b""
        if not self._query.times:
            return [(at, prefix + line) for at, line in lines]
        return [(at, _timestamp(at) + b" " + prefix + line) for at, line in lines]


class _HostReader:
    """Reads one host's log as it grows."""

    def __init__(self, path: Path, offset: int) -> None:
        """Start reading at `offset`."""
        self.host = int(path.stem.rpartition("-")[2])
        self._path = path
        self._offset = offset
        self._unfinished = b""
        self._unfinished_at = 0.0
        self._timestamps: TimestampReader | None = None
        self._latest = 0.0
        self._at_line_start = True

    def seek_tail(self, lines: int) -> int:
        """Skip to the last lines. Return how many there are, at most `lines`."""
        self._offset, count = _last_lines(self._path, lines, self._offset)
        return count

    def raw(self) -> bytes:
        """Return the next bytes as they were written; empty at the end."""
        chunk = read_chunk(self._path, self._offset, CHUNK_BYTES)
        if not chunk.data:
            return b""
        notice = self._gap_notice(chunk.start)
        self._offset = chunk.start + len(chunk.data)
        self._at_line_start = chunk.data.endswith(b"\n")
        return notice + chunk.data

    def _gap_notice(self, start: int) -> bytes:
        """Return a notice if bytes before `start` are missing."""
        missing = start - self._offset
        if missing <= 0:
            return b""
        notice = b"--- %d bytes are not kept: the log exceeds its limit of size or rate\n"
        return (b"" if self._at_line_start else b"\n") + notice % missing

    def lines(self) -> list[TimedLine]:
        """Return the next complete lines; empty at the end."""
        lines: list[TimedLine] = []
        while not lines:
            chunk = read_chunk(self._path, self._offset, CHUNK_BYTES)
            if chunk.segment is None or not chunk.data:
                break
            if self._timestamps is None or self._timestamps.segment.start != chunk.segment.start:
                self._timestamps = TimestampReader(chunk.segment)
            self._at_line_start = not self._unfinished
            if notice := self._gap_notice(chunk.start):
                lines += [*self.unfinished(), (self._time_of(chunk.start), notice.lstrip(b"\n"))]
            lines += self._split(chunk.data, chunk.start)
            self._offset = chunk.start + len(chunk.data)
        return lines

    def _split(self, data: bytes, offset: int) -> list[TimedLine]:
        """Return the lines that end in these bytes, and keep an unfinished line for later."""
        lines: list[TimedLine] = []
        at, until = self._time_of(offset), self._next_change()
        *complete, last = data.split(b"\n")
        for line in complete:
            # Most lines have the timestamp of the previous line.
            if offset >= until:
                at, until = (
                    self._time_of(offset),
                    self._timestamps.next_offset if self._timestamps else 0,
                )
            offset += len(line) + 1
            if self._unfinished:
                lines.append((self._unfinished_at, self._unfinished + line + b"\n"))
                self._unfinished = b""
            else:
                lines.append((at, line + b"\n"))
        if last:
            if not self._unfinished:
                self._unfinished_at = self._time_of(offset)
            self._unfinished += last
        if len(self._unfinished) > MAX_LINE_BYTES:
            lines += self.unfinished()
        return lines

    def _next_change(self) -> int:
        """Return the offset at which the timestamp changes."""
        return self._timestamps.next_offset if self._timestamps else 0

    def unfinished(self) -> list[TimedLine]:
        """Return and forget the unfinished last line, if any."""
        line, self._unfinished = self._unfinished, b""
        return [(self._unfinished_at, line + b"\n")] if line else []

    def _time_of(self, offset: int) -> float:
        """Return the timestamp of a byte, which never decreases within the log."""
        time = self._timestamps.time_at(offset) if self._timestamps else None
        self._latest = max(self._latest, time or 0.0)
        return self._latest


def _line_since(path: Path, time: float) -> int:
    """Return the offset of the first line that starts at or after a time."""
    offset = offset_at_time(path, time)
    if offset == 0 or read_chunk(path, offset - 1, 1).data == b"\n":
        return offset
    while (chunk := read_chunk(path, offset, CHUNK_BYTES)).data:
        end = chunk.data.find(b"\n")
        if end >= 0:
            return chunk.start + end + 1
        offset = chunk.start + len(chunk.data)
    return offset


def _last_lines(path: Path, lines: int, first: int) -> tuple[int, int]:
    """Return the offset of the last `lines` lines, not before `first`, and their number."""
    count = 0
    at_end = True
    for segment in reversed(segments(path)):
        stop = max(segment.start, first)
        upper = segment.end
        with contextlib.suppress(FileNotFoundError), segment.path.open("rb") as file:
            while upper > stop:
                lower = max(upper - CHUNK_BYTES, stop)
                file.seek(lower - segment.start)
                block = file.read(upper - lower)
                at = len(block)
                if at_end:
                    # An unfinished line counts too.
                    at_end = False
                    count += not block.endswith(b"\n")
                    if lines == 0:
                        return upper, 0
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    count += 1
                    if count > lines:
                        return lower + at + 1, lines
                upper = lower
    return first, count


@lru_cache(maxsize=1024)
def _timestamp(time: float) -> bytes:
    """Return `2026-03-01T14:02:11.250+01:00`, or a dash if the time is unknown."""
    if not time:
        return b"-"
    return datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds").encode()


def _as_json(attempt: int, host: int, time: float, line: bytes) -> bytes:
    text = line.decode("utf-8", "replace").removesuffix("\n")
    entry = {"attempt": attempt, "host": host, "time": time or None, "text": text}
    return json.dumps(entry).encode() + b"\n"


def _host_count(job: Job, attempt: int, folder: Path) -> int:
    """Return the number of hosts that may have a log of this attempt, or of one that follows it.

    While the job holds its slice, the size of the slice decides: a host may not have written yet.
    """
    if attempt == job.attempts and job.attempt is not None and job.active is not None:
        return job.active.hosts
    written = len(_log_files(folder, "all"))
    maximum = max(choice.hosts for choice in job.choices)
    attempt_ended = attempt < job.attempts or job.status.ended
    return (written or maximum) if attempt_ended else maximum


def _log_files(folder: Path, host: str) -> list[Path]:
    if host != "all":
        path = folder / f"host-{int(host)}.log"
        return [path] if path.exists() else []
    return sorted(folder.glob("host-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))
