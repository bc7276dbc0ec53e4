"""One host's log, read onward from a place: as bytes, or as lines with when each was begun."""

import contextlib
from pathlib import Path

from drumline.hosts.kept_log import Moments, parts_of, place_since, read

CHUNK = 1 << 18
"""Bytes that are read at once, of one host."""
LONGEST_LINE = 1 << 16
"""A longer line is shown as several, where lines are put in order or given a prefix."""

Timed = tuple[float, bytes]


class LogTail:
    """One host's log, read as far as it has come."""

    def __init__(self, path: Path, place: int) -> None:
        """Read from a place on."""
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


def line_since(path: Path, moment: float) -> int:
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
