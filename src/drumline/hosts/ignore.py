"""The rules of .gitignore files, for folders that are not a git checkout."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

ALWAYS = frozenset({".git", ".venv", "__pycache__"})
"""Names that are never part of the code, whatever a .gitignore says."""


def files_below(folder: Path) -> Iterator[str]:
    """Files and links that no .gitignore excludes, as paths relative to the folder."""
    yield from _below(folder, "", ())


def _below(
    root: Path, inside: str, above: "tuple[tuple[str, GitIgnoreSpec], ...]"
) -> Iterator[str]:
    """`above` has the rules of this folder's parents, each with the folder that they are in."""
    # Imported here, because most folders are checkouts, and the server starts faster without it.
    from pathspec import GitIgnoreSpec

    here = root / inside
    own = here / ".gitignore"
    known = above
    if own.is_file():
        lines = own.read_text(errors="replace").splitlines()
        known = (*above, (inside, GitIgnoreSpec.from_lines(lines)))
    for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
        path = f"{inside}/{entry.name}" if inside else entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS or _ignored(path + "/" if is_folder else path, known):
            continue
        if is_folder:
            yield from _below(root, path, known)
        else:
            yield path


def _ignored(path: str, known: "tuple[tuple[str, GitIgnoreSpec], ...]") -> bool:
    # The deepest file that has a rule for a path decides.
    for folder, rules in reversed(known):
        said = rules.check_file(path[len(folder) + 1 :] if folder else path).include
        if said is not None:
            return said
    return False
