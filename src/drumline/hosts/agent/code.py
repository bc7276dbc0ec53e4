"""The user's code: received whole, unpacked in one rename."""

from __future__ import annotations

import contextlib
import os
import sys

from .caller import say
from .system.files import ROOT, below_root, remove
from .wire import Prepared, Received


def receive(sha: str) -> None:
    """Store an archive sent on standard input; one that is cut short leaves nothing."""
    import hashlib

    folder = os.path.join(ROOT, "code")
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f"{sha}.{os.getpid()}.draft")
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
            raise ValueError("the code arrived damaged or cut short")
        os.replace(draft, below_root(os.path.join("code", sha + ".tar.gz")))
    finally:
        remove(draft)
    say(Received(received=True))


def unpack(sha: str, work: str) -> None:
    """Unpack an archive that was received."""
    say(Prepared(have_code=unpacked(sha, work)))


def unpacked(sha: str, work: str) -> bool:
    """Unpack an archive into a working copy, all of it or nothing; False if it is not here."""
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
                good = target.startswith(draft + os.sep) and (member.isreg() or member.issym())
                if member.issym():
                    good = good and (link + os.sep).startswith(draft + os.sep)
                if not good:
                    raise ValueError(f"{member.name!r} leads out of the working copy")
                tar.extract(member, draft)
        os.makedirs(draft, exist_ok=True)
        with contextlib.suppress(OSError):
            os.rename(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return os.path.isdir(final)
