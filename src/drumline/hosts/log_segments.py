"""The log of one host as the server keeps it: its head, its newest end, and the times of its bytes.

A program may write for weeks. Therefore `host-0.log` holds only the head. The rest goes to segments
that are named by their offset (`host-0.log@1048576`), of which the oldest is deleted when the log
reaches its limit. Beside each segment is a file `….times` with pairs of an offset in the log and
the time from which on it was written, by the clock of the host.

Segments are only appended to, and their names and sizes are the whole state. After a crash the log
continues at its end.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MIN_LIMIT = 1 << 16
"""The smallest number of bytes that are kept of a log, whatever its limit."""
TAIL_SEGMENTS = 8
"""The number of segments of the newest end: an eighth of it is deleted at a time."""
MIN_TIME_BYTES, MIN_TIME_SECONDS = 64, 0.2
"""The smallest distance between two recorded times. A program that writes single characters must
not have more times than text."""
_TIME_PAIR = struct.Struct("<Qd")


@dataclass(frozen=True)
class Segment:
    """A part of the log in its own file."""

    start: int
    path: Path
    size: int

    @property
    def end(self) -> int:
        """The offset of the next byte."""
        return self.start + self.size

    @property
    def times(self) -> Path:
        """The file with the times of the segment."""
        return self.path.with_name(self.path.name + ".times")


def segments(path: Path) -> list[Segment]:
    """Return the segments of the log `host-0.log` in order. There may be gaps between them."""
    result = []
    for file in (path, *path.parent.glob(f"{path.name}@*")):
        _, _, offset = file.name.partition("@")
        if offset and not offset.isdecimal():
            continue  # the times of a segment
        try:
            result.append(Segment(int(offset or 0), file, file.stat().st_size))
        except FileNotFoundError:
            continue
    return sorted(result, key=lambda segment: segment.start)


def received_size(path: Path) -> int:
    """Return the size of the log on its host, as far as it was received."""
    all_segments = segments(path)
    return all_segments[-1].end if all_segments else 0


@dataclass(frozen=True)
class Chunk:
    """Some bytes of the log."""

    start: int
    data: bytes
    segment: Segment | None
    """The segment of the bytes; None at the end of the log."""


def read_chunk(path: Path, start: int, size: int) -> Chunk:
    """Read up to `size` bytes from `start`, or from the next offset that is kept."""
    for segment in segments(path):
        if segment.end <= start:
            continue
        first = max(start, segment.start)
        try:
            with segment.path.open("rb") as file:
                file.seek(first - segment.start)
                return Chunk(first, file.read(min(size, segment.end - first)), segment)
        except FileNotFoundError:
            continue  # deleted in the meantime
    return Chunk(start, b"", None)


def timestamps(segment: Segment, skip: int = 0) -> Iterator[tuple[int, float]]:
    """Yield offsets in the log and the times from which on they were written, in order."""
    try:
        with segment.times.open("rb") as file:
            file.seek(skip * _TIME_PAIR.size)
            while block := file.read(_TIME_PAIR.size * 4096):
                complete = len(block) - len(block) % _TIME_PAIR.size
                yield from _TIME_PAIR.iter_unpack(block[:complete])
    except FileNotFoundError:
        return


class TimestampReader:
    """The times of a segment's bytes, read from first to last.

    It also reads times that are recorded later. It does not hold them in memory, because a log may
    have millions of them.
    """

    def __init__(self, segment: Segment) -> None:
        """Start at the beginning of the segment."""
        self.segment = segment
        self._pairs_read = 0
        self._pairs = timestamps(segment)
        self._time: float | None = None
        self._next: tuple[int, float] | None = None

    def time_at(self, offset: int) -> float | None:
        """Return the time at which a byte was written, or None if no time was recorded."""
        while True:
            if self._next is None:
                self._next = next(self._pairs, None)
            if self._next is None:
                self._pairs = timestamps(self.segment, self._pairs_read)
                return self._time
            if self._next[0] > offset:
                return self._time
            self._time, self._next = self._next[1], None
            self._pairs_read += 1

    @property
    def next_offset(self) -> int:
        """The offset from which on the time changes, as far as it is known."""
        return self.segment.start + (1 << 62) if self._next is None else self._next[0]


def offset_at_time(path: Path, time: float) -> int:
    """Return the first offset written at or after a time, or the end of the log."""
    all_segments = segments(path)
    for segment in all_segments:
        for offset, written_at in timestamps(segment):
            if written_at >= time:
                return offset
    return all_segments[-1].end if all_segments else 0


class LogWriter:
    """Writes the log that a host sends."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """Continue at the end of the log. `limit` is the number of bytes to keep."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._limit = None if limit is None else max(limit, MIN_LIMIT)
        self._segments = segments(path) or [Segment(0, path, 0)]
        self._file: BinaryIO = self._segments[-1].path.open("ab", buffering=0)
        self._times: BinaryIO = self._segments[-1].times.open("ab", buffering=0)
        self.size = self._segments[-1].end
        self._last_pair: tuple[int, float] | None = None

    def append(self, data: bytes, time: float) -> None:
        """Append the next bytes, which were written at `time`."""
        self._record_time(time)
        view = memoryview(data)
        while view:
            capacity = self._capacity()
            if capacity <= 0:
                self._begin_segment()
                self._record_time(time)
                continue
            written = self._file.write(view[:capacity])
            view = view[written:]
            self.size += written

    def skip_to(self, offset: int) -> None:
        """Leave out the bytes before an offset. Do nothing if they were received."""
        if offset > self.size:
            self.size = offset
            self._begin_segment()

    def _record_time(self, time: float) -> None:
        if self._last_pair is not None:
            offset, last_time = self._last_pair
            if self.size - offset < MIN_TIME_BYTES and abs(time - last_time) < MIN_TIME_SECONDS:
                return
        self._times.write(_TIME_PAIR.pack(self.size, time))
        self._last_pair = (self.size, time)

    def _capacity(self) -> int:
        """Return the number of bytes that the current segment can still take."""
        if self._limit is None:
            return 1 << 62
        last = self._segments[-1]
        head = self._limit // 2
        max_size = head if last.start == 0 else head // TAIL_SEGMENTS
        return max_size - (self.size - last.start)

    def _begin_segment(self) -> None:
        self.close()
        segment = Segment(self.size, self._path.with_name(f"{self._path.name}@{self.size}"), 0)
        self._segments.append(segment)
        for old in self._segments[1:-TAIL_SEGMENTS] if self._limit is not None else ():
            old.path.unlink(missing_ok=True)
            old.times.unlink(missing_ok=True)
            self._segments.remove(old)
        self._file = segment.path.open("ab", buffering=0)
        self._times = segment.times.open("ab", buffering=0)
        self._last_pair = None

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._times.close()


def rename_log(path: Path) -> None:
    """Rename a log to `host-0.log.1` or a later number, so that a new one can begin."""
    suffix = 1
    while path.with_name(f"{path.name}.{suffix}").exists():
        suffix += 1
    for segment in segments(path):
        for file in (segment.path, segment.times):
            if file.exists():
                name = file.name.replace(path.name, f"{path.name}.{suffix}", 1)
                os.replace(file, file.with_name(name))
