"""One host's log, read from an offset on: as bytes, or as lines with the time each was begun."""

import contextlib
from pathlib import Path

from drumline.hosts.log_segments import TimestampReader, offset_at_time, read_chunk, segments

CHUNK = 1 << 18
"""The most bytes of one read."""
LONGEST_LINE = 1 << 16
"""The most bytes of a line that is sorted or prefixed; a longer one is split."""

Timed = tuple[float, bytes]


class LogTail:
    """One host's log, read as far as it has grown."""

    def __init__(self, path: Path, place: int) -> None:
        """Read from the offset `place` on."""
        self.number = int(path.stem.rpartition("-")[2])
        self._path = path
        self._place = place
        """The offset of the next read."""
        self._rest = b""
        self._rest_at = 0.0
        self._moments: TimestampReader | None = None
        self._latest = 0.0
        self._whole = True
        """Whether the last bytes read ended a line."""

    def begin_at_tail(self, lines: int) -> int:
        """Skip to the last `lines` lines; returns how many there are."""
        self._place, found = _last_lines(self._path, lines, self._place)
        return found

    def raw(self) -> bytes:
        """The next bytes as they were written, none at the end."""
        stretch = read_chunk(self._path, self._place, CHUNK)
        if not stretch.data:
            return b""
        gap = self._gap(stretch.start)
        self._place = stretch.start + len(stretch.data)
        self._whole = stretch.data.endswith(b"\n")
        return gap + stretch.data

    def _gap(self, start: int) -> bytes:
        """The notice in place of bytes that were not kept."""
        left_out = start - self._place
        if left_out <= 0:
            return b""
        notice = b"--- %d bytes are not kept: the log has reached its limit\n"
        return (b"" if self._whole else b"\n") + notice % left_out

    def lines(self) -> list[Timed]:
        """Complete lines, each with the time it was begun; none at the end."""
        found: list[Timed] = []
        while not found:
            stretch = read_chunk(self._path, self._place, CHUNK)
            if stretch.segment is None or not stretch.data:
                break
            if self._moments is None or self._moments.segment.start != stretch.segment.start:
                self._moments = TimestampReader(stretch.segment)
            self._whole = not self._rest
            if gap := self._gap(stretch.start):
                found += [*self.rest(), (self._at(stretch.start), gap.lstrip(b"\n"))]
            found += self._split(stretch.data, stretch.start)
            self._place = stretch.start + len(stretch.data)
        return found

    def _split(self, data: bytes, place: int) -> list[Timed]:
        """The lines that begin or end in these bytes; an unfinished line is held back."""
        found: list[Timed] = []
        at, until = self._at(place), self._moments.next_offset if self._moments else 0
        *whole, last = data.split(b"\n")
        for line in whole:
            # Most lines were written at the same time as the line before.
            if place >= until:
                at, until = self._at(place), self._moments.next_offset if self._moments else 0
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
        """The last line, if it is unfinished."""
        rest, self._rest = self._rest, b""
        return [(self._rest_at, rest + b"\n")] if rest else []

    def _at(self, place: int) -> float:
        """When a byte was written; never earlier than the bytes before it."""
        found = self._moments.time_at(place) if self._moments else None
        self._latest = max(self._latest, found or 0.0)
        return self._latest


def line_since(path: Path, moment: float) -> int:
    """The offset of the first line that was begun at or after a moment."""
    place = offset_at_time(path, moment)
    if place == 0 or read_chunk(path, place - 1, 1).data == b"\n":
        return place
    while (stretch := read_chunk(path, place, CHUNK)).data:
        end = stretch.data.find(b"\n")
        if end >= 0:
            return stretch.start + end + 1
        place = stretch.start + len(stretch.data)
    return place


def _last_lines(path: Path, lines: int, first: int) -> tuple[int, int]:
    """The offset of the last `lines` lines, not before `first`, and how many they are."""
    place, found = first, 0
    end = True
    for part in reversed(segments(path)):
        stop = max(part.start, first)
        upper = part.end
        with contextlib.suppress(FileNotFoundError), part.path.open("rb") as file:
            while upper > stop:
                lower = max(upper - CHUNK, stop)
                file.seek(lower - part.start)
                block = file.read(upper - lower)
                at = len(block)
                if end:
                    # An unfinished line counts too.
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
