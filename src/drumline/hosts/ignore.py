"""The rules of .gitignore files, for folders that are not a git checkout."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

ALWAYS = frozenset({".git", ".venv", "__pycache__"})
"""Names that are never part of the code, whatever a .gitignore says."""


def skip_nothing(folder: str) -> bool:
    """Enter every folder."""
    del folder
    return False


def files_below(folder: Path, skip: Callable[[str], bool] = skip_nothing) -> Iterator[str]:
    """Yield files and links that no .gitignore excludes, as paths relative to the folder.

    `skip` is asked about each folder before it is entered.
    """
    yield from _below(folder, "", (), skip)


def _below(
    root: Path,
    inside: str,
    above: "tuple[tuple[str, GitIgnoreSpec], ...]",
    skip: Callable[[str], bool],
) -> Iterator[str]:
    """`above` has the rules of this folder's parents, each with the folder that they are in."""
    # Imported here, because most folders are checkouts, and the server starts faster without it.
    from pathspec import GitIgnoreSpec

    here = root / inside
    own = here / ".gitignore"
    known = above
    if os.path.isfile(own) and os.access(own, os.R_OK):
        lines = own.read_text(errors="replace").splitlines()
        known = (*above, (inside, GitIgnoreSpec.from_lines(lines)))
    try:
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
    except OSError:  # it is gone, or may not be read; `skip` says so where it matters
        return
    for entry in entries:
        path = f"{inside}/{entry.name}" if inside else entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS or _ignored(path + "/" if is_folder else path, known):
            continue
        if is_folder:
            if not skip(path):
                yield from _below(root, path, known, skip)
        else:
            yield path


def _ignored(path: str, known: "tuple[tuple[str, GitIgnoreSpec], ...]") -> bool:
    # The deepest file that has a rule for a path decides.
    for folder, rules in reversed(known):
        said = rules.check_file(path[len(folder) + 1 :] if folder else path).include
        if said is not None:
            return said
    return False
