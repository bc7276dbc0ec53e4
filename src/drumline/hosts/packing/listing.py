"""The files of a working folder that belong to the code, before secrets are left out."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from drumline.hosts.ignore import ALWAYS, files_below, skip_nothing
from drumline.hosts.packing.rules import CodeError

PACKAGE_FOLDER = ".drumline/python"
"""The folder of Drumline's own package in the working copy, if it is sent along."""


def list_files(folder: Path, skip: Callable[[str], bool] = skip_nothing) -> list[str]:
    """List the files and links of the code, sorted, as paths relative to the folder.

    `skip` is asked about a folder before it is entered, where no git lists the files. Raises
    CodeError.
    """
    if not folder.is_dir():
        raise CodeError(f"code: {folder} is not a folder")
    names = _git_names(folder)
    if names is None:
        names = list(files_below(folder, skip))
    kept = []
    for name in names:
        path = folder / name
        parts = set(PurePosixPath(name).parts)
        if (ALWAYS | {"..", "/"}) & parts or name.startswith(f"{PACKAGE_FOLDER}/"):
            continue
        # git also lists what was deleted but not committed; sockets and pipes cannot be sent.
        if os.path.islink(path) or os.path.isfile(path) or not _can_be_entered(path.parent):
            kept.append(name)
    return sorted(set(kept))


def _can_be_entered(folder: Path) -> bool:
    return os.access(folder, os.X_OK)


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
