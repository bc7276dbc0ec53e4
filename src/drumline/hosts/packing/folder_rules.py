"""Which folders of one working folder are left out as a whole, and why."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from drumline.hosts.packing import folders
from drumline.hosts.packing.names import secret_folder
from drumline.hosts.packing.rules import LeftOut, PackingRules

DRUMLINE_HOME = "Drumline's home"
MOUNT = "mount point"
OWN_CHECKPOINT = "checkpoints of this job file"


@dataclass(frozen=True)
class FolderVerdict:
    """Why nothing in a folder is sent."""

    left_out: LeftOut
    overridable: bool
    """True if the job file may name single files in it."""


class FolderRules:
    """Decides about the folders below one working folder, each of them once."""

    def __init__(self, root: str, rules: PackingRules) -> None:
        """`root` is the working folder without links in its path."""
        self._root = root
        self._rules = rules
        self._homes = folders.drumline_homes(rules.home, rules.environ)
        self._mounts = self._folders_to_mount() | folders.mount_points()
        self._checkpoint = self._own_checkpoint()
        self._known_homes: dict[str, bool] = {}
        self._verdicts: dict[str, FolderVerdict | None] = {}

    def is_drumline_home(self, path: str) -> bool:
        """True for Drumline's own home and for every folder that looks like one."""
        if path not in self._known_homes:
            self._known_homes[path] = folders.identity(
                path
            ) in self._homes or folders.holds_drumline_home(path)
        return self._known_homes[path]

    def is_own_checkpoint(self, path: str) -> bool:
        """True for the job's checkpoint folder and everything in it."""
        return self._checkpoint is not None and f"{path}/".startswith(f"{self._checkpoint}/")

    def is_mount(self, path: str) -> bool:
        """True if something is mounted there, here or on the hosts."""
        return path in self._mounts

    def verdict(self, folder: str) -> FolderVerdict | None:
        """Why nothing in a folder is sent, by its own kind or by that of a folder above it."""
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

        def because(reason: str, *, overridable: bool = False) -> FolderVerdict:
            return FolderVerdict(LeftOut(f"{folder}/", reason), overridable)

        if folders.identity(path) in self._homes:
            return because(DRUMLINE_HOME)
        try:
            names = set(os.listdir(path))
        except OSError:
            names = set()
        if folders.looks_like_home(names):
            return because(DRUMLINE_HOME)
        if path in self._mounts:
            return because(MOUNT)
        if self._is_own_checkpoint(folder, path):
            return because(OWN_CHECKPOINT)
        if folder not in self._rules.include and self._is_checkpoints(folder, path, names):
            return because("checkpoints")
        if reason := secret_folder(folder.split("/")):
            return because(reason, overridable=True)
        return None

    def _is_own_checkpoint(self, folder: str, path: str) -> bool:
        if self._checkpoint is None:
            return False
        if self._checkpoint == self._root:  # each job has a folder of its own in it
            return "/" not in folder and len(folder) >= 6 and folder.isdecimal()
        return path == self._checkpoint

    def _is_checkpoints(self, folder: str, path: str, names: set[str]) -> bool:
        if folders.looks_like_checkpoints(path, names):
            return True
        # A program that trains in the working folder itself leaves its checkpoints there.
        if "/" in folder or not folders.looks_like_checkpoints(
            self._root, set(os.listdir(self._root))
        ):
            return False
        return folders.is_checkpoint_step(path) or (
            folder == "drumline" and os.path.isfile(os.path.join(path, "lock"))
        )

    def _own_checkpoint(self) -> str | None:
        written = self._rules.checkpoint
        return None if written is None or "://" in written else self._local_path(written)

    def _folders_to_mount(self) -> set[str]:
        return {self._local_path(path) for path in self._rules.mounts}

    def _local_path(self, path: str) -> str:
        """A folder of the job file, as the same path on this machine."""
        if path.startswith("~/"):
            path = os.path.join(self._rules.environ.get("HOME", "/"), path[2:])
        return os.path.realpath(path)

    @cached_property
    def files_of_homes(self) -> set[folders.Identity]:
        """The identities of the files in Drumline's homes that hold keys, secrets and records."""
        files = set()
        for home in self._home_paths():
            for part in ("", "ssh", "secrets", "known_hosts", "code", "emulator"):
                folder = os.path.join(home, part)
                for name in _entries(folder):
                    if found := folders.identity(os.path.join(folder, name)):
                        files.add(found)
        return files

    def _home_paths(self) -> Iterator[str]:
        environ = self._rules.environ
        for user_home in folders.user_homes(environ):
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
