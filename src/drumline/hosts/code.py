"""The code of a job: an archive, and the large files of the code beside it, named by their content.

The name of an archive is a hash of names, modes and contents, so the same code is sent to each host
only once, whatever the times of its files. A large file has an empty entry with its hash in the
archive and is sent separately, so it is not resent when a different file changes. Files that
.gitignore excludes, secrets, and folders that are not code are left out (see packing/). The archive
may contain the Drumline package too (bundled_package.py), in a folder without files of the user.
"""

import copy
import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any

from drumline.hosts.agent.wire import LARGE_FILE_KEY, archive_name, large_file_name
from drumline.hosts.packing.content import LARGE_BYTES, Content
from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.packing.rules import (
    CodeError,
    LeftOut,
    PackingRules,
    archive_time,
    describe_files,
)
from drumline.hosts.packing.selection import PackingProgress, Selection, format_size

__all__ = ["Archive", "CodeError", "PackedSize", "measure", "pack"]

DRAFT = ".packing-"
"""The prefix of the name of an unfinished archive."""
MAX_BYTES = 512 * 10**6
"""The size limit. The code is sent to every host of every slice; data belongs in a bucket."""
ASK_BYTES, ASK_FILE_BYTES = 100 * 10**6, 50 * 10**6
"""The size of all files, and of one file, above which the user is asked before they are sent."""
MAX_LARGEST = 3
"""The maximum number of large files that `create` names."""
_DEFAULT_RULES = PackingRules()


class LargeCodeError(CodeError):
    """The code is large, and its user has not allowed it."""


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
    large_files: tuple[str, ...] = ()
    """The hashes of the files that are stored beside the archive."""


@dataclass(frozen=True)
class PackedSize:
    """The files that `pack` would send: number, size, the omitted files, and the largest files."""

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
    progress: PackingProgress | None = None,
    allow_large: bool = True,
) -> Archive:
    """Pack a folder, and an installed package, to `into`/<sha256>.tar.gz. Raises CodeError.

    Without `allow_large`, code that `needs_confirmation` raises LargeCodeError before it is read.
    """
    selection = Selection(folder, rules, max_bytes, progress) if folder else None
    if selection is not None and not allow_large:
        expected = selection.expected_sizes
        if needs_confirmation(sum(expected.values()), largest := _largest(expected)):
            named = f"; the largest files are {describe_files(largest)}" if largest else ""
            raise LargeCodeError(
                f"{format_size(sum(expected.values()))} would be sent to every host{named}"
            )
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
    total, largest = sum(sizes.values()), _largest(sizes)
    return Archive(path, sha, len(sizes), total, left_out, largest, writer.large_files)


def measure(
    folder: Path, max_bytes: int = MAX_BYTES, rules: PackingRules = _DEFAULT_RULES
) -> PackedSize:
    """Return the size of the archive that `pack` would write. Raises CodeError."""
    selection = Selection(folder, rules, max_bytes)
    sizes = {file.entry.name: file.entry.size for file in selection.files()}
    return PackedSize(len(sizes), sum(sizes.values()), selection.left_out, _largest(sizes))


def needs_confirmation(total: int, largest: Sequence[Sequence[Any]]) -> bool:
    """Return True if code is so large that its user must confirm.

    `total` is its size, and `largest` has names and sizes of its largest files.
    """
    return total > ASK_BYTES or any(size > ASK_FILE_BYTES for _, size in largest)


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
        self._large: dict[str, Path] = {}
        """The large files by their hashes."""

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

    @property
    def large_files(self) -> tuple[str, ...]:
        """The hashes of the files that are stored beside the archive."""
        return tuple(self._large)

    def new_content(self) -> Content:
        """Return the content of one entry, to which its bytes are written."""
        return Content(self._drafts)

    def add(self, entry: tarfile.TarInfo, content: Content | IO[bytes] | None) -> None:
        """Add an entry. The hash does not include its time."""
        file: IO[bytes] | None
        if not isinstance(content, Content):
            file = content
        elif content.is_large:
            entry, file = copy.copy(entry), None
            sha, path = content.take()
            self._large[sha] = path
            entry.size, entry.pax_headers = 0, {LARGE_FILE_KEY: sha}
        else:
            file = content.file()
        timeless = copy.copy(entry)
        timeless.mtime = 0
        self._hash.update(timeless.tobuf())
        self._tar.addfile(entry, _HashedReader(file, self._hash) if file else None)

    def finish(self) -> tuple[Path, str]:
        """Complete the archive. Return its path and its hash, which is its name."""
        self._closing.close()
        sha = self._hash.hexdigest()
        for large_sha, path in self._large.items():
            path.replace(self._into / large_file_name(large_sha))
        final = self._into / archive_name(sha)
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
