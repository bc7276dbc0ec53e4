"""`--set key=value`: replaces a value of the job file from the command line.

The value is read as YAML reads a scalar or a list, so `--set retry.failures=1` is a number and
`--set 'zones=[a, b]'` a list. Text stays as it was typed, colons and hashes included.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.jobs.spec.problems import Problem, key_of, unknown_key
from drumline.jobs.spec.yaml_lines import NotYaml, Path, read

MAPS = ("environment", "python", "mounts", "retry")
"""The keys whose values are maps."""


@dataclass(frozen=True)
class Override:
    """A --set: its key, its value, and how a sentence quotes it."""

    path: Path
    value: Any
    source: str


def read_override(written: str) -> Override | Problem:
    """Parse one --set."""
    key, equals, typed = written.partition("=")
    key = key.strip()
    cited = written if len(written) <= 80 else written[:79] + "…"
    source = "--set " + (cited if cited.isprintable() else ascii(cited)[1:-1])
    if not equals or not key.strip("."):
        return Problem(source, None, "", "is not key=value, like retry.failures=1")
    if "\0" in key or any("\ud800" <= letter <= "\udfff" for letter in key):
        return Problem(source, None, "", "holds a character that no text can have")
    # There are only two levels, and a mount's folder may have dots in it.
    top, dot, inside = key.partition(".")
    path: Path = (top, inside) if dot else (top,)
    if dot and top in MAPS and not inside:
        return Problem(source, None, "", f"names nothing after {top}.")
    try:
        return Override(path, _value(typed), source)
    except NotYaml as error:
        return Problem(source, None, key_of(path), str(error))


def _value(typed: str) -> Any:
    if not typed.strip():
        return ""
    try:
        document = read(typed)
    except NotYaml:
        # `echo "a" b` is not YAML but plain text; an open bracket is a mistake.
        if typed.lstrip().startswith(("[", "{")) or not _sound(typed):
            raise
        return typed
    if document.flaws:
        raise NotYaml(None, document.flaws[0].message)
    opening = typed.lstrip()[0]
    if isinstance(document.value, dict | list):
        return document.value if opening in "[{" else typed
    # A command line has no comments: what YAML would drop is part of the text.
    mark = document.marks.get(())
    if mark is None or (opening not in "'\"|>!&" and mark.text != typed.strip()):
        return typed.strip()
    return document.value


def _sound(typed: str) -> bool:
    return len(typed) < 100_000 and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in typed)


def apply(values: dict[str, Any], override: Override, known: Collection[str]) -> str | None:
    """Replace the value in place; returns why not, if it cannot be done."""
    top = str(override.path[0])
    if top not in known:
        return unknown_key(top, known)
    if len(override.path) == 1:
        values[top] = override.value
        return None
    if top not in MAPS:
        return f"{top} has no keys of its own; write {top}=value"
    there = values.get(top)
    if top == "python" and isinstance(there, str):
        there = {"kind": there}
    if there is not None and not isinstance(there, Mapping):
        return f"{top} is not a map in the file; set it as a whole"
    values[top] = {**(there or {}), override.path[1]: override.value}
    return None
