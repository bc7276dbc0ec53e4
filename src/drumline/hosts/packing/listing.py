"""The files of a working folder that belong to the code, before secrets are left out."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from drumline.hosts.packing.rules import CodeError, printable

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    _Rules = tuple[tuple[str, GitIgnoreSpec], ...]

ALWAYS_IGNORED = frozenset({".git", ".venv", "__pycache__"})
"""Names that are never part of the code, even if no .gitignore excludes them."""

IGNORE_FILE = ".drumlineignore"
"""A file with patterns like those of a .gitignore, which also exclude files that git tracks."""

DEFAULT_IGNORES = (
    "venv/", "node_modules/", ".cache/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/",
    ".hypothesis/", ".ipynb_checkpoints/", ".tox/", ".nox/", ".DS_Store",
)  # fmt: skip
"""Environments and caches. A line `!venv/` in a `.drumlineignore` sends them."""

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
    ignored = _IgnoreFiles(folder)
    names = _git_names(folder)
    if names is None:
        names = list(files_below(folder, lambda path: skip(path) or ignored.has_folder(path)))
    kept = []
    for name in names:
        path = folder / name
        parts = set(PurePosixPath(name).parts)
        if (ALWAYS_IGNORED | {"..", "/"}) & parts or name.startswith(f"{PACKAGE_FOLDER}/"):
            continue
        if ignored.has_file(name):
            continue
        # git also lists deleted files that are not committed; sockets and pipes cannot be sent.
        if os.path.islink(path) or os.path.isfile(path) or not _is_enterable(path.parent):
            kept.append(name)
    return sorted(set(kept))


class _IgnoreFiles:
    """The default ignores and every `.drumlineignore` of a working folder."""

    def __init__(self, root: Path) -> None:
        from pathspec import GitIgnoreSpec

        self._root = root
        defaults: _Rules = (("", GitIgnoreSpec.from_lines(DEFAULT_IGNORES)),)
        self._rules = {"": _add_rules(defaults, "", root / IGNORE_FILE)}
        self._folders = {"": False}

    def has_file(self, path: str) -> bool:
        """Return True if a file, or a folder above it, is ignored."""
        folder = path.rpartition("/")[0]
        return self.has_folder(folder) or _is_ignored(path, self._rules_in(folder))

    def has_folder(self, folder: str) -> bool:
        """Return True if a folder, or one above it, is ignored."""
        if folder not in self._folders:
            above = folder.rpartition("/")[0]
            self._folders[folder] = self.has_folder(above) or _is_ignored(
                f"{folder}/", self._rules_in(above)
            )
        return self._folders[folder]

    def _rules_in(self, folder: str) -> "_Rules":
        if folder not in self._rules:
            above = self._rules_in(folder.rpartition("/")[0])
            self._rules[folder] = _add_rules(above, folder, self._root / folder / IGNORE_FILE)
        return self._rules[folder]


def _is_enterable(folder: Path) -> bool:
    return os.access(folder, os.X_OK)


def _git_names(folder: Path, prefix: str = "") -> list[str] | None:
    """Return the files that git would keep.

    None if the folder is not in a checkout, or ignored as a whole, or if git refuses the checkout,
    as it does if another user owns it.
    """
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


# Without git -------------------------------------------------------------------------------------


def files_below(folder: Path, skip: Callable[[str], bool] = skip_nothing) -> Iterator[str]:
    """Yield files and links that no .gitignore excludes, as paths relative to the folder.

    Folders for which `skip` returns True are not entered. In a checkout that git cannot list, the
    .gitignore files above the folder count, too.
    """
    folder = Path(os.path.realpath(folder))
    above = (folder, *folder.parents)
    top = next((path for path in above if os.path.exists(path / ".git")), folder)
    inside = "" if top == folder else folder.relative_to(top).as_posix()
    prefix = f"{inside}/" if inside else ""
    for path in _below(
        top, inside, _rules_above(top, inside), lambda path: skip(path.removeprefix(prefix))
    ):
        yield path.removeprefix(prefix)


def _rules_above(top: Path, inside: str) -> "_Rules":
    """Return the rules of a checkout for one of its folders, without those in the folder itself.

    If they exclude the folder as a whole, none of them counts.
    """
    rules = _add_rules((), "", top / ".git" / "info" / "exclude")
    parent = ""
    for name in inside.split("/") if inside else ():
        rules = _add_rules(rules, parent, top / parent / ".gitignore")
        parent = f"{parent}/{name}" if parent else name
        if _is_ignored(f"{parent}/", rules):
            return ()
    return rules


def _add_rules(rules: "_Rules", folder: str, file: Path) -> "_Rules":
    """Add the rules of a file that is for everything in a folder. It may not exist."""
    # Most folders are git checkouts, and the server starts faster without this import.
    from pathspec import GitIgnoreSpec

    if not (os.path.isfile(file) and os.access(file, os.R_OK)):
        return rules
    lines = file.read_text(errors="replace").splitlines()
    try:
        spec = GitIgnoreSpec.from_lines(lines)
    except (ValueError, re.error):
        spec = GitIgnoreSpec.from_lines(_valid_patterns(lines, folder, file))
    return (*rules, (folder, spec))


def _valid_patterns(lines: list[str], folder: str, file: Path) -> Iterator[str]:
    """Yield the valid patterns of a .gitignore, because git ignores the others.

    Raises CodeError for a `.drumlineignore`, whose user expects that the files are not sent.
    """
    from pathspec import GitIgnoreSpec

    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except (ValueError, re.error):
            if file.name == IGNORE_FILE:
                name = printable(os.path.join(folder, IGNORE_FILE))
                reason = f"{printable(line)} is not a valid pattern"
                raise CodeError(f"code: {name}:{number}  {reason}; correct or remove it") from None
        else:
            yield line


def _below(
    root: Path,
    inside: str,
    inherited: "_Rules",
    skip: Callable[[str], bool],
) -> Iterator[str]:
    """`inherited` has the rules of the parent folders, each with its folder."""
    folder = root / inside
    rules = _add_rules(inherited, inside, folder / ".gitignore")
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


def _is_ignored(path: str, rules: "_Rules") -> bool:
    # The rule in the deepest folder decides.
    for folder, spec in reversed(rules):
        decision = spec.check_file(path[len(folder) + 1 :] if folder else path).include
        if decision is not None:
            return decision
    return False
