"""What .gitignore files leave out, for folders that are no git checkout."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ALWAYS = frozenset({".git", ".venv", "__pycache__"})
"""Never part of the code, whatever a .gitignore says."""


@dataclass(frozen=True)
class Rule:
    """One line of a .gitignore: matches paths relative to the folder that holds the file."""

    pattern: re.Pattern[str]
    folders_only: bool
    takes_back: bool


def rules(text: str) -> tuple[Rule, ...]:
    """The rules of one .gitignore."""
    found = []
    for raw in text.splitlines():
        line = re.sub(r"(?<!\\)[ \t]+$", "", raw)
        if not line or line.startswith("#"):
            continue
        takes_back = line.startswith("!")
        line = line[1:] if takes_back else line
        folders_only = line.endswith("/")
        line = line.rstrip("/")
        # A slash at the beginning or in the middle ties the pattern to this folder.
        tied = "/" in line
        line = line.lstrip("/")
        if line:
            pattern = ("" if tied else "(?:.*/)?") + _expression(line)
            found.append(Rule(re.compile(pattern, re.DOTALL), folders_only, takes_back))
    return tuple(found)


def _expression(glob: str) -> str:
    """A regular expression for one pattern. `**` crosses folders, `*` and `?` do not."""
    out, at = "", 0
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest == "**" and at > 0 and glob[at - 1] == "/":
            out, at = out + ".+", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (closing := re.match(r"\[([!^]?)(\]?[^\]]*)\]", rest)):
            negated, members = closing.groups()
            members = members.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            out += f"(?!/)[{'^' if negated else ''}{members}]"
            at += closing.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return out


def files_below(folder: Path) -> Iterator[str]:
    """Files and links that no .gitignore leaves out, as paths relative to the folder."""
    yield from _below(folder, "", ())


def _below(root: Path, inside: str, above: tuple[tuple[str, Rule], ...]) -> Iterator[str]:
    here = root / inside
    own = here / ".gitignore"
    known = above
    if own.is_file():
        text = own.read_text(errors="replace")
        known = above + tuple((inside, rule) for rule in rules(text))
    for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
        path = f"{inside}/{entry.name}" if inside else entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS or _ignored(path, is_folder, known):
            continue
        if is_folder:
            yield from _below(root, path, known)
        else:
            yield path


def _ignored(path: str, is_folder: bool, known: tuple[tuple[str, Rule], ...]) -> bool:
    # The last rule that speaks of a path decides; deeper files come later.
    for base, rule in reversed(known):
        relative = path[len(base) + 1 :] if base else path
        if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(relative):
            return not rule.takes_back
    return False
