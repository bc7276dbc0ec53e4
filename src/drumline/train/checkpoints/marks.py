"""The marks of the checkpoints that Drumline wrote: a small file each, `drumline/<name>.json`.

A mark is written before its checkpoint and removed after it, so every checkpoint that Drumline
started to write or to remove has one. A folder without a mark was not written by Drumline and is
left alone. The mark also has the recipe and the data that led to the checkpoint, and two flags:
`checked` if the replicas on several devices were compared before it was written and agreed, and
`suspect` if the hardware that wrote it was found to compute wrong results.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from etils import epath  # type: ignore[import-untyped]

from drumline.train.checkpoints.files import read_json, write_json

FOLDER = "drumline"
_MARK = re.compile(r"\d+(\.\d+)?\.json")


class Marks:
    """The marks in a checkpoint folder."""

    def __init__(self, folder: str) -> None:
        """Nothing is written yet."""
        self._folder = epath.Path(folder) / FOLDER

    def put(
        self, name: str, contents: Mapping[str, Any], *, checked: bool = False, claim: int = 0
    ) -> None:
        """Mark a checkpoint as written by Drumline, with the recipe and the data that led to it.

        `claim` is the number of the writer's claim on the folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = {"contents": contents, "sum": _sum(contents), "checked": checked, "claim": claim}
        write_json(self._file(name), mark)

    def mark_suspect(self, name: str, reason: str, claim: int) -> None:
        """Mark a checkpoint from which no run may resume, unless a later writer has replaced it."""
        mark = read_json(self._file(name)) or {}
        if mark.get("claim", claim) == claim:
            write_json(self._file(name), {**mark, "suspect": reason})

    def names_with(self, flag: str) -> set[str]:
        """Return the names of the checkpoints whose mark has the flag `checked` or `suspect`."""
        return {name for name in self.names() if (read_json(self._file(name)) or {}).get(flag)}

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the recipe and the data that led to a checkpoint, or None if they are unknown.

        A flipped bit must not look like a change of the recipe, so a mark whose checksum is wrong
        counts as unknown.
        """
        mark = read_json(self._file(name)) or {}
        contents = mark.get("contents")
        valid = isinstance(contents, dict) and mark.get("sum") == _sum(contents)
        return contents if valid else None

    def names(self) -> set[str]:
        """Return the names of the checkpoints that have a mark."""
        if not self._folder.exists():
            return set()
        names = [path.name for path in self._folder.iterdir()]
        return {name.removesuffix(".json") for name in names if _MARK.fullmatch(name)}

    def remove(self, name: str) -> None:
        """Remove the mark of a checkpoint that is gone."""
        epath.Path(self._file(name)).unlink(missing_ok=True)

    def clear_drafts(self) -> None:
        """Remove the drafts of marks that a process left when it died."""
        if self._folder.exists():
            for path in list(self._folder.iterdir()):
                if path.name.endswith(".draft"):
                    path.unlink(missing_ok=True)

    def _file(self, name: str) -> str:
        return f"{self._folder}/{name}.json"


def _sum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]
