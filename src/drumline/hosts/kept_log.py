"""One host's log as it is kept on our side: its head, its newest end, and when it was written.

A program may write for weeks, and our disk is small. So `host-0.log` holds the head, and what
follows goes into parts named by the offset where they begin (`host-0.log@1048576`), of which the
oldest is removed when the log has reached its limit. Beside each part is a file `….times`: pairs
of an offset in the log and the time from which on it was written, by the host's clock.

Parts are only appended to, and their names and sizes are the whole state: after a crash, the log
goes on where it ends.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SMALLEST = 1 << 16
"""The least bytes that are kept of a log, whatever its limit."""
TAIL_PARTS = 8
"""The number of parts of the newest end, so that an eighth of it is removed at a time."""
APART_BYTES, APART_SECONDS = 64, 0.2
"""The least distance between two noted times: a program that writes dot by dot must not have more
times than text."""
_PAIR = struct.Struct("<Qd")


@dataclass(frozen=True)
class Part:
    """A stretch of the log in a file of its own."""

    start: int
    path: Path
    size: int

    @property
    def end(self) -> int:
        """The offset of the next byte."""
        return self.start + self.size

    @property
    def times(self) -> Path:
        """The file that says when the part was written."""
        return self.path.with_name(self.path.name + ".times")


def parts_of(path: Path) -> list[Part]:
    """What is kept of the log `host-0.log`, in order; between two parts some may be missing."""
    found = []
    for file in (path, *path.parent.glob(f"{path.name}@*")):
        _, _, place = file.name.partition("@")
        if place and not place.isdecimal():
            continue  # the times of a part
        try:
            found.append(Part(int(place or 0), file, file.stat().st_size))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda part: part.start)


def size_of(path: Path) -> int:
    """The length of the log on its host, as far as it was received."""
    parts = parts_of(path)
    return parts[-1].end if parts else 0


@dataclass(frozen=True)
class Stretch:
    """Some bytes of the log."""

    start: int
    data: bytes
    part: Part | None
    """The part that the bytes are kept in; None at the end of the log."""


def read(path: Path, start: int, most: int) -> Stretch:
    """Some bytes from `start` on, or from the next offset that was kept."""
    for part in parts_of(path):
        if part.end <= start:
            continue
        begin = max(start, part.start)
        try:
            with part.path.open("rb") as file:
                file.seek(begin - part.start)
                return Stretch(begin, file.read(min(most, part.end - begin)), part)
        except FileNotFoundError:
            continue  # removed meanwhile
    return Stretch(start, b"", None)


def moments(part: Part, skip: int = 0) -> Iterator[tuple[int, float]]:
    """Offsets in the log and when what follows them was written, in order."""
    try:
        with part.times.open("rb") as file:
            file.seek(skip * _PAIR.size)
            while block := file.read(_PAIR.size * 4096):
                whole = len(block) - len(block) % _PAIR.size
                yield from _PAIR.iter_unpack(block[:whole])
    except FileNotFoundError:
        return


class Moments:
    """When the bytes of a part were written, to be read from first to last.

    In a part that grows, times noted later are found too. They are not held in memory: a log may
    have millions of them.
    """

    def __init__(self, part: Part) -> None:
        """Start at the beginning of the part."""
        self.part = part
        self._read = 0
        self._pairs = moments(part)
        self._time: float | None = None
        self._next: tuple[int, float] | None = None

    def at(self, place: int) -> float | None:
        """When this byte was written; None where no time was noted."""
        while True:
            if self._next is None:
                self._next = next(self._pairs, None)
            if self._next is None:
                self._pairs = moments(self.part, self._read)
                return self._time
            if self._next[0] > place:
                return self._time
            self._time, self._next = self._next[1], None
            self._read += 1

    @property
    def next_place(self) -> int:
        """The offset from which on the answer changes, as far as is known."""
        return self.part.start + (1 << 62) if self._next is None else self._next[0]


def place_since(path: Path, moment: float) -> int:
    """The first offset that was written at or after a moment; the end of the log where none was."""
    parts = parts_of(path)
    for part in parts:
        for place, time in moments(part):
            if time >= moment:
                return place
    return parts[-1].end if parts else 0


class KeptLog:
    """Writes what comes from a host."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """Go on where the log ends; `limit` is how many bytes of it are kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._limit = None if limit is None else max(limit, SMALLEST)
        parts = parts_of(path)
        self._parts = parts or [Part(0, path, 0)]
        self._file: BinaryIO = self._parts[-1].path.open("ab", buffering=0)
        self._times: BinaryIO = self._parts[-1].times.open("ab", buffering=0)
        self.size = self._parts[-1].end
        self._noted: tuple[int, float] | None = None

    def append(self, data: bytes, at: float) -> None:
        """Add the next bytes, written at this time."""
        self._note(at)
        view = memoryview(data)
        while view:
            room = self._room()
            if room <= 0:
                self._next_part()
                self._note(at)
                continue
            written = self._file.write(view[:room])
            view = view[written:]
            self.size += written

    def _note(self, at: float) -> None:
        if self._noted is not None:
            place, time = self._noted
            if self.size - place < APART_BYTES and abs(at - time) < APART_SECONDS:
                return
        self._times.write(_PAIR.pack(self.size, at))
        self._noted = (self.size, at)

    def _room(self) -> int:
        """How many more bytes the current part takes."""
        if self._limit is None:
            return 1 << 62
        last = self._parts[-1]
        head = self._limit // 2
        whole = head if last.start == 0 else head // TAIL_PARTS
        return whole - (self.size - last.start)

    def _next_part(self) -> None:
        self.close()
        fresh = Part(self.size, self._path.with_name(f"{self._path.name}@{self.size}"), 0)
        self._parts.append(fresh)
        for old in self._parts[1:-TAIL_PARTS]:
            old.path.unlink(missing_ok=True)
            old.times.unlink(missing_ok=True)
            self._parts.remove(old)
        self._file = fresh.path.open("ab", buffering=0)
        self._times = fresh.times.open("ab", buffering=0)
        self._noted = None

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._times.close()


def set_aside(path: Path) -> None:
    """Keep an old log under another name, `host-0.log.1`, and begin a new one."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    for part in parts_of(path):
        for file in (part.path, part.times):
            if file.exists():
                name = file.name.replace(path.name, f"{path.name}.{number}", 1)
                os.replace(file, file.with_name(name))
