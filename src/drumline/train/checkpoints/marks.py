"""The marks of the checkpoints that Drumline wrote: a small file each, `drumline/<name>.json`.

A mark is written before its checkpoint and removed after it, so every checkpoint that Drumline
began to write or to remove has one. A folder without a mark belongs to somebody else and is left
alone. The mark also has the recipe and the data that led to the checkpoint; whether the replicas on
several devices were compared before it was written, and agreed (`checked`); and whether the
hardware that wrote it was found to compute wrong results (`suspect`).
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
    """The marks of one checkpoint folder."""

    def __init__(self, folder: str) -> None:
        """Nothing is written yet."""
        self._folder = epath.Path(folder) / FOLDER

    def put(
        self, name: str, contents: Mapping[str, Any], *, checked: bool = False, claim: int = 0
    ) -> None:
        """Mark a checkpoint as ours, with the recipe and the data that led to it.

        `claim` is the number of the writer's claim on the folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = {"contents": contents, "sum": _sum(contents), "checked": checked, "claim": claim}
        write_json(self._file(name), mark)

    def suspect(self, name: str, why: str, claim: int) -> None:
        """Mark a checkpoint as one that no run may go on from, unless another writer wrote it."""
        mark = read_json(self._file(name)) or {}
        if mark.get("claim", claim) == claim:
            write_json(self._file(name), {**mark, "suspect": why})

    def said(self, word: str) -> set[str]:
        """The names of the checkpoints whose mark says `checked`, or `suspect`."""
        return {name for name in self.names() if (read_json(self._file(name)) or {}).get(word)}

    def read(self, name: str) -> dict[str, Any] | None:
        """The recipe and the data that led to a checkpoint; None if they are unknown.

        A flipped bit must not look like a change of the recipe, so a mark whose checksum is wrong
        counts as unknown.
        """
        found = read_json(self._file(name)) or {}
        contents = found.get("contents")
        good = isinstance(contents, dict) and found.get("sum") == _sum(contents)
        return contents if good else None

    def names(self) -> set[str]:
        """The names of the checkpoints that have a mark."""
        if not self._folder.exists():
            return set()
        names = [path.name for path in self._folder.iterdir()]
        return {name.removesuffix(".json") for name in names if _MARK.fullmatch(name)}

    def remove(self, name: str) -> None:
        """Remove the mark of a checkpoint that is gone."""
        epath.Path(self._file(name)).unlink(missing_ok=True)

    def clear_drafts(self) -> None:
        """Remove what a process that died left of a mark."""
        if self._folder.exists():
            for path in list(self._folder.iterdir()):
                if path.name.endswith(".draft"):
                    path.unlink(missing_ok=True)

    def _file(self, name: str) -> str:
        return f"{self._folder}/{name}.json"


def _sum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]
