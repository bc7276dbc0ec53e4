"""What a user gave for a job, as it is kept: the job file, the code packed for it, its origin.

`jobs.spec` checks a job file before it comes here, by rules that may grow stricter. What is kept
runs already, so it is read back by its types alone, and what an older version left out has the
value that it meant then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from drumline.hosts.companion import Use

Capacity = Literal["spot", "on-demand", "reserved"]


@dataclass(frozen=True)
class PythonChoice:
    """Where the program's Python comes from."""

    kind: Literal["system", "uv", "venv", "conda", "docker"] = "system"
    version: str | None = None
    requirements: str | tuple[str, ...] | None = None
    """A file in the code, or a list of packages."""
    image: str | None = None


@dataclass(frozen=True)
class PackedCode:
    """The archive that the hosts get."""

    sha: str
    files: int
    bytes: int
    drumline: Use = "none"
    """How Drumline itself comes to the hosts."""


@dataclass(frozen=True)
class Origin:
    """Where a job comes from."""

    checkpoint: str | None = None
    """The folder of the job whose checkpoints it took over."""
    adopted: str | None = None
    """The stray slice that it was made for."""


@dataclass(frozen=True)
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
    archive: PackedCode | None = None
    origin: Origin | None = None
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole of it as JSON, to be kept, shown and compared with the job file of today."""

    @classmethod
    def of(cls, given: object) -> Self:
        """Read what is kept. Raises ValueError."""
        if not isinstance(given, dict):
            raise ValueError("spec: not a mapping")
        read: Self = _STORED.validate_python({**given, "given": given})
        return read

    @property
    def file(self) -> dict[str, Any]:
        """The keys of the job file alone."""
        return {key: value for key, value in self.given.items() if key not in _OURS}

    def checkpoints_of(self, job_id: str) -> str | None:
        """Where a job keeps its checkpoints: in a folder of its own, or in one it took over."""
        if self.origin is not None and self.origin.checkpoint:
            return self.origin.checkpoint
        # Two jobs from one file must not write over each other's checkpoints.
        return f"{self.checkpoint.rstrip('/')}/{job_id}" if self.checkpoint else None


_OURS = frozenset({"archive", "origin"})
_STORED: TypeAdapter[Any] = TypeAdapter(StoredSpec)
