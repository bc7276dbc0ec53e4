"""The code of a job as one archive, named by its content.

The same files always give the same bytes, so a host that has an archive is never sent it again.
What .gitignore leaves out is not sent. Drumline's own package may be in it too (companion.py), in
a folder without files of the user.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from drumline.hosts.ignore import ALWAYS, files_below

DRAFT = ".packing-"
"""The prefix of the name of an unfinished archive."""
LARGEST = 512 * 10**6
"""The most bytes of code. Data belongs in a bucket: code is sent to every host of every slice."""
COMPANION = ".drumline/python"
"""The folder of Drumline's own package in the working copy, if it was sent along."""


class CodeError(Exception):
    """The folder cannot be sent; the text is a sentence for the user."""


@dataclass(frozen=True)
class Archive:
    """A packed folder."""

    path: Path
    sha256: str
    files: int
    bytes: int
    """The size of the files before packing; like `files`, without Drumline's own package."""


def pack(
    folder: Path | None, into: Path, largest: int = LARGEST, package: Path | None = None
) -> Archive:
    """Pack a folder, and a package with it, into `into`/<sha256>.tar.gz; raises CodeError."""
    names = _sendable(folder, largest) if folder else []
    into.mkdir(parents=True, exist_ok=True)
    total = 0
    with tempfile.TemporaryDirectory(dir=into, prefix=DRAFT) as drafts:
        draft = Path(drafts) / "code.tar.gz"
        with (
            draft.open("wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name in names:
                assert folder is not None
                entry, data = _entry(folder, name)
                total += len(data)
                tar.addfile(entry, BytesIO(data))
            for name in _files_of(package) if package else ():
                assert package is not None
                entry, data = _entry(package.parent, name)
                entry.name = f"{COMPANION}/{name}"
                tar.addfile(entry, BytesIO(data))
        with draft.open("rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
        final = into / f"{sha}.tar.gz"
        draft.replace(final)
    return Archive(final, sha, len(names), total)


def measure(folder: Path, largest: int = LARGEST) -> tuple[int, int]:
    """How many files `pack` would send and their bytes, without writing any; raises CodeError."""
    total, names = 0, _sendable(folder, largest)
    for name in names:
        path = folder / name
        if path.is_symlink():
            _target(folder, name)
        else:
            total += path.stat().st_size
    return len(names), total


def _sendable(folder: Path, largest: int) -> list[str]:
    names = names_of(folder)
    _check_size(folder, names, largest)
    return names


def _entry(folder: Path, name: str) -> tuple[tarfile.TarInfo, bytes]:
    path = folder / name
    entry = tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type, entry.linkname = tarfile.SYMTYPE, _target(folder, name)
        return entry, b""
    data = path.read_bytes()
    entry.size = len(data)
    entry.mode = 0o755 if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else 0o644
    return entry, data


def _target(folder: Path, name: str) -> str:
    """Where a link points, relative to itself; raises CodeError if it leaves the folder."""
    written = os.readlink(folder / name)
    root = os.path.realpath(folder)
    place = os.path.dirname(os.path.join(root, name))
    target = os.path.normpath(os.path.join(place, written))
    if os.path.isabs(written):
        target = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))
    if target != root and not target.startswith(root + os.sep):
        raise CodeError(
            f"code: the link {name} points out of the folder, to {written}; "
            f"replace it by what it points to, or add it to .gitignore"
        )
    return os.path.relpath(target, place)


def _files_of(package: Path) -> list[str]:
    """The files of an installed package, relative to its parent folder."""
    files = (path for path in package.rglob("*") if path.is_file())
    return sorted(
        path.relative_to(package.parent).as_posix()
        for path in files
        if "__pycache__" not in path.parts
    )


def names_of(folder: Path) -> list[str]:
    """The files and links of the code, sorted; raises CodeError."""
    if not folder.is_dir():
        raise CodeError(f"code: {folder} is not a folder")
    names = _git_names(folder)
    if names is None:
        names = list(files_below(folder))
    kept = []
    for name in names:
        path = folder / name
        if ALWAYS & set(PurePosixPath(name).parts) or name.startswith(f"{COMPANION}/"):
            continue
        # git also lists what was deleted but not committed; sockets and pipes cannot be sent.
        if path.is_symlink() or path.is_file():
            kept.append(name)
    return sorted(set(kept))


def _git_names(folder: Path, prefix: str = "") -> list[str] | None:
    """What git would keep; None where the folder is no checkout, or is ignored by it."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0 or not done.stdout:
        return None
    names = []
    for name in os.fsdecode(done.stdout).split("\0"):
        path = folder / name
        if name and path.is_dir() and not path.is_symlink():
            # A submodule, or a checkout inside this one, is listed as a folder.
            inner = _git_names(path, f"{prefix}{name.rstrip('/')}/")
            names += inner or []
        elif name:
            names.append(prefix + name)
    return names


def _check_size(folder: Path, names: list[str], largest: int) -> None:
    sizes: Counter[str] = Counter()
    for name in names:
        size = (folder / name).lstat().st_size
        sizes[name.split("/")[0] if "/" in name else name] += size
    total = sum(sizes.values())
    if total > largest:
        name, size = sizes.most_common(1)[0]
        raise CodeError(
            f"code: {folder} holds {_megabytes(total)}, more than {_megabytes(largest)}; "
            f"the largest part is {name} with {_megabytes(size)}: add it to .gitignore, "
            f"or keep data in a bucket"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
