"""The values of the packing rules: what a job file sets, and what was left out."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RULES = 1
"""The version of the packing rules. An archive of a lower version may hold secrets (repack.py)."""

MOST_LISTED = 1000
"""The most files that are listed as left out; the others are counted."""
_MOST_NAMED = 4

OWNER_ONLY = "readable by you alone"
UNREADABLE = "not readable by you"


class CodeError(Exception):
    """The folder cannot be sent; the text is a sentence for the user."""


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not sent; the path of a folder ends with a slash."""

    path: str
    reason: str

    def as_json(self) -> dict[str, str]:
        """The JSON of `create` and of its dry run. A name that is not UTF-8 is escaped."""
        return {"path": printable(self.path), "reason": self.reason}


@dataclass(frozen=True)
class PackingRules:
    """The keys of a job file that decide what is sent, and the server's home."""

    include: tuple[str, ...] = ()
    """The files to send although they look secret."""
    checkpoint: str | None = None
    """The job's checkpoint folder, or a bucket."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    home: Path | None = None
    """The home folder of the server."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """The environment that names the user's home folder and Drumline's."""


def printable(name: str) -> str:
    """A file name as text that JSON and UTF-8 can carry."""
    return name.encode("utf-8", "backslashreplace").decode()


def left_out_json(entries: Sequence[LeftOut]) -> dict[str, Any]:
    """The fields of JSON for what was left out: the first ones, and how many there are."""
    shown = [entry.as_json() for entry in entries[:MOST_LISTED]]
    return {"left_out": shown, "left_out_total": len(entries)}


def left_out_line(entries: Mapping[str, Any]) -> str:
    """The sentence about what was left out, from `left_out_json`. Empty if there is nothing."""
    listed = entries.get("left_out") or []
    if not listed:
        return ""
    named = [f"{entry['path']} ({entry['reason']})" for entry in listed[:_MOST_NAMED]]
    more = (entries.get("left_out_total") or len(listed)) - len(named)
    if more > 0:
        named.append(f"and {more:,} more")
    return f"left out: {', '.join(named)}; to send one, name it under include"
