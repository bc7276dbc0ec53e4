"""The archives of the user's code: received completely or not at all, unpacked by a rename."""

from __future__ import annotations

import contextlib
import os
import sys

from .files import ROOT, below_root, remove
from .wire import PrepareResult, ReceiveResult, send


def receive(name: str, sha: str) -> None:
    """Store an archive from standard input. An incomplete one leaves no file.

    `sha` is the hash of its bytes. Its name is the hash of its content without the times of files.
    """
    import hashlib

    folder = os.path.join(ROOT, "code")
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f"{name}.{os.getpid()}.draft")
    digest = hashlib.sha256()
    try:
        with open(draft, "wb") as file:
            while True:
                data = sys.stdin.buffer.read(1 << 20)
                if not data:
                    break
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != sha:
            raise ValueError("the archive of the code arrived damaged or incomplete")
        os.replace(draft, below_root(os.path.join("code", name + ".tar.gz")))
    finally:
        remove(draft)
    send(ReceiveResult(received=True))


def unpack(sha: str, work: str) -> None:
    """Unpack an archive that was received."""
    send(PrepareResult(have_code=unpack_archive(sha, work)))


def unpack_archive(sha: str, work: str) -> bool:
    """Unpack an archive into a working copy atomically. Return False without an archive."""
    final = below_root(work)
    archive = below_root(os.path.join("code", sha + ".tar.gz"))
    if os.path.isdir(final):
        return True
    if not os.path.exists(archive):
        return False
    import shutil
    import tarfile

    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    try:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                target = os.path.normpath(os.path.join(draft, member.name))
                link = os.path.normpath(os.path.join(os.path.dirname(target), member.linkname))
                inside = target.startswith(draft + os.sep) and (member.isreg() or member.issym())
                if member.issym():
                    inside = inside and (link + os.sep).startswith(draft + os.sep)
                if not inside:
                    raise ValueError(f"{member.name!r} points outside the working copy")
                tar.extract(member, draft)
        os.makedirs(draft, exist_ok=True)
        with contextlib.suppress(OSError):
            os.rename(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return os.path.isdir(final)
