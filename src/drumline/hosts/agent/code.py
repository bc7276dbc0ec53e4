"""The user's code: received file by file, each completely or not at all, and unpacked by a rename.

Received files are kept for later jobs on this host, within limits. Every job gets copies of them,
so a program that writes to its files does not change those of another job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time

from .files import CACHE, below_root, open_file, remove
from .wire import (
    LARGE_FILE_KEY,
    Code,
    CodeResult,
    ReceiveResult,
    archive_name,
    large_file_name,
    receive_message,
    send,
)

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Iterator
    from tarfile import TarInfo

FOLDER = os.path.join(CACHE, "code")
MAX_BYTES = 5 * 10**9
"""The size of all received files from which the oldest files are removed."""
MAX_AGE_SECONDS = 7 * 86400.0
UNPACKED = ".files.json"
"""The end of the name of the file, beside a working copy, with the files of the code."""
MAX_UNPACKED_BYTES = 1 << 26
IN_USE_SECONDS = 600.0
"""The time after its last use in which a file is only removed if the disk is full."""


def receive(name: str, size: str) -> None:
    """Store a file of the code from standard input. An incomplete one leaves no file."""
    os.makedirs(FOLDER, mode=0o700, exist_ok=True)
    prune(MAX_BYTES - int(size))
    draft = os.path.join(FOLDER, f"{os.path.basename(name)}.{os.getpid()}.draft")
    received = 0
    try:
        with explain_full_disk(), open(draft, "wb") as file:
            while True:
                data = sys.stdin.buffer.read(1 << 20)
                if not data:
                    break
                received += len(data)
                file.write(data)
        if received != int(size):
            raise ValueError("a file of the code arrived incomplete")
        os.replace(draft, os.path.join(FOLDER, os.path.basename(name)))
    finally:
        remove(draft)
    send(ReceiveResult(received=True))


def unpack() -> None:
    """Unpack code whose files were received."""
    code = receive_message(Code)
    missing = unpack_code(code.archive, code.large_files, code.work)
    send(CodeResult(have_code=not missing, missing=missing))


def unpack_code(archive: str, large_files: list[str], work: str) -> tuple[str, ...]:
    """Unpack code into a working copy atomically. Return the files that are missing or damaged."""
    final = below_root(work)
    if os.path.isdir(final):
        return ()
    names = [archive_name(archive), *map(large_file_name, large_files)]
    missing = tuple(name for name in names if not mark_used(name))
    if missing:
        return missing
    import shutil

    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    try:
        with explain_full_disk():
            damaged = extract(names[0], draft)
        if damaged:
            return damaged
        os.makedirs(draft, exist_ok=True)
        write_unpacked_files(draft, final)
        with contextlib.suppress(OSError):
            os.rename(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not os.path.isdir(final):
        raise FileNotFoundError(f"{final} could not be created")
    return ()


def write_unpacked_files(draft: str, final: str) -> None:
    """Record the size and timestamp of the files of the code, to detect later changes."""
    import json

    files = {}
    for folder, _, names in os.walk(draft):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            files[os.path.relpath(path, draft)] = [status.st_size, status.st_mtime_ns]
    with explain_full_disk(), open(final + UNPACKED, "w") as file:
        json.dump(files, file)


def unpacked_files(work: str) -> dict[str, list[int]]:
    """Return the size and time with which the files of a working copy were unpacked."""
    import json

    try:
        with open_file(work + UNPACKED) as file:
            files = json.loads(file.read(MAX_UNPACKED_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return files if isinstance(files, dict) else {}


def extract(name: str, folder: str) -> tuple[str, ...]:
    """Extract an archive and its large files. Remove damaged files and return their names."""
    import gzip
    import tarfile
    import zlib

    damaged = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError)
    names = set()
    try:
        with tarfile.open(os.path.join(FOLDER, name)) as tar:
            members = tar.getmembers()
            for member in members:
                require_inside(folder, member)
                large = member.pax_headers.get(LARGE_FILE_KEY)
                if large is None:
                    tar.extract(member, folder)
                    continue
                target = os.path.join(folder, member.name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                large_name = large_file_name(os.path.basename(large))
                try:
                    copy_large_file(large_name, target, large)
                except damaged:
                    names.add(large_name)
                    continue
                os.chmod(target, member.mode)
                os.utime(target, (member.mtime, member.mtime))
            # The checksum of an archive is at its end.
            while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                pass
    except damaged:
        names.add(name)
    for damaged_name in names:
        remove(FOLDER, damaged_name)
    return tuple(sorted(names))


def require_inside(folder: str, member: TarInfo) -> None:
    """Raise ValueError for a member of an archive that is, or points, outside a folder."""
    target = os.path.normpath(os.path.join(folder, member.name))
    link = os.path.normpath(os.path.join(os.path.dirname(target), member.linkname))
    inside = target.startswith(folder + os.sep) and (member.isreg() or member.issym())
    if member.issym():
        inside = inside and (link + os.sep).startswith(folder + os.sep)
    if not inside:
        raise ValueError(f"{member.name!r} points outside the working copy")


def copy_large_file(name: str, target: str, sha: str) -> None:
    """Write the content of a large file. Raise EOFError if it does not have this hash."""
    import gzip
    import hashlib

    digest = hashlib.sha256()
    with gzip.open(os.path.join(FOLDER, name)) as file, open(target, "wb") as copy:
        while True:
            data = file.read(1 << 20)
            if not data:
                break
            digest.update(data)
            copy.write(data)
    if digest.hexdigest() != sha:
        raise EOFError(f"{name} is damaged")


# The received files ------------------------------------------------------------------------------


def mark_used(name: str) -> bool:
    """Record the use of a file for `prune`. Return False if the host does not have it."""
    try:
        os.utime(os.path.join(FOLDER, name))
    except OSError:
        return False
    return True


def prune(max_bytes: int, in_use_seconds: float = IN_USE_SECONDS) -> None:
    """Remove old files, and the least recently used files beyond `max_bytes`.

    A file that another job is about to unpack may be removed if the disk is full. Its server then
    sends it again.
    """
    now, files = time.time(), []
    with contextlib.suppress(OSError):
        for entry in os.scandir(FOLDER):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, entry.name))
    total = 0
    for used_at, size, name in sorted(files, reverse=True):
        total += size
        age = now - used_at
        if age > in_use_seconds and (age > MAX_AGE_SECONDS or total > max_bytes):
            remove(FOLDER, name)


@contextlib.contextmanager
def explain_full_disk() -> Iterator[None]:
    """Empty the cache and exit with a message if the disk is full. The server retries."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        prune(0, float("-inf"))
        sys.exit("the disk of the host is full: the files of the code do not fit")
