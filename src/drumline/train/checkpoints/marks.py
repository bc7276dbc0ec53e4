"""Which checkpoints in a folder are ours: for each a small file, `drumline/<step>.json`.

It is written before the checkpoint and removed after it, so nothing that Drumline began to write
or to remove is ever without one, and what has none belongs to somebody else and is left alone. It
also says where the checkpoint comes from: the recipe and the data that led to it; whether what
several devices held alike was compared before it was written, and agreed (`checked`); and whether
the hardware that wrote it was found to compute wrong (`suspect`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath  # type: ignore[import-untyped]

from drumline.train.checkpoints.files import read_json, write_json

FOLDER = "drumline"


class Marks:
    """The marks of one checkpoint folder."""

    def __init__(self, folder: str) -> None:
        """Nothing is written yet."""
        self._folder = epath.Path(folder) / FOLDER

    def put(self, step: int, contents: Mapping[str, Any], *, checked: bool = False) -> None:
        """Say that the checkpoint of this step is ours, and where it comes from."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = {"contents": contents, "sum": _sum(contents), "checked": checked}
        write_json(self._file(step), mark)

    def suspect(self, step: int, why: str) -> None:
        """Say that a checkpoint must not be gone on from."""
        write_json(self._file(step), {**(read_json(self._file(step)) or {}), "suspect": why})

    def said(self, word: str) -> set[int]:
        """The steps whose mark says `checked`, or `suspect`."""
        return {step for step in self.steps() if (read_json(self._file(step)) or {}).get(word)}

    def read(self, step: int) -> dict[str, Any] | None:
        """Where a checkpoint comes from; None where nobody said so, or not a byte can be believed.

        A flipped bit must not look like a change of the recipe, so what does not give its sum
        counts as not said.
        """
        found = read_json(self._file(step)) or {}
        contents = found.get("contents")
        good = isinstance(contents, dict) and found.get("sum") == _sum(contents)
        return contents if good else None

    def steps(self) -> set[int]:
        """The steps that have a mark."""
        if not self._folder.exists():
            return set()
        names = [path.name for path in self._folder.iterdir()]
        return {int(name.removesuffix(".json")) for name in names if _is_mark(name)}

    def remove(self, step: int) -> None:
        """Forget a checkpoint that is gone."""
        epath.Path(self._file(step)).unlink(missing_ok=True)

    def clear_drafts(self) -> None:
        """Remove what a process that died left of a mark."""
        if self._folder.exists():
            for path in self._folder.iterdir():
                if path.name.endswith(".draft"):
                    path.unlink(missing_ok=True)

    def _file(self, step: int) -> str:
        return f"{self._folder}/{step}.json"


def _is_mark(name: str) -> bool:
    return name.endswith(".json") and name.removesuffix(".json").isdigit()


def _sum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]
