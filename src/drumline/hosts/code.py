"""The code of a job as one archive, named by its content.

The same files always give the same bytes, so an archive is sent to each host only once. Files that
.gitignore excludes, secrets, and folders that are not code are left out (see packing/). The archive
may contain the Drumline package too (bundled_package.py), in a folder without files of the user.
"""

import gzip
import hashlib
import os
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.packing.rules import CodeError, LeftOut, PackingRules
from drumline.hosts.packing.selection import Selection

__all__ = ["Archive", "CodeError", "PackedSize", "measure", "pack"]

DRAFT = ".packing-"
"""The prefix of the name of an unfinished archive."""
MAX_BYTES = 512 * 10**6
"""The size limit. The code is sent to every host of every slice; data belongs in a bucket."""
MAX_BYTES_IN_MEMORY = 8 << 20
"""The size up to which a file is packed from memory; a larger file is copied to disk first."""
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


@dataclass(frozen=True)
class PackedSize:
    """The files that `pack` would send: their number, their size, and those left out."""

    files: int
    bytes: int
    left_out: tuple[LeftOut, ...]


def pack(
    folder: Path | None,
    into: Path,
    max_bytes: int = MAX_BYTES,
    package: Path | None = None,
    rules: PackingRules = _DEFAULT_RULES,
) -> Archive:
    """Pack a folder, and an installed package, to `into`/<sha256>.tar.gz. Raises CodeError."""
    selection = Selection(folder, rules, max_bytes) if folder else None
    files = total = 0
    with ArchiveWriter(into) as writer:
        for file in selection.files(writer.new_content) if selection else ():
            files += 1
            total += file.entry.size
            writer.tar.addfile(file.entry, file.content)
        for name in _package_files(package) if package else ():
            assert package is not None
            path = package.parent / name
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{PACKAGE_FOLDER}/{name}")
            entry.size = len(data)
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            writer.tar.addfile(entry, BytesIO(data))
        path, sha = writer.finish()
    return Archive(path, sha, files, total, selection.left_out if selection else ())


def measure(
    folder: Path, max_bytes: int = MAX_BYTES, rules: PackingRules = _DEFAULT_RULES
) -> PackedSize:
    """Return the size of the archive that `pack` would write. Raises CodeError."""
    selection = Selection(folder, rules, max_bytes)
    sizes = [file.entry.size for file in selection.files()]
    return PackedSize(len(sizes), sum(sizes), selection.left_out)


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
        self.tar = self._closing.enter_context(
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT)
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the draft."""
        self._stack.close()

    def new_content(self) -> IO[bytes]:
        """Return a file for one entry: in memory, or beside the draft if it is large."""
        return tempfile.SpooledTemporaryFile(max_size=MAX_BYTES_IN_MEMORY, dir=str(self._drafts))

    def finish(self) -> tuple[Path, str]:
        """Complete the archive. Return its path and its hash, which is its name."""
        self._closing.close()
        with self._draft.open("rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
        final = self._into / f"{sha}.tar.gz"
        self._draft.replace(final)
        return final, sha


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
