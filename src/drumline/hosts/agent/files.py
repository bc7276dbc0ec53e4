"""Files below ~/.drumline, each replaced by a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    Json = dict[str, Any]


ROOT = os.path.join(os.path.expanduser("~"), ".drumline")
CACHE = os.environ.get("DRUMLINE_CACHE") or ROOT
"""The folder of files that later jobs reuse. All emulated hosts of a machine share it."""


def open_file(*path: str) -> BinaryIO:
    """Open a regular file for reading. Raise OSError for anything else.

    The program writes some of the agent's files. A named pipe in place of a file must not block the
    agent, and a device must not be opened.
    """
    name = os.path.join(*path)
    if not stat.S_ISREG(os.stat(name).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return open(descriptor, "rb")


def read_json(*path: str) -> Json | None:
    """Return the JSON object in a file, or None if there is none or it is invalid."""
    try:
        with open_file(*path) as file:
            # A huge file is truncated, which makes it invalid.
            value = json.loads(file.read(1 << 20).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def append(data: bytes, *path: str) -> None:
    """Append to a regular file. Raise OSError for anything else."""
    name = os.path.join(*path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    with open(os.open(name, flags, 0o600), "ab") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        file.write(data)


def write_json(value: Json, *path: str) -> None:
    """Replace a file atomically. Only its owner can read it."""
    final = os.path.join(*path)
    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    try:
        os.replace(draft, final)
    except IsADirectoryError:
        _remove_folder(final)
        os.replace(draft, final)


def _remove_folder(path: str) -> None:
    """Remove a folder that the program has put in the place of a file of the agent."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def remove(*path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(*path))


def acquire_lock(path: str, shared: bool = False) -> int | None:
    """Return the descriptor of a locked file, or None if another process holds the lock.

    The lock lasts until every copy of the descriptor is closed.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except IsADirectoryError:
        _remove_folder(path)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def below_root(name: str) -> str:
    """Return the absolute path of a name from the server. It must be below ~/.drumline."""
    path = os.path.normpath(os.path.join(ROOT, name))
    if not path.startswith(ROOT + os.sep):
        raise ValueError(f"{name!r} is not below {ROOT}")
    return path
