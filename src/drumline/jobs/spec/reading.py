"""Reading job files, with the line of every mistake.

`load` reads a file, `parse` a text, `validate` the JSON that the client sends to the server. The
keys are defined in `model`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from drumline.hosts.packing.folders import require_workdir
from drumline.hosts.packing.rules import CodeError
from drumline.jobs.spec.checks import shown
from drumline.jobs.spec.model import JobSpec, Python, Retry
from drumline.jobs.spec.overrides import Override, apply, read_override
from drumline.jobs.spec.problems import Problem, SpecError, key_of, keys_of, sentences
from drumline.jobs.spec.yaml_lines import MAX_BYTES, TOO_LARGE, Document, NotYaml, read
from drumline.jobs.spec.yaml_lines import Path as KeyPath

_MAPS: Mapping[str, type[BaseModel]] = {"python": Python, "retry": Retry}


def load(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job that a file describes; `overrides` are `key=value` as given to --set."""
    source = str(path) if str(path).isprintable() else ascii(str(path))[1:-1]

    def unreadable(message: str, line: int | None = None) -> SpecError:
        return SpecError([Problem(source, line, "", message)])

    try:
        if path.is_dir():
            raise unreadable("is a folder; name the job file in it")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        folder = path.parent.resolve()
    except FileNotFoundError:
        raise unreadable("there is no such file") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "that is no file name"
        raise unreadable(f"cannot be read: {why}") from None
    if len(raw) > MAX_BYTES:
        raise unreadable(TOO_LARGE)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise unreadable("is not UTF-8 text; save the job file as UTF-8", line) from None
    return parse(text, source=source, folder=folder, overrides=overrides)


def parse(text: str, *, source: str, folder: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job that a text describes; relative folders start at `folder`."""
    try:
        document = read(text)
    except NotYaml as error:
        raise SpecError([Problem(source, error.line, "", str(error))]) from None
    if document.value is None and not document.flaws and not overrides:
        raise SpecError([Problem(source, None, "", "is empty; it needs accelerator and run")])
    if not isinstance(document.value, dict):
        if document.value is not None:
            what = "a list" if isinstance(document.value, list) else "not a map"
            message = f"is {what}; a job file has keys, like accelerator: v4-8"
            raise SpecError([Problem(source, document.marks[()].line, "", message)])
        document.value = {}
    folder = folder.absolute()
    places = _Places(source, document)
    problems = [
        Problem(source, flaw.line, key_of(flaw.path), flaw.message) for flaw in document.flaws
    ]
    values: dict[str, Any] = dict(document.value)
    for written in overrides:
        override = read_override(written)
        if isinstance(override, Problem):
            problems.append(override)
        elif why := apply(values, override, JobSpec.model_fields):
            problems.append(Problem(override.source, None, key_of(override.path), why))
        else:
            places.overrides.append(override)
    values.setdefault("name", _name_of(source))
    flaws = list(_seen_from(folder, values, document))
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        flaws += sentences(error, lambda path: keys_of(JobSpec, _MAPS, path))
    else:
        refused = list(_workdir_may_be_sent(spec))
        flaws += refused
        flaws += _requirements_there(spec)
        flaws += () if refused else _included_there(spec)
    # One sentence per place is enough, and what YAML could not read has one already.
    had = {(problem.line, problem.key) for problem in problems}
    for path, message in reversed(dict(reversed(flaws)).items()):
        problem = places.problem(path, message)
        if problem.line is None or (problem.line, problem.key) not in had:
            problems.append(problem)
    if problems:
        raise SpecError(problems)
    return spec


def validate(data: object, *, source: str = "job") -> JobSpec:
    """The job that JSON describes, as `model_dump(mode="json")` wrote it. Raises SpecError."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        found = sentences(error, lambda path: keys_of(JobSpec, _MAPS, path))
        raise SpecError(Problem(source, None, key_of(path), why) for path, why in found) from None


def amend(data: Mapping[str, Any], overrides: Sequence[str]) -> JobSpec:
    """The job that JSON describes, with `key=value` as given to --set. Raises SpecError."""
    values, problems = dict(data), []
    for written in overrides:
        override = read_override(written)
        if isinstance(override, Problem):
            problems.append(override)
        elif why := apply(values, override, JobSpec.model_fields):
            problems.append(Problem(override.source, None, key_of(override.path), why))
    if problems:
        raise SpecError(problems)
    return validate(values)


class _Places:
    """The line of the file, or the option, that each value came from."""

    def __init__(self, source: str, document: Document) -> None:
        self._source = source
        self._marks = document.marks
        self.overrides: list[Override] = []

    def problem(self, path: KeyPath, message: str) -> Problem:
        """The problem with its place: that of the value, or of the nearest value around it."""
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                return Problem(override.source, None, key_of(path), message)
        for end in range(len(path), 0, -1):
            if mark := self._marks.get(path[:end]):
                return Problem(self._source, mark.line, key_of(path), message)
        return Problem(self._source, None, key_of(path), message)


def _name_of(source: str) -> str:
    stem = "".join(letter if letter.isprintable() else "?" for letter in Path(source).stem)[:200]
    return stem if stem.strip() else "job"


def _seen_from(
    folder: Path, values: dict[str, Any], document: Document
) -> Iterable[tuple[KeyPath, str]]:
    """Make the folders in `values` absolute; returns what is wrong with them."""
    checkpoint = values.get("checkpoint")
    match checkpoint:
        case str() if checkpoint.strip() and "://" not in checkpoint and checkpoint[0] not in "/~":
            values["checkpoint"] = os.path.normpath(folder / checkpoint)
    if "workdir" not in values:
        values["workdir"] = str(folder)
        if not _is_text(str(folder)):
            yield ("workdir",), "the name of the job file's folder is not UTF-8 text"
        return
    written = values["workdir"]
    if written is None:
        mark = document.marks.get(("workdir",))
        if mark and mark.text == "~":
            yield ("workdir",), "~ alone is nothing to YAML; write none, or the folder in full"
        return
    if not isinstance(written, str) or not written.strip() or written == "none":
        return
    try:
        path = (folder / Path(written).expanduser()).resolve()
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, RuntimeError, ValueError):
        path, exists, is_folder = folder, False, False
    values["workdir"] = str(path)
    if not _is_text(str(path)):
        yield ("workdir",), "its full name is not UTF-8 text"
    elif not is_folder:
        is_what = "is a file; workdir is a folder" if exists else "does not exist"
        yield ("workdir",), f"{shown(written)} {is_what}"


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _workdir_may_be_sent(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """Why the folder may not be sent as a whole."""
    if spec.workdir is None:
        return
    try:
        require_workdir(spec.workdir)
    except CodeError as error:
        yield ("workdir",), str(error).removeprefix("workdir: ")


def _included_there(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """The entries of `include` that match nothing."""
    if not spec.include:
        return
    if spec.workdir is None:
        yield ("include",), "workdir is none, so nothing is sent; leave include out"
        return
    from drumline.hosts.packing.selection import unmatched

    for name in unmatched(spec.workdir, spec.include):
        at = spec.include.index(name)
        yield ("include", at), f"{shown(name)} matches nothing in workdir; correct it or remove it"


def _requirements_there(spec: JobSpec) -> Iterable[tuple[KeyPath, str]]:
    """What is wrong with the file of requirements."""
    name = spec.python.requirements
    if not isinstance(name, str):
        return
    at = ("python", "requirements")
    if spec.workdir is None:
        yield at, f"{shown(name)} is a file in workdir, which is none; list the packages instead"
        return
    try:
        there = (spec.workdir / name).is_file()
    except (OSError, ValueError):
        there = False
    if not there:
        yield at, f"{shown(name)} is no file in workdir; packages are written as a list: [{name}]"
