"""The checks of single values in a job file: each takes what was written and returns its value.

An invalid value raises Wrong with the sentences for the user; `reading` adds file and line. The
values come from `yaml_lines` (numbers and booleans as Written) or as plain JSON.
"""

import json
import math
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from drumline.chips.names import nearest
from drumline.jobs.patterns import find_slow_line
from drumline.jobs.spec.yaml_lines import Path, Written

In = TypeVar("In")
Out = TypeVar("Out")
UNLIMITED = "unlimited"
NEVER = "never"
KINDS = ("system", "uv", "venv", "conda", "docker")
CAPACITIES = ("spot", "on-demand", "reserved")
BURN_INS = ("off", "short", "long")
MOST_PARKED = 8
"""The most bad slices that a job may pay for."""
_LONGEST_GRACE = 3600.0
_LONGEST_PAUSE = 7 * 24 * 3600.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECONDS = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>s|m|h|)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,2}")


class Wrong(ValueError):
    """A value is invalid: where inside it (a path, empty for the whole), and why."""

    def __init__(self, message: str, *at: str | int) -> None:
        """One sentence, about the value itself or a place inside it."""
        super().__init__(message)
        self.flaws: list[tuple[Path, str]] = [(at, message)]

    @classmethod
    def all_of(cls, flaws: Iterable[tuple[Path, str]]) -> "Wrong":
        """Several sentences at once."""
        found = list(flaws)
        wrong = cls(found[0][1])
        wrong.flaws = found
        return wrong


def shown(value: object) -> str:
    """A value as it is quoted in a sentence: on one line, not too long."""
    if isinstance(value, Written):
        return value.text if len(value.text) <= 60 else value.text[:59] + "…"
    if isinstance(value, bool | int | float):
        return json.dumps(value)[:60]
    if value is None:
        return "nothing"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a map"
    text = str(value)
    return repr(text if len(text) <= 60 else text[:59] + "…")


def plain(value: object) -> Any:
    """The plain value, without how it was written."""
    return value.value if isinstance(value, Written) else value


def text(value: object) -> str:
    """Text that is not blank; the sentences say how to fix common mistakes in YAML."""
    if isinstance(value, str):
        if not value.strip():
            raise Wrong("is empty")
        if "\0" in value:
            raise Wrong("holds a character that no text can have")
        return value
    written = shown(value)
    if isinstance(plain(value), bool):
        as_what = json.dumps(plain(value))
        meant = "a truth value" if written == as_what else as_what
        raise Wrong(f"YAML reads {written} as {meant}; put it in quotes: '{written}'")
    if isinstance(plain(value), int | float):
        raise Wrong(f"{written} is a number, not text; put it in quotes: '{written}'")
    if value is None:
        raise Wrong("has no value; write one after the colon")
    raise Wrong(f"is {shown(value)}; it takes text")


def line_of_text(value: object) -> str:
    """Text on one line, without characters that cannot be printed."""
    found = text(value)
    if not found.isprintable():
        raise Wrong(f"{shown(found)} holds a line break or a character that cannot be printed")
    if len(found) > 200:
        raise Wrong("is longer than 200 characters")
    return found


def script(value: object) -> str:
    """Shell commands."""
    if isinstance(value, list | tuple):
        raise Wrong("is a list; write the commands line by line below a |")
    return text(value)


def choice(value: object, among: tuple[str, ...], hints: Mapping[str, str] | None = None) -> str:
    """A word among those allowed."""
    if value in among:
        return str(value)
    word = text(value) if value is None or isinstance(value, str) else ""
    near = (hints or {}).get(word) or next(iter(nearest(word[:60], among, 1)), None)
    mend = f"; did you mean {near}?" if near else ""
    raise Wrong(f"{shown(value)} is none of {', '.join(among)}{mend}")


def yes_or_no(value: object) -> bool:
    """A boolean."""
    if isinstance(found := plain(value), bool):
        return found
    raise Wrong(f"is {shown(value)}; it takes true or false")


def several(value: object) -> list[object]:
    """A list; a single value is a list of one."""
    if isinstance(value, Mapping):
        raise Wrong("is a map; it takes one name or a list")
    found = list(value) if isinstance(value, list | tuple) else [value]
    if not found:
        raise Wrong("is an empty list")
    return found


def each(values: Iterable[tuple[str | int, In]], check: Callable[[In], Out]) -> list[Out]:
    """All checked values; the sentences of all that fail are raised together."""
    good: list[Out] = []
    flaws: list[tuple[Path, str]] = []
    for at, value in values:
        try:
            good.append(check(value))
        except Wrong as wrong:
            flaws += [((at, *path), message) for path, message in wrong.flaws]
    if flaws:
        raise Wrong.all_of(flaws)
    return good


def unique(values: list[Out]) -> tuple[Out, ...]:
    """The same values, none of which may occur twice."""
    seen: set[Out] = set()
    twice: list[tuple[Path, str]] = []
    for at, name in enumerate(values):
        if name in seen:
            twice.append(((at,), f"{name} is named twice"))
        seen.add(name)
    if twice:
        raise Wrong.all_of(twice)
    return tuple(values)


def map_of(value: object, example: str) -> dict[str, object]:
    """A map with text for keys; None is an empty map."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        what = "a list" if isinstance(value, list | tuple) else shown(value)
        raise Wrong(f"is {what}; it takes a map, like {example}")
    return {str(key): inside for key, inside in value.items()}


def variable(value: object) -> str:
    """The name of an environment variable that the user may set."""
    name = text(value)
    if not _VARIABLE.fullmatch(name):
        raise Wrong(
            f"{shown(name)} is no name for a variable; "
            "letters, digits and _ make one, no digit first"
        )
    if name.startswith("DRUMLINE_"):
        raise Wrong(f"{shown(name)}: names that begin with DRUMLINE_ are Drumline's own")
    return name


def environment(value: object) -> dict[str, str]:
    """Variables for the program; numbers and booleans as they were written."""
    found = map_of(value, "LEARNING_RATE: 3e-4")

    def pair(item: tuple[str, object]) -> tuple[str, str]:
        return variable(item[0]), _variable_text(item[1])

    return dict(each(((name, (name, inside)) for name, inside in found.items()), pair))


def _variable_text(value: object) -> str:
    if isinstance(value, Written):
        return value.text
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if value is None:
        raise Wrong("has no value; write '' for an empty one")
    if not isinstance(value, str):
        raise Wrong(f"is {shown(value)}; a variable takes text")
    if "\0" in value:
        raise Wrong("holds a character that no text can have")
    return value


def secrets(value: object) -> tuple[str, ...]:
    """Names of variables, without their values."""
    if value is None or value in ([], ()):
        return ()
    if isinstance(value, Mapping):
        raise Wrong("is a map; list the names alone, the values are taken from your environment")
    return unique(each(enumerate(several(value)), _secret))


def _secret(value: object) -> str:
    if isinstance(value, str) and "=" in value:
        name = value.partition("=")[0]
        raise Wrong(f"give the name {shown(name)} alone, its value is taken from your environment")
    return variable(value)


def hosts(value: object) -> str | tuple[int, ...]:
    """`all`, or host numbers in order."""
    if value == "all":
        return "all"
    found = plain(value)
    if isinstance(found, int) and not isinstance(found, bool):
        raise Wrong(f"{found} could mean a host or a number of hosts; write a list: [{found}]")
    if not isinstance(value, list | tuple):
        raise Wrong(f"is {shown(value)}; it takes all, or a list of host numbers like [0, 1]")
    numbers = each(enumerate(several(value)), _host)
    return tuple(sorted(unique(numbers)))


def _host(value: object) -> int:
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise Wrong(f"{shown(value)} is no host; hosts are numbered from 0")
    return found


def allowance(value: object) -> int | str:
    """How often something may happen."""
    found = plain(value)
    if found == UNLIMITED:
        return UNLIMITED
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= 10**9:
        raise Wrong(f"is {shown(value)}; it takes a whole number from 0 on, or {UNLIMITED}")
    return found


def burnin(value: object) -> str:
    """How thoroughly chips are tested first; YAML reads `off` as a boolean."""
    return "off" if plain(value) is False else choice(value, BURN_INS)


def parking(value: object) -> int:
    """How many bad slices are kept."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= MOST_PARKED:
        raise Wrong(f"is {shown(value)}; it takes a whole number from 0 to {MOST_PARKED}")
    return found


def seconds(value: object) -> float:
    """A length of time: `30`, `30s`, `2m`."""
    found = _length_of_time(value, "seconds, like 30, or 30s, 2m")
    if not 0 <= found <= _LONGEST_GRACE:
        raise Wrong(f"is {shown(value)}; it takes 0 s to 1 h")
    return found


def pause(value: object) -> float | str:
    """A length of time after which something is wrong: `30m`, `2h`, or `never`."""
    if value == NEVER:
        return NEVER
    found = _length_of_time(value, f"a time, like 30m, 2h, or {NEVER}")
    if not 1 <= found <= _LONGEST_PAUSE:
        raise Wrong(f"is {shown(value)}; it takes 1 s to 7 days, or {NEVER}")
    return found


def keep(value: object) -> float:
    """How long something that costs money is kept: `0`, `30m`, `2h`."""
    found = _length_of_time(value, "a time, like 30m, 2h, or 0")
    if not 0 <= found <= _LONGEST_PAUSE:
        raise Wrong(f"is {shown(value)}; it takes 0 s to 7 days")
    return found


def _length_of_time(value: object, takes: str) -> float:
    found = plain(value)
    if isinstance(found, str) and (parts := _SECONDS.fullmatch(found.strip()[:40])):
        found = float(parts["number"]) * _UNITS[parts["unit"]]
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise Wrong(f"is {shown(value)}; it takes {takes}")
    return float(found)


def progress(value: object) -> str:
    """A regular expression with a group for the step."""
    pattern = text(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            why = getattr(error, "msg", "too large")
            raise Wrong(f"{shown(pattern)} is no regular expression: {why}") from None
    if "step" not in compiled.groupindex:
        raise Wrong(f"{shown(pattern)} has no group called step, like (?P<step>\\d+)")
    slow = find_slow_line(compiled)
    if slow is not None:
        raise Wrong(
            f"{shown(pattern)} tries too many ways to match a line of {len(slow)} {slow[0]!r};"
            " a repeat inside a repeat, like (\\d+)+, does that: write \\d+"
        )
    return pattern


def project(value: object) -> str:
    """A Google Cloud project id."""
    found = text(value).strip()
    if not _PROJECT.fullmatch(found):
        raise Wrong(
            f"{shown(found)} is no project id; "
            "one has 6 to 30 lower-case letters, digits and hyphens"
        )
    return found


def version(value: object) -> str:
    """A Python version, as it was written: 3.10 is not 3.1."""
    found = value.text if isinstance(value, Written) else value
    if not isinstance(found, str) or not _VERSION.fullmatch(found):
        raise Wrong(f"is {shown(value)}; it takes a version of Python, like 3.12")
    return found


def image(value: object) -> str:
    """The name of a container image."""
    found = text(value).strip()
    if not _IMAGE.fullmatch(found) or len(found) > 400:
        raise Wrong(f"{shown(found)} is no name of an image; one looks like python:3.12-slim")
    return found


def include(value: object) -> tuple[str, ...]:
    """Files to send although they look secret: paths in workdir, or patterns of .gitignore."""
    if value is None or value in ([], ()):
        return ()
    return unique(each(enumerate(several(value)), _included))


def _included(value: object) -> str:
    name = text(value)
    if "\n" in name or "\r" in name:
        raise Wrong(f"{shown(name)} holds a line break; write one file or pattern for each entry")
    if not set("*?[\\") & set(name):
        name = posixpath.normpath(name) + ("/" if name.endswith("/") else "")
    if name.startswith(("/", "~")) or ".." in name.split("/"):
        raise Wrong(f"{shown(name)} is not inside workdir; write the path as seen from there")
    if name.startswith(("!", "#")) or not name.strip("/ ."):
        raise Wrong(f"{shown(name)} names no file; write a path in workdir, or a pattern like *.py")
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([name])
    except ValueError:
        raise Wrong(f"{shown(name)} is no pattern as in .gitignore") from None
    return name if set("*?[") & set(name) else name.rstrip("/")


def requirements(value: object) -> str | tuple[str, ...]:
    """A file in workdir, or what to install, one entry each."""
    if isinstance(value, list | tuple):
        return tuple(each(enumerate(several(value)), line_of_text))
    name = line_of_text(value)
    if name.startswith(("/", "~", "-")) or ".." in name.split("/"):
        raise Wrong(f"{shown(name)} is not inside workdir; name a file there, or list the packages")
    return name
