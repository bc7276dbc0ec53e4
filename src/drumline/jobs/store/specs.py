"""What a user gave for a job, as it is kept: the job file, the code packed for it, its origin.

`jobs.spec` checks a job file before it is stored, by rules that may grow stricter. A stored file
runs already, so it is read back with only its types checked, and what an older version left out has
the default of that version.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import SkipValidation, TypeAdapter

from drumline.hosts.bundled_package import Use

Capacity = Literal["spot", "on-demand", "reserved"]


@dataclass(frozen=True, slots=True)
class PythonChoice:
    """Where the program's Python comes from."""

    kind: Literal["system", "uv", "venv", "conda", "docker"] = "system"
    version: str | None = None
    requirements: str | tuple[str, ...] | None = None
    """The name of a file in the code, or a list of packages."""
    image: str | None = None


@dataclass(frozen=True, slots=True)
class PackedCode:
    """The archive that the hosts get."""

    sha: str
    files: int
    bytes: int
    drumline: Use = "none"
    """How Drumline itself gets to the hosts."""
    rules: int = 0
    """The version of the packing rules; an archive of version 0 may hold secrets."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job comes from."""

    checkpoint: str | None = None
    """The folder of the job whose checkpoints it took over."""
    adopted: str | None = None
    """The stray slice that the job was made for."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A job file that was accepted, as far as running the job needs it."""

    name: str | None = None
    run: str = ""
    setup: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    python: PythonChoice = PythonChoice()
    hosts: Literal["all"] | tuple[int, ...] = "all"
    capacity: Capacity = "spot"
    checkpoint: str | None = None
    """Where the jobs of this file keep their checkpoints, each in a folder of its own."""
    progress: str | None = None
    burnin: Literal["off", "short", "long"] = "off"
    checkpoint_owner: str | None = None
    """The id of the job database; None for a job of version 0.1, whose folder does not have it."""
    archive: PackedCode | None = None
    origin: Origin | None = None
    given: SkipValidation[Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """The whole file as JSON, to be stored, shown and compared with a later version of it."""

    @classmethod
    def of(cls, given: object) -> Self:
        """Read what was stored. Raises ValueError."""
        if not isinstance(given, dict):
            raise ValueError("spec: not a mapping")
        # What was left empty, or written before its type was settled, means what it meant then.
        known = {key: value for key, value in given.items() if key == "run" or not _empty(value)}
        for key in ("environment", "mounts"):
            if isinstance(known.get(key), dict):
                known[key] = {name: _text(value) for name, value in known[key].items()}
        read: Self = _STORED.validate_python({**known, "given": given})
        return read

    @property
    def file(self) -> dict[str, Any]:
        """Only the keys of the job file."""
        return {key: value for key, value in self.given.items() if key not in _OURS}

    def checkpoints_of(self, job_id: str) -> str | None:
        """The folder of a job's checkpoints: its own, or the one that it took over.

        Two jobs from one file have folders of their own, and so have jobs of two homes.
        """
        if self.origin is not None and self.origin.checkpoint:
            return self.origin.checkpoint
        if not self.checkpoint:
            return None
        name = f"{self.checkpoint_owner}-{job_id}" if self.checkpoint_owner else job_id
        return f"{self.checkpoint.rstrip('/')}/{name}"


_OURS = frozenset({"archive", "origin", "checkpoint_owner"})
_STORED: TypeAdapter[Any] = TypeAdapter(StoredSpec)


def _empty(value: object) -> bool:
    return value is None or value is False or value == {}


def _text(value: object) -> object:
    """The text of a plain value, as a job file's; what has none stays, and is refused."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value
