"""Files below ~/.drumline, each replaced in one rename."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


ROOT = os.path.join(os.path.expanduser("~"), ".drumline")


def read_json(*path: str) -> Json | None:
    """The object in a file; None where there is none or it is not whole."""
    try:
        # The program writes some of these: a pipe in its place must not hold us up, and a huge one
        # is cut, and so taken for none.
        number = os.open(os.path.join(*path), os.O_RDONLY | os.O_NONBLOCK)
        with open(number, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return None
            value = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(value: Json, *path: str) -> None:
    """Replace a file in one rename, readable by its owner alone."""
    final = os.path.join(*path)
    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    os.replace(draft, final)


def remove(*path: str) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(*path))


def take_lock(path: str, shared: bool = False) -> int | None:
    """A lock that is held as long as any copy of the descriptor is open; None when taken."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def below_root(name: str) -> str:
    """A folder of ours by the name the server uses for it."""
    path = os.path.normpath(os.path.join(ROOT, name))
    if not path.startswith(ROOT + os.sep):
        raise ValueError(f"{name!r} is not below {ROOT}")
    return path
