"""The code of a job as one archive, named by its content.

The name is a hash of names, modes and contents, so the same code is sent to each host only once,
whatever the times of its files. Files that .gitignore excludes, secrets, and folders that are not
code are left out (see packing/). The archive may contain the Drumline package too
(bundled_package.py), in a folder without files of the user.
"""

import copy
import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import IO

from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.packing.rules import CodeError, LeftOut, PackingRules, archive_time
from drumline.hosts.packing.selection import Selection

__all__ = ["Archive", "CodeError", "PackedSize", "measure", "pack"]

DRAFT = ".packing-"
"""The prefix of the name of an unfinished archive."""
MAX_BYTES = 512 * 10**6
"""The size limit. The code is sent to every host of every slice; data belongs in a bucket."""
MAX_BYTES_IN_MEMORY = 8 << 20
"""The size up to which a file is packed from memory; a larger file is copied to disk first."""
LARGE_BYTES = 10**6
"""The size from which a file can be among the largest files that `create` lists."""
MAX_LARGEST = 3
_DEFAULT_RULES = PackingRules()


@dataclass(frozen=True)
class Archive:
    """A packed folder."""

    path: Path
    sha256: str
    files: int
    bytes: int
    """The size of the files before packing; like `files`, without Drumline's own package."""
    left_out: tuple[LeftOut, ...] = ()
    """The files and folders that are not sent."""
    largest: tuple[tuple[str, int], ...] = ()
    """The paths and sizes of the largest files."""


@dataclass(frozen=True)
class PackedSize:
    """The files that `pack` would send: number, size, those left out, and the largest ones."""

    files: int
    bytes: int
    left_out: tuple[LeftOut, ...]
    largest: tuple[tuple[str, int], ...]


def pack(
    folder: Path | None,
    into: Path,
    max_bytes: int = MAX_BYTES,
    package: Path | None = None,
    rules: PackingRules = _DEFAULT_RULES,
) -> Archive:
    """Pack a folder, and an installed package, to `into`/<sha256>.tar.gz. Raises CodeError."""
    selection = Selection(folder, rules, max_bytes) if folder else None
    sizes: dict[str, int] = {}
    with ArchiveWriter(into) as writer:
        for file in selection.files(writer.new_content) if selection else ():
            sizes[file.entry.name] = file.entry.size
            writer.add(file.entry, file.content)
        for name in _package_files(package) if package else ():
            assert package is not None
            path = package.parent / name
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{PACKAGE_FOLDER}/{name}")
            entry.size = len(data)
            status = path.stat()
            entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
            entry.mtime = archive_time(status)
            writer.add(entry, BytesIO(data))
        path, sha = writer.finish()
    left_out = selection.left_out if selection else ()
    return Archive(path, sha, len(sizes), sum(sizes.values()), left_out, _largest(sizes))


def measure(
    folder: Path, max_bytes: int = MAX_BYTES, rules: PackingRules = _DEFAULT_RULES
) -> PackedSize:
    """Return the size of the archive that `pack` would write. Raises CodeError."""
    selection = Selection(folder, rules, max_bytes)
    sizes = {file.entry.name: file.entry.size for file in selection.files()}
    return PackedSize(len(sizes), sum(sizes.values()), selection.left_out, _largest(sizes))


def _largest(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the largest of the files that are worth a mention."""
    large = [(name, size) for name, size in sizes.items() if size >= LARGE_BYTES]
    return tuple(sorted(large, key=lambda item: -item[1])[:MAX_LARGEST])


class ArchiveWriter:
    """Writes an archive, which appears in its folder only when it is complete."""

    def __init__(self, into: Path) -> None:
        """`into` is the folder of the archive. It is created if it does not exist."""
        self._into = into
        self._stack = ExitStack()

    def __enter__(self) -> "ArchiveWriter":
        """Begin a draft."""
        self._into.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=self._into, prefix=DRAFT)
        self._drafts = Path(self._stack.enter_context(folder))
        self._draft = self._drafts / "code.tar.gz"
        self._closing = ExitStack()
        self._stack.push(self._closing)
        raw = self._closing.enter_context(self._draft.open("wb"))
        zipped = self._closing.enter_context(
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
        )
        self._tar = self._closing.enter_context(
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT)
        )
        self._hash = hashlib.sha256()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the draft."""
        self._stack.close()

    def new_content(self) -> IO[bytes]:
        """Return a file for one entry: in memory, or beside the draft if it is large."""
        return tempfile.SpooledTemporaryFile(max_size=MAX_BYTES_IN_MEMORY, dir=str(self._drafts))

    def add(self, entry: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Add an entry. The hash does not include its time."""
        timeless = copy.copy(entry)
        timeless.mtime = 0
        self._hash.update(timeless.tobuf())
        self._tar.addfile(entry, _HashedReader(content, self._hash) if content else None)

    def finish(self) -> tuple[Path, str]:
        """Complete the archive. Return its path and its hash, which is its name."""
        self._closing.close()
        sha = self._hash.hexdigest()
        final = self._into / f"{sha}.tar.gz"
        self._draft.replace(final)
        return final, sha


class _HashedReader(RawIOBase):
    """Reads a file and adds what it reads to a hash."""

    def __init__(self, file: IO[bytes], digest: "hashlib._Hash") -> None:
        self._file, self._digest = file, digest

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _package_files(package: Path) -> list[str]:
    """List the source files of a package, relative to its parent folder.

    A checkout may also have other files, such as an `.env`, and links to files elsewhere.
    """
    files: list[str] = []
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        paths = (Path(folder) / name for name in names if is_source(name))
        files += (
            path.relative_to(package.parent).as_posix()
            for path in paths
            if path.is_file() and not path.is_symlink()
        )
    return sorted(files)


def is_source(name: str) -> bool:
    """Return True for the name of a file of Drumline's own package."""
    return name.endswith(".py") or name == "py.typed"
