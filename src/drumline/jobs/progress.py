"""How far a program is: its heartbeat, or what a pattern finds in its log."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.hosts.values import HostReport


def progress_of(reports: Iterable[HostReport], pattern: str | None) -> dict[str, Any] | None:
    """Of the first host that tells. Programs with a heartbeat need no pattern."""
    for report in reports:
        if report.heartbeat:
            return dict(report.heartbeat)
        found = read_lines(report.tail, pattern) if pattern else None
        if found:
            return found
    return None


def read_lines(lines: Sequence[str], pattern: str) -> dict[str, Any] | None:
    """The named groups of the last line that matches, as numbers where they are numbers."""
    for line in reversed(lines):
        match = re.search(pattern, line)
        if match:
            named = match.groupdict()
            return {name: _number(text) for name, text in named.items() if text is not None}
    return None


def _number(text: str) -> int | float | str:
    plain = text.replace(",", "")
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text
