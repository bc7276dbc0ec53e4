"""The values of the packing rules: what a job file sets, and what was left out."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.errors import UserError

RULES = 1
"""The version of the packing rules. An archive of a lower version may hold secrets (repack.py)."""

MAX_LISTED = 1000
"""The maximum number of files in the list of files that are left out."""
_MAX_NAMED = 4

INTERRUPTED = "the command was interrupted; nothing was changed"

EARLIEST_TIME = 315_619_200
"""The second day of 1980 in UTC, which is in 1980 in every time zone."""

OWNER_ONLY = "readable by you alone"
UNREADABLE = "not readable by you"


class CodeError(UserError):
    """The folder cannot be sent."""


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not sent. The path of a folder ends with a slash."""

    path: str
    reason: str

    def as_json(self) -> dict[str, str]:
        """Return the JSON for `create` and its dry run. A name that is not UTF-8 is escaped."""
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


def archive_time(status: os.stat_result) -> int:
    """Return the time of a file for its entry in the archive.

    Python's zipfile refuses files from before 1980, which some build systems write.
    """
    return max(int(status.st_mtime), EARLIEST_TIME)


def printable(name: str) -> str:
    """Return a file name as valid UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def left_out_json(entries: Sequence[LeftOut]) -> dict[str, Any]:
    """Return the JSON fields of the files that are left out: the first ones and their number."""
    listed = [entry.as_json() for entry in entries[:MAX_LISTED]]
    return {"left_out": listed, "left_out_total": len(entries)}


def packing_notes(archive: Mapping[str, Any]) -> list[str]:
    """Return the lines about an archive: the files that are left out, and the largest ones."""
    largest = archive.get("largest") or ()
    lines = [f"largest files: {describe_files(largest)}; exclude files with .drumlineignore"]
    return [*filter(None, [left_out_line(archive)]), *(lines if largest else [])]


def describe_files(files: Sequence[Sequence[Any]]) -> str:
    """Return the names and sizes of files as text."""
    return ", ".join(f"{printable(name)} ({size / 1e6:,.1f} MB)" for name, size in files)


def left_out_line(entries: Mapping[str, Any]) -> str:
    """Return the sentence about the files that are left out, or an empty text without any."""
    first = entries.get("left_out") or []
    if not first:
        return ""
    items = [f"{entry['path']} ({entry['reason']})" for entry in first[:_MAX_NAMED]]
    more = (entries.get("left_out_total") or len(first)) - len(items)
    if more > 0:
        items.append(f"and {more:,} more")
    return f"left out: {', '.join(items)}; to send one, name it under include"
