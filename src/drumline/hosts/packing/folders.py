"""Folders that are not code: Drumline's home, the user's home, checkpoints and mount points.

`FolderRules` decides about the folders below one working folder.
"""

import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drumline.hosts.packing.names import secret_folder
from drumline.hosts.packing.rules import CodeError, LeftOut, PackingRules

_HOME_MARKS = frozenset(
    {"jobs.db", "owners.json", "server.lock", "server.sock", "known_hosts", "secrets"}
)
_HOME_ENTRIES = _HOME_MARKS | {"ssh", "code", "logs", "emulator", "server.log", "config.yaml"}
_EMULATOR_ENTRIES = frozenset({"endpoint.json", "launch.lock", "hosts", "buckets"})
_JOB_CHECKPOINTS = re.compile(r"[0-9a-f]{8}-\d{6,}")
"""The name of a job's own folder below `checkpoint` (jobs/store/specs.py)."""
_OLD_JOB_CHECKPOINTS = re.compile(r"\d{6,}")
"""The same in version 0.1, where other folders may have such a name, too."""
_DATE_AND_TIME = re.compile(r"20\d{6}-\d{6}")
"""The form `20261119-143000`, which many programs give to their folders."""
MOUNTS = Path("/proc/self/mountinfo")
DRUMLINE_HOME = "Drumline's home"
MOUNT = "mount point"
OWN_CHECKPOINT = "checkpoints of this job file"

Identity = tuple[int, int]
"""The device and the inode of a folder."""


def require_workdir(
    folder: Path, home: Path | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise CodeError if a folder must not be sent as a whole. Links are resolved first."""
    above = {"/"}
    for user_home in user_homes(environ):
        real = os.path.realpath(user_home)
        above |= {real, *map(str, Path(real).parents)}
    # By identity too: a bind mount and a file system without case have several names for a folder.
    identities = {identity(path) for path in above} - {None}
    real = os.path.realpath(folder)
    if real in above or identity(real) in identities:
        name = "/" if real == "/" else str(folder)
        problem = "is your home folder" if _is_user_home(real, environ) else "holds home folders"
        if real == "/":
            problem = "is the whole file system"
        raise CodeError(
            f"workdir: {name} {problem}, and everything in it would be sent to the hosts; "
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
    folder = identity(real)
    return any(identity(home) == folder for home in user_homes(environ))


def user_homes(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the user's home folder from the environment and from the system's list of users."""
    named = environ.get("HOME")
    if named and os.path.isabs(named):
        yield named
    try:
        yield pwd.getpwuid(os.getuid()).pw_dir or "/"
    except KeyError:  # a container may run under a user id that has no name
        return


def drumline_homes(home: Path | None, environ: Mapping[str, str]) -> set[Identity]:
    """Return the identities of Drumline's homes: the current, the environment's, the default."""
    named = environ.get("DRUMLINE_HOME")
    paths = [os.path.join(user_home, ".drumline") for user_home in user_homes(environ)]
    paths += [str(home)] if home else []
    paths += [os.path.expanduser(named)] if named else []
    return {folder for path in paths if (folder := identity(path)) is not None}


def identity(path: str) -> Identity | None:
    """Return the device and the inode of a path, or None if it does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def holds_drumline_home(path: str) -> bool:
    """Return True if a folder on this machine looks like a home of Drumline or its emulator."""
    try:
        return looks_like_home(set(os.listdir(path)))
    except OSError:
        return False


def looks_like_home(names: Collection[str]) -> bool:
    """Return True if a folder with these entries is a home of Drumline or its emulator."""
    entries = {name.casefold() for name in names}
    marks = _HOME_MARKS & entries
    if "launch.lock" in entries and len(_EMULATOR_ENTRIES & entries) >= 2:
        return True
    if "jobs.db" in marks and len(_HOME_ENTRIES & entries) >= 2:
        return True
    return len(marks) >= 2 and len(_HOME_ENTRIES & entries) >= 3


def looks_like_checkpoints(path: str, names: Collection[str]) -> bool:
    """Return True if a folder on this machine holds the checkpoints of a training."""
    if "drumline" not in names or not os.path.isdir(os.path.join(path, "drumline")):
        return False
    if os.path.isfile(os.path.join(path, "drumline", "lock")):
        return True
    return any(is_checkpoint_step(os.path.join(path, name)) for name in names)


def is_checkpoint_step(path: str) -> bool:
    """Return True if a folder is a checkpoint that Orbax has committed."""
    name = os.path.basename(path)
    return name.isdecimal() and os.path.isfile(os.path.join(path, "commit_success.txt"))


def mount_points() -> set[str]:
    """Return the mount points of this machine, as far as its kernel lists them."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return set()
    fields = (line.split(b" ") for line in lines)
    return {_unescape(line[4]) for line in fields if len(line) > 4}


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


@dataclass(frozen=True)
class FolderVerdict:
    """The reason why nothing in a folder is sent."""

    left_out: LeftOut
    overridable: bool
    """True if the job file may name single files in it."""


class FolderRules:
    """Decides for each folder below a working folder if it is left out as a whole."""

    def __init__(self, root: str, rules: PackingRules) -> None:
        """`root` is the working folder without links in its path."""
        self._root = root
        self._rules = rules
        self._homes = drumline_homes(rules.home, rules.environ)
        self._mounts = self._folders_to_mount() | mount_points()
        self._checkpoint = self._own_checkpoint()
        self._home_verdicts: dict[str, bool] = {}
        self._verdicts: dict[str, FolderVerdict | None] = {}

    def is_drumline_home(self, path: str) -> bool:
        """Return True for Drumline's home and for any folder that looks like one."""
        if path not in self._home_verdicts:
            self._home_verdicts[path] = identity(path) in self._homes or holds_drumline_home(path)
        return self._home_verdicts[path]

    def is_own_checkpoint(self, path: str) -> bool:
        """Return True for the job's checkpoint folder and everything in it."""
        return self._checkpoint is not None and f"{path}/".startswith(f"{self._checkpoint}/")

    def is_mount(self, path: str) -> bool:
        """Return True if a file system is mounted at a path, on this machine or on the hosts."""
        return path in self._mounts

    def verdict(self, folder: str) -> FolderVerdict | None:
        """Return the reason why a folder is left out, its own or that of a folder above it."""
        if folder in self._verdicts:
            return self._verdicts[folder]
        above = folder.rpartition("/")[0]
        verdict = self.verdict(above) if folder else None
        if verdict is None or verdict.overridable:
            verdict = self._own_verdict(folder) or verdict
        self._verdicts[folder] = verdict
        return verdict

    def _own_verdict(self, folder: str) -> FolderVerdict | None:
        if not folder:
            return None
        path = os.path.join(self._root, folder)

        def left_out(reason: str, *, overridable: bool = False) -> FolderVerdict:
            return FolderVerdict(LeftOut(f"{folder}/", reason), overridable)

        if identity(path) in self._homes:
            return left_out(DRUMLINE_HOME)
        try:
            names = set(os.listdir(path))
        except OSError:
            names = set()
        if looks_like_home(names):
            return left_out(DRUMLINE_HOME)
        if path in self._mounts:
            return left_out(MOUNT)
        if self._is_own_checkpoint(folder, path):
            return left_out(OWN_CHECKPOINT)
        if folder not in self._rules.include and self._is_checkpoints(folder, path, names):
            return left_out("checkpoints")
        if reason := secret_folder(folder.split("/")):
            return left_out(reason, overridable=True)
        return None

    def _is_own_checkpoint(self, folder: str, path: str) -> bool:
        if self._checkpoint is None:
            return False
        if self._checkpoint == self._root:  # each job has its own folder in it
            return any(form.fullmatch(folder) for form in (_JOB_CHECKPOINTS, _OLD_JOB_CHECKPOINTS))
        return path == self._checkpoint

    def _is_checkpoints(self, folder: str, path: str, names: set[str]) -> bool:
        name = os.path.basename(folder)
        if _JOB_CHECKPOINTS.fullmatch(name) and not _DATE_AND_TIME.fullmatch(name):
            return True
        if looks_like_checkpoints(path, names):
            return True
        # A program that trains in the working folder itself leaves its checkpoints there.
        if "/" in folder or not looks_like_checkpoints(self._root, set(os.listdir(self._root))):
            return False
        return is_checkpoint_step(path) or (
            folder == "drumline" and os.path.isfile(os.path.join(path, "lock"))
        )

    def _own_checkpoint(self) -> str | None:
        written = self._rules.checkpoint
        return None if written is None or "://" in written else self._local_path(written)

    def _folders_to_mount(self) -> set[str]:
        return {self._local_path(path) for path in self._rules.mounts}

    def _local_path(self, path: str) -> str:
        """Return the path on this machine for a path in the job file."""
        if path.startswith("~/"):
            path = os.path.join(self._rules.environ.get("HOME", "/"), path[2:])
        return os.path.realpath(path)

    @cached_property
    def files_of_homes(self) -> set[Identity]:
        """The identities of the files in Drumline's homes that hold keys, secrets and records."""
        files = set()
        for home in self._home_paths():
            for part in ("", "ssh", "secrets", "known_hosts", "code", "emulator"):
                folder = os.path.join(home, part)
                for name in _entries(folder):
                    if file := identity(os.path.join(folder, name)):
                        files.add(file)
        return files

    def _home_paths(self) -> Iterator[str]:
        environ = self._rules.environ
        for user_home in user_homes(environ):
            yield os.path.join(user_home, ".drumline")
        if self._rules.home:
            yield str(self._rules.home)
        if named := environ.get("DRUMLINE_HOME"):
            yield os.path.expanduser(named)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
