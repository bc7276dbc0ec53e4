"""How far a program is: its heartbeat, or what a pattern finds in its log."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drumline.hosts.log_segments import read_chunk, received_size
from drumline.jobs.patterns import limited
from drumline.observed.hosts import HostReport

_LONGEST_LINE = 500
_LONGEST_NUMBER = 40
_MOST = 1 << 18
"""The most bytes of one read: of a log that grew by more, only the end is read."""
MATCH_SECONDS = 0.25
"""CPU seconds to match all the lines of one read: a plain pattern needs a fiftieth of that, and
everything else waits meanwhile."""


def heartbeat_of(reports: Sequence[HostReport]) -> tuple[int, dict[str, Any]] | None:
    """The first host that has a heartbeat, and that heartbeat."""
    for report in reports:
        if report.heartbeat:
            return report.index, dict(report.heartbeat)
    return None


class LogReader:
    """Reads the logs of one attempt as they grow, for what a pattern finds in them."""

    def __init__(self, folder: Path, pattern: str, known: bool = False) -> None:
        """`folder` holds `host-0.log` and its siblings.

        Where an earlier reader's news are `known`, the first news are only the newest match.
        """
        self._folder = folder
        self._known = known
        self._pattern = re.compile(pattern)
        self._offsets: dict[Path, int] = {}
        self._source: Path | None = None

    def news(self) -> list[dict[str, Any]]:
        """What was matched since the last call in the first log with a match, oldest first.

        Raises TooSlow where the pattern takes too long.
        """
        if self._source is not None:
            return self._read(self._source)
        for path in sorted(self._folder.glob("host-*.log"), key=_host_number):
            found = self._read(path)
            if found:
                self._source = path
                return found[-1:] if self._known else found
        return []

    def _read(self, path: Path) -> list[dict[str, Any]]:
        size = received_size(path)
        # A replaced host begins a new log.
        known = min(self._offsets.get(path, 0), size)
        stretch = read_chunk(path, max(known, size - _MOST), _MOST)
        start, data = stretch.start, stretch.data
        # An unfinished line is read once it is complete; progress bars end theirs with \r.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._offsets[path] = start + end
        lines = data[:end].decode("utf-8", "replace").splitlines()
        with limited(MATCH_SECONDS):
            return [found for line in lines if (found := self._match(line)) is not None]

    def _match(self, line: str) -> dict[str, Any] | None:
        match = self._pattern.search(line[:_LONGEST_LINE])
        if match is None:
            return None
        named = match.groupdict()
        return {name: _number(text) for name, text in named.items() if text is not None}


def _host_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _number(text: str) -> int | float | str:
    plain = text.replace(",", "")
    if len(plain) > _LONGEST_NUMBER:
        return text
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text
