"""The stored spec of a job: the accepted job file, the packed code, and the job's origin.

`jobs.spec` validates a job file before it is stored, by rules that may become stricter. A stored
spec belongs to a job that runs already, so only its types are checked when it is read. A key that
an older version did not write has the default of that version.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import SkipValidation, TypeAdapter

from drumline.hosts.agent.wire import archive_name, large_file_name
from drumline.hosts.protocol import DEFAULT_SHM_SIZE, Use
from drumline.jobs.slice_settings import NO_SETTINGS, SliceSettings

Capacity = Literal["spot", "on-demand", "reserved"]


@dataclass(frozen=True, slots=True)
class PythonSource:
    """The source of the program's Python."""

    kind: Literal["system", "uv", "venv", "conda", "docker"] = "system"
    version: str | None = None
    requirements: str | tuple[str, ...] | None = None
    """The name of a file in the code, or a list of packages."""
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """The settings of the program's container beside its image, which `python` has."""

    login: str | None = None
    """`service-account`, or the name of the secret with the login to the registry."""
    shm_size: str = DEFAULT_SHM_SIZE


@dataclass(frozen=True, slots=True)
class PackedCode:
    """The archive of the program's code."""

    sha: str
    files: int
    bytes: int
    drumline: Use = "none"
    """The part of Drumline that is bundled with the code."""
    rules: int = 0
    """The version of the packing rules. An archive of version 0 may hold secrets."""
    large_files: tuple[str, ...] = ()
    """The hashes of the files that are stored beside the archive."""

    @property
    def file_name(self) -> str:
        """The name of the archive."""
        return archive_name(self.sha)

    @property
    def names(self) -> set[str]:
        """The names of the files with the code."""
        return {self.file_name, *map(large_file_name, self.large_files)}


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a job that continues another job or an orphan."""

    checkpoint: str | None = None
    """The checkpoint folder of the job that it continues."""
    adopted: str | None = None
    """The orphan that it adopted."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """An accepted job file: the keys that are needed to run the job."""

    name: str | None = None
    run: str = ""
    setup: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    python: PythonSource = PythonSource()
    docker: Container | None = None
    hosts: Literal["all"] | tuple[int, ...] = "all"
    capacity: Capacity = "spot"
    checkpoint: str | None = None
    """The folder of the checkpoints. Each job of this file has a subfolder."""
    outputs: tuple[str, ...] = ()
    """Paths in the folder of the program that are copied to the home of the server."""
    progress: str | None = None
    burnin: Literal["off", "short", "long"] = "off"
    checkpoint_owner: str | None = None
    """The first part of the name of the job's checkpoint folder. None for a job of version 0.1,
    whose folder has the number of the job as its name."""
    settings: SliceSettings = NO_SETTINGS
    """The settings of its slices, without those of config.yaml."""
    archive: PackedCode | None = None
    origin: Origin | None = None
    interpreter: str | None = None
    """The Python of the client, which the hosts of the emulator run."""
    document: SkipValidation[Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """The whole spec as JSON, to be stored, displayed and compared with a later version."""

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Read a stored spec. Raises ValueError."""
        if not isinstance(document, dict):
            raise ValueError("spec: not a mapping")
        # Earlier versions stored empty values, and other types in the two mappings.
        keys = {k: v for k, v in document.items() if k in _MAY_BE_EMPTY or not _is_empty(v)}
        for key in ("environment", "mounts"):
            if isinstance(keys.get(key), dict):
                keys[key] = {name: _to_text(value) for name, value in keys[key].items()}
        spec: Self = _STORED.validate_python({**keys, "settings": keys, "document": document})
        return spec

    @property
    def file(self) -> dict[str, Any]:
        """The keys of the job file, without those that Drumline added."""
        return {key: value for key, value in self.document.items() if key not in _ADDED_KEYS}

    def checkpoints_of(self, job_id: str) -> str | None:
        """Return the checkpoint folder of a job: its own, or that of the job that it continues.

        Jobs of the same file, or of two homes, have different folders.
        """
        if self.origin is not None and self.origin.checkpoint:
            return self.origin.checkpoint
        if not self.checkpoint:
            return None
        name = f"{self.checkpoint_owner}-{job_id}" if self.checkpoint_owner else job_id
        return f"{self.checkpoint.rstrip('/')}/{name}"


def checkpoint_owner(owner: str, created_at: float) -> str:
    """Return the first part of the name of a new job's checkpoint folder.

    It depends on the time, because two databases may have one id: a home that was copied, or
    restored from a backup, gives its next jobs numbers that the other home has used already.
    """
    return hashlib.sha256(f"{owner} {created_at!r}".encode()).hexdigest()[:8]


_MAY_BE_EMPTY = frozenset({"run", "external_ip"})
_ADDED_KEYS = frozenset({"archive", "origin", "checkpoint_owner", "interpreter"})
_STORED: TypeAdapter[Any] = TypeAdapter(StoredSpec)


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == {}


def _to_text(value: object) -> object:
    """Return a scalar as text, as a job file has it. Other values fail the validation."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value
