"""The files of a working folder that belong to the code, before secrets are left out."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from drumline.hosts.packing.rules import CodeError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

ALWAYS_IGNORED = frozenset({".git", ".venv", "__pycache__"})
"""Names that are never part of the code, even if no .gitignore excludes them."""

PACKAGE_FOLDER = ".drumline/python"
"""The folder of the bundled Drumline package in the working copy."""


def skip_nothing(folder: str) -> bool:
    """Return False: enter every folder."""
    del folder
    return False


def list_files(folder: Path, skip: Callable[[str], bool] = skip_nothing) -> list[str]:
    """List the files and links of the code, sorted, as paths relative to the folder.

    Outside a git checkout, folders for which `skip` returns True are not entered. Raises CodeError.
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
        if (ALWAYS_IGNORED | {"..", "/"}) & parts or name.startswith(f"{PACKAGE_FOLDER}/"):
            continue
        # git also lists deleted files that are not committed; sockets and pipes cannot be sent.
        if os.path.islink(path) or os.path.isfile(path) or not _is_enterable(path.parent):
            kept.append(name)
    return sorted(set(kept))


def _is_enterable(folder: Path) -> bool:
    return os.access(folder, os.X_OK)


def _git_names(folder: Path, prefix: str = "") -> list[str] | None:
    """Return the files that git would keep, or None if the folder is not in a checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    listing = subprocess.run(command, capture_output=True, check=False)
    if listing.returncode != 0 or not listing.stdout:
        return None
    names = []
    for name in os.fsdecode(listing.stdout).split("\0"):
        path = folder / name
        if name and path.is_dir() and not path.is_symlink():
            # A submodule, or a checkout inside this one, is listed as a folder.
            inner = _git_names(path, f"{prefix}{name.rstrip('/')}/")
            names += inner or []
        elif name:
            names.append(prefix + name)
    return names


# Outside a git checkout --------------------------------------------------------------------------


def files_below(folder: Path, skip: Callable[[str], bool] = skip_nothing) -> Iterator[str]:
    """Yield files and links that no .gitignore excludes, as paths relative to the folder.

    Folders for which `skip` returns True are not entered.
    """
    yield from _below(folder, "", (), skip)


def _below(
    root: Path,
    inside: str,
    inherited: "tuple[tuple[str, GitIgnoreSpec], ...]",
    skip: Callable[[str], bool],
) -> Iterator[str]:
    """`inherited` has the rules of the parent folders, each with its folder."""
    # Most folders are git checkouts, and the server starts faster without this import.
    from pathspec import GitIgnoreSpec

    folder = root / inside
    gitignore = folder / ".gitignore"
    rules = inherited
    if os.path.isfile(gitignore) and os.access(gitignore, os.R_OK):
        lines = gitignore.read_text(errors="replace").splitlines()
        rules = (*inherited, (inside, GitIgnoreSpec.from_lines(lines)))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # deleted or unreadable; `skip` reports a folder that matters
        return
    for entry in entries:
        path = f"{inside}/{entry.name}" if inside else entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS_IGNORED or _is_ignored(path + "/" if is_folder else path, rules):
            continue
        if is_folder:
            if not skip(path):
                yield from _below(root, path, rules, skip)
        else:
            yield path


def _is_ignored(path: str, rules: "tuple[tuple[str, GitIgnoreSpec], ...]") -> bool:
    # The rule in the deepest folder decides.
    for folder, spec in reversed(rules):
        decision = spec.check_file(path[len(folder) + 1 :] if folder else path).include
        if decision is not None:
            return decision
    return False
