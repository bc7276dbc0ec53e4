"""Folders that are not code: Drumline's home, the user's home, checkpoints and mount points."""

import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from drumline.hosts.packing.rules import CodeError

_HOME_MARKS = frozenset(
    {"jobs.db", "owners.json", "server.lock", "server.sock", "known_hosts", "secrets"}
)
_HOME_PARTS = _HOME_MARKS | {"ssh", "code", "logs", "emulator", "server.log", "config.yaml"}
_EMULATOR_PARTS = frozenset({"endpoint.json", "launch.lock", "hosts", "buckets"})
MOUNTS = Path("/proc/self/mountinfo")

Identity = tuple[int, int]
"""The device and the inode of a folder."""


def require_workdir(
    folder: Path, home: Path | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise CodeError if a folder may not be sent as a whole, wherever a link to it lies."""
    above = {"/"}
    for user_home in user_homes(environ):
        real = os.path.realpath(user_home)
        above |= {real, *map(str, Path(real).parents)}
    # By identity too: a bind mount and a file system without case have several names for a folder.
    identities = {identity(path) for path in above} - {None}
    real = os.path.realpath(folder)
    if real in above or identity(real) in identities:
        name = "/" if real == "/" else str(folder)
        holds = "is your home folder" if _is_user_home(real, environ) else "holds home folders"
        if real == "/":
            holds = "is the whole file system"
        raise CodeError(
            f"workdir: {name} {holds}, and everything in it would be sent to the hosts; "
            "put the job file in a folder of its own, or set workdir: to the folder with your code"
        )
    homes = drumline_homes(home, environ)
    for path in (real, *map(str, Path(real).parents)):
        if identity(path) in homes or holds_drumline_home(path):
            raise CodeError(
                f"workdir: {folder} is in Drumline's home {path}, which is never sent because it "
                "holds keys and secrets; put the code in another folder, or set workdir: to it"
            )


def _is_user_home(real: str, environ: Mapping[str, str]) -> bool:
    found = identity(real)
    return any(identity(home) == found for home in user_homes(environ))


def user_homes(environ: Mapping[str, str]) -> Iterator[str]:
    """The user's home folder by the environment and by the system's list of users."""
    named = environ.get("HOME")
    if named and os.path.isabs(named):
        yield named
    try:
        yield pwd.getpwuid(os.getuid()).pw_dir or "/"
    except KeyError:  # a container may run under a user id that has no name
        return


def drumline_homes(home: Path | None, environ: Mapping[str, str]) -> set[Identity]:
    """The identities of Drumline's home folders: in force, by the environment, and by default."""
    named = environ.get("DRUMLINE_HOME")
    paths = [os.path.join(user_home, ".drumline") for user_home in user_homes(environ)]
    paths += [str(home)] if home else []
    paths += [os.path.expanduser(named)] if named else []
    return {found for path in paths if (found := identity(path)) is not None}


def identity(path: str) -> Identity | None:
    """The device and the inode that a path leads to, or None if there is nothing."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def holds_drumline_home(path: str) -> bool:
    """True if a folder on this machine looks like a home of Drumline or of its emulator."""
    try:
        return looks_like_home(set(os.listdir(path)))
    except OSError:
        return False


def looks_like_home(names: Collection[str]) -> bool:
    """True if a folder with these entries is a home of Drumline or of its emulator."""
    entries = {name.casefold() for name in names}
    marks = _HOME_MARKS & entries
    if "launch.lock" in entries and len(_EMULATOR_PARTS & entries) >= 2:
        return True
    if "jobs.db" in marks and len(_HOME_PARTS & entries) >= 2:
        return True
    return len(marks) >= 2 and len(_HOME_PARTS & entries) >= 3


def looks_like_checkpoints(path: str, names: Collection[str]) -> bool:
    """True if a folder on this machine holds the checkpoints of a training."""
    if "drumline" not in names or not os.path.isdir(os.path.join(path, "drumline")):
        return False
    if os.path.isfile(os.path.join(path, "drumline", "lock")):
        return True
    return any(is_checkpoint_step(os.path.join(path, name)) for name in names)


def is_checkpoint_step(path: str) -> bool:
    """True if a folder is one checkpoint that Orbax has committed."""
    name = os.path.basename(path)
    return name.isdecimal() and os.path.isfile(os.path.join(path, "commit_success.txt"))


def mount_points() -> set[str]:
    """The mount points of this machine; none on a system whose kernel does not list them."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return set()
    fields = (line.split(b" ") for line in lines)
    return {_unescaped(line[4]) for line in fields if len(line) > 4}


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))
