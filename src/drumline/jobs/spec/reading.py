"""Read job files and report every error with its line.

`load` reads a file, `parse` reads text, and `validate` reads the JSON that a client sends to the
server. `--set key=value` overrides a value. It is parsed as a YAML scalar or list:
`--set retry.failures=1` is a number and `--set 'zones=[a, b]'` a list. Text keeps its colons and
hashes.
"""

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drumline.hosts.packing.folders import require_workdir
from drumline.hosts.packing.rules import CodeError
from drumline.jobs.slice_settings import SliceSettings
from drumline.jobs.spec.checks import quoted
from drumline.jobs.spec.model import SUBMODELS, JobSpec
from drumline.jobs.spec.problems import (
    Problem,
    SpecError,
    key_name,
    keys_of,
    messages,
    unknown_key,
)
from drumline.jobs.spec.yaml_lines import (
    MAX_BYTES,
    TOO_LARGE,
    Document,
    InvalidYaml,
    KeyPath,
    read,
)

_MAPS = (
    "environment", "python", "docker", "mounts", "retry", "service_account", "labels", "ssh",
)  # fmt: skip
"""The keys whose values are maps."""
_SHORT_FORMS = {"python": "kind", "docker": "image", "service_account": "email"}
"""The inner key that a text alone sets, for the maps that have one."""
_MAX_SHOWN = 60
"""The maximum length of a value in a list of changes."""


def load(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file. `overrides` are `key=value` as given to `--set`. Raise SpecError."""
    source = str(path) if str(path).isprintable() else ascii(str(path))[1:-1]

    def unreadable(message: str, line: int | None = None) -> SpecError:
        return SpecError([Problem(source, line, "", message)])

    try:
        mode = path.stat().st_mode
        # The shell writes to the pipes of /dev/fd, and `<(…)` is one. Any other pipe could block.
        piped = stat.S_ISFIFO(mode) and str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))
        raw = b""
        if stat.S_ISREG(mode) or piped:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        folder = path.parent.resolve()
    except FileNotFoundError:
        raise unreadable("the file does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "this is not a file name"
        raise unreadable(f"cannot be read: {reason}") from None
    if stat.S_ISDIR(mode):
        raise unreadable("is a folder; name the job file in it")
    if not stat.S_ISREG(mode) and not piped:
        raise unreadable("is no regular file; name a file with the text of the job")
    if len(raw) > MAX_BYTES:
        raise unreadable(TOO_LARGE)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise unreadable("is not UTF-8 text; save the job file as UTF-8", line) from None
    return parse(text, source=source, folder=folder, overrides=overrides)


def parse(text: str, *, source: str, folder: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the text of a job file. Relative folders start at `folder`. Raise SpecError."""
    try:
        document = read(text)
    except InvalidYaml as error:
        raise SpecError([Problem(source, error.line, "", str(error))]) from None
    if document.value is None and not document.errors and not overrides:
        raise SpecError([Problem(source, None, "", "is empty; it needs accelerator and run")])
    if not isinstance(document.value, dict):
        if document.value is not None:
            kind = "a list" if isinstance(document.value, list) else "not a map"
            message = f"is {kind}; a job file has keys, like accelerator: v4-8"
            raise SpecError([Problem(source, document.marks[()].line, "", message)])
        document.value = {}
    folder = folder.absolute()
    locator = _Locator(source, document)
    problems = [
        Problem(source, error.line, key_name(error.path), error.message)
        for error in document.errors
    ]
    values: dict[str, Any] = dict(document.value)
    for written in overrides:
        override = _apply_override(values, written)
        if isinstance(override, Problem):
            problems.append(override)
        else:
            locator.overrides.append(override)
    values.setdefault("name", _job_name(source))
    errors = list(_resolve_folders(folder, values, document))
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        errors += messages(error, lambda path: keys_of(JobSpec, SUBMODELS, path))
    else:
        workdir_errors = list(_check_workdir(spec))
        errors += workdir_errors
        errors += _check_requirements(spec)
        errors += () if workdir_errors else _check_include(spec)
    # One message per place is enough, and errors of YAML have a message already.
    reported = {(problem.line, problem.key) for problem in problems}
    for path, message in reversed(dict(reversed(errors)).items()):
        problem = locator.problem(path, message)
        if problem.line is None or (problem.line, problem.key) not in reported:
            problems.append(problem)
    if problems:
        raise SpecError(problems)
    return spec


def validate(data: object, *, source: str = "job") -> JobSpec:
    """Read JSON that `model_dump(mode="json")` wrote. Raise SpecError."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        errors = messages(error, lambda path: keys_of(JobSpec, SUBMODELS, path))
        raise SpecError(
            Problem(source, None, key_name(path), message) for path, message in errors
        ) from None


def slice_settings(values: Mapping[str, Any], *, source: str) -> SliceSettings:
    """Read the keys of slice settings from another file than a job file. Raise SpecError."""
    # The two required keys have any values, because only the others are read.
    spec = validate({"accelerator": "v4-8", "run": "true", **values}, source=source)
    return spec.slice_settings


def amend(data: Mapping[str, Any], overrides: Sequence[str]) -> JobSpec:
    """Read JSON with `key=value` overrides as given to `--set`. Raise SpecError."""
    values = dict(data)
    if values.get("docker"):
        # Derived from docker, whose image an override may change.
        values["python"] = {**values["python"], "kind": "system", "image": None}
    results = [_apply_override(values, written) for written in overrides]
    if problems := [result for result in results if isinstance(result, Problem)]:
        raise SpecError(problems)
    return validate(values)


# --- overrides --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Override:
    """One `--set`: its key, its value, and its text for messages."""

    path: KeyPath
    value: Any
    source: str


def _apply_override(values: dict[str, Any], written: str) -> _Override | Problem:
    """Parse one `--set` and replace its value in place."""
    override = _parse_override(written)
    if isinstance(override, Problem):
        return override
    if error := _replace(values, override, JobSpec.model_fields):
        return Problem(override.source, None, key_name(override.path), error)
    return override


def _parse_override(written: str) -> _Override | Problem:
    key, equals, value = written.partition("=")
    key = key.strip()
    cut = written if len(written) <= 80 else written[:79] + "…"
    source = "--set " + (cut if cut.isprintable() else ascii(cut)[1:-1])
    if not equals or not key.strip("."):
        return Problem(source, None, "", "is not key=value, like retry.failures=1")
    if "\0" in key or any("\ud800" <= letter <= "\udfff" for letter in key):
        return Problem(source, None, "", "contains a character that is not valid in text")
    # There are only two levels, and the folder of a mount may contain dots.
    top, dot, inner = key.partition(".")
    path: KeyPath = (top, inner) if dot else (top,)
    if dot and top in _MAPS and not inner:
        return Problem(source, None, "", f"has no key after {top}.")
    try:
        return _Override(path, _parse_value(value), source)
    except InvalidYaml as error:
        return Problem(source, None, key_name(path), str(error))


def _parse_value(text: str) -> Any:
    if not text.strip():
        return ""
    try:
        document = read(text)
    except InvalidYaml:
        # `echo "a" b` is not YAML but plain text; an open bracket is an error.
        if text.lstrip().startswith(("[", "{")) or not _is_plain_text(text):
            raise
        return text
    if document.errors:
        raise InvalidYaml(None, document.errors[0].message)
    opening = text.lstrip()[0]
    if isinstance(document.value, dict | list):
        return document.value if opening in "[{" else text
    # A command line has no comments: a part that YAML would drop belongs to the text.
    mark = document.marks.get(())
    if mark is None or (opening not in "'\"|>!&" and mark.text != text.strip()):
        return text.strip()
    return document.value


def _is_plain_text(text: str) -> bool:
    return len(text) < 100_000 and "\0" not in text and _is_utf8(text)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _replace(
    values: dict[str, Any], override: _Override, known_keys: Collection[str]
) -> str | None:
    """Replace the value in place. Return an error message if this is not possible."""
    top = str(override.path[0])
    if top not in known_keys:
        return unknown_key(top, known_keys)
    if len(override.path) == 1:
        values[top] = override.value
        return None
    if top not in _MAPS:
        return f"{top} has no keys of its own; write {top}=value"
    current = values.get(top)
    if top in _SHORT_FORMS and isinstance(current, str):
        current = {_SHORT_FORMS[top]: current}
    if current is not None and not isinstance(current, Mapping):
        return f"{top} is not a map in the file; set all of it"
    values[top] = {**(current or {}), override.path[1]: override.value}
    return None


# --- places, folders and files ----------------------------------------------------------------


class _Locator:
    """Finds the line of the file, or the option, that a value came from."""

    def __init__(self, source: str, document: Document) -> None:
        self._source = source
        self._marks = document.marks
        self.overrides: list[_Override] = []

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem with the line of its value, or of the closest enclosing value."""
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                return Problem(override.source, None, key_name(path), message)
        for end in range(len(path), 0, -1):
            if mark := self._marks.get(path[:end]):
                return Problem(self._source, mark.line, key_name(path), message)
        return Problem(self._source, None, key_name(path), message)


def _job_name(source: str) -> str:
    stem = "".join(letter if letter.isprintable() else "?" for letter in Path(source).stem)[:200]
    return stem if stem.strip() else "job"


def _resolve_folders(
    folder: Path, values: dict[str, Any], document: Document
) -> Iterable[tuple[KeyPath, str]]:
    """Make the folders in `values` absolute, and yield their errors."""
    checkpoint = values.get("checkpoint")
    match checkpoint:
        case str() if checkpoint.strip() and "://" not in checkpoint and checkpoint[0] not in "/~":
            values["checkpoint"] = os.path.normpath(folder / checkpoint)
    if "workdir" not in values:
        values["workdir"] = str(folder)
        if not _is_utf8(str(folder)):
            yield ("workdir",), "the name of the job file's folder is not UTF-8 text"
        return
    written = values["workdir"]
    if written is None:
        mark = document.marks.get(("workdir",))
        if mark and mark.text == "~":
            yield ("workdir",), "YAML reads ~ as no value; write none, or the full path"
        return
    if not isinstance(written, str) or not written.strip() or written == "none":
        return
    try:
        path = (folder / Path(written).expanduser()).resolve()
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, RuntimeError, ValueError):
        path, exists, is_folder = folder, False, False
    values["workdir"] = str(path)
    if not _is_utf8(str(path)):
        yield ("workdir",), "its full path is not UTF-8 text"
    elif not is_folder:
        reason = "is a file; workdir is a folder" if exists else "does not exist"
        yield ("workdir",), f"{quoted(written)} {reason}"


def _check_workdir(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """Yield an error if the folder may not be sent as a whole."""
    if spec.workdir is None:
        return
    try:
        require_workdir(spec.workdir)
    except CodeError as error:
        yield ("workdir",), str(error).removeprefix("workdir: ")


def _check_include(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """Yield an error for each entry of `include` that matches nothing."""
    if not spec.include:
        return
    if spec.workdir is None:
        yield ("include",), "workdir is none, so no files are sent; remove include"
        return
    from drumline.hosts.packing.selection import unmatched

    for name in unmatched(spec.workdir, spec.include):
        index = spec.include.index(name)
        message = f"{quoted(name)} matches no file in workdir; correct or remove it"
        yield ("include", index), message


def _check_requirements(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """Yield an error if the requirements file does not exist."""
    name = spec.python.requirements
    if not isinstance(name, str):
        return
    path = ("python", "requirements")
    if spec.workdir is None:
        yield path, f"{quoted(name)} is a file in workdir, which is none; list the packages instead"
        return
    try:
        exists = (spec.workdir / name).is_file()
    except (OSError, ValueError):
        exists = False
    if not exists:
        yield path, f"{quoted(name)} is not a file in workdir; for a package write a list: [{name}]"


# --- changes ----------------------------------------------------------------------------------


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Compare two jobs as JSON. Return a line such as `retry.failures: 3 → 1` per changed key.

    A key that the version of the older job did not have had its default.
    """
    defaults = {
        key: field.default
        for key, field in JobSpec.model_fields.items()
        if isinstance(field.default, str | int | float)
    }
    old = dict(_flatten(defaults | dict(before)))
    new = dict(_flatten(after))
    return [
        f"{key}: {_change(old.get(key), new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if _normalize(old.get(key)) != _normalize(new.get(key))
    ]


def _normalize(value: object) -> object:
    """Return None for an empty list, which equals a key that older versions did not have."""
    return None if value == [] else value


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _change(old: object, new: object) -> str:
    old_text, new_text = _summarize(old), _summarize(new)
    if old_text == new_text:
        return f"{new_text}, changed after the part shown"
    return f"{old_text} → {new_text}"


def _summarize(value: object) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = " ⏎ ".join(text.strip().splitlines())
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"
