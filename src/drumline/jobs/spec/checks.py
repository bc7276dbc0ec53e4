"""The checks of single values in a job file. Each takes the value as written and returns it parsed.

An invalid value raises InvalidValue with a message for the user; `reading` adds the file and the
line. Values come from `yaml_lines`, with numbers and booleans as Scalar, or from plain JSON.
"""

import json
import math
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from drumline.chips.names import nearest
from drumline.errors import UserError
from drumline.hosts.environment import SERVICE_ACCOUNT
from drumline.jobs.patterns import find_slow_line
from drumline.jobs.spec.yaml_lines import KeyPath, Scalar

In = TypeVar("In")
Out = TypeVar("Out")
UNLIMITED = "unlimited"
NEVER = "never"
PYTHON_KINDS = ("system", "uv", "venv", "conda", "docker")
CAPACITY_TIERS = ("spot", "on-demand", "reserved")
BURN_INS = ("off", "short", "long")
MAX_HELD_BACK = 8
MAX_ASKED = 8
"""The maximum number of bad slices that a job may hold back."""
GCS_SCHEME = "gs://"
# Each mount is a gcsfuse process on every host.
_MAX_MOUNTS = 50
_MAX_GRACE_SECONDS = 3600.0
_MAX_SECONDS = 7 * 24 * 3600.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>s|m|h|)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,2}")
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")
_IP_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")


class InvalidValue(UserError):
    """An invalid value. `errors` pairs a path inside the value with a message for each error."""

    def __init__(self, message: str, *path: str | int) -> None:
        """Without a path, the message is about the whole value."""
        super().__init__(message)
        self.errors: list[tuple[KeyPath, str]] = [(path, message)]

    @classmethod
    def from_errors(cls, errors: Iterable[tuple[KeyPath, str]]) -> "InvalidValue":
        """Combine several errors into one exception."""
        listed = list(errors)
        invalid = cls(listed[0][1])
        invalid.errors = listed
        return invalid


# --- generic values ---------------------------------------------------------------------------


def quoted(raw: object) -> str:
    """Return a value as a message quotes it: on one line and shortened."""
    if isinstance(raw, Scalar):
        return raw.text if len(raw.text) <= 60 else raw.text[:59] + "…"
    if isinstance(raw, bool | int | float):
        return json.dumps(raw)[:60]
    if raw is None:
        return "nothing"
    if isinstance(raw, list | tuple):
        return "a list"
    if isinstance(raw, Mapping):
        return "a map"
    text = str(raw)
    return repr(text if len(text) <= 60 else text[:59] + "…")


def unwrap(raw: object) -> Any:
    """Return the value of a Scalar, and any other value unchanged."""
    return raw.value if isinstance(raw, Scalar) else raw


def text(raw: object) -> str:
    """Return text that is not blank. The errors explain how to quote text in YAML."""
    if isinstance(raw, str):
        if not raw.strip():
            raise InvalidValue("is empty")
        if "\0" in raw:
            raise InvalidValue("contains a character that is not valid in text")
        return raw
    written = quoted(raw)
    if isinstance(unwrap(raw), bool):
        spelled = json.dumps(unwrap(raw))
        meaning = "a boolean" if written == spelled else spelled
        raise InvalidValue(f"YAML reads {written} as {meaning}; put it in quotes: '{written}'")
    if isinstance(unwrap(raw), int | float):
        raise InvalidValue(f"{written} is a number, not text; put it in quotes: '{written}'")
    if raw is None:
        raise InvalidValue("has no value; write one after the colon")
    raise InvalidValue(f"is {quoted(raw)}; expected text")


def line_of_text(raw: object) -> str:
    """Return printable text on one line."""
    line = text(raw)
    if not line.isprintable():
        raise InvalidValue(f"{quoted(line)} contains a line break or an unprintable character")
    if len(line) > 200:
        raise InvalidValue("is longer than 200 characters")
    return line


def script(raw: object) -> str:
    """Return shell commands."""
    if isinstance(raw, list | tuple):
        raise InvalidValue("is a list; write the commands line by line below a |")
    return text(raw)


def choice(raw: object, allowed: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> str:
    """Return one of the allowed words. `aliases` are other spellings, suggested in the error."""
    if raw in allowed:
        return str(raw)
    word = text(raw) if raw is None or isinstance(raw, str) else ""
    near = (aliases or {}).get(word) or next(iter(nearest(word[:60], allowed, 1)), None)
    suggestion = f"; did you mean {near}?" if near else ""
    raise InvalidValue(f"{quoted(raw)} is not one of {', '.join(allowed)}{suggestion}")


def boolean(raw: object) -> bool:
    """Return a boolean."""
    if isinstance(flag := unwrap(raw), bool):
        return flag
    raise InvalidValue(f"is {quoted(raw)}; expected true or false")


def as_list(raw: object) -> list[object]:
    """Return a non-empty list. A single value becomes a list of one."""
    if isinstance(raw, Mapping):
        raise InvalidValue("is a map; expected one name or a list")
    items = list(raw) if isinstance(raw, list | tuple) else [raw]
    if not items:
        raise InvalidValue("is an empty list")
    return items


def check_all(values: Iterable[tuple[str | int, In]], check: Callable[[In], Out]) -> list[Out]:
    """Check every value and return the results. Raise the errors of all values together."""
    checked: list[Out] = []
    errors: list[tuple[KeyPath, str]] = []
    for key, raw in values:
        try:
            checked.append(check(raw))
        except InvalidValue as error:
            errors += [((key, *path), message) for path, message in error.errors]
    if errors:
        raise InvalidValue.from_errors(errors)
    return checked


def unique(values: list[Out]) -> tuple[Out, ...]:
    """Return the values as a tuple. Raise InvalidValue for duplicates."""
    seen: set[Out] = set()
    duplicates: list[tuple[KeyPath, str]] = []
    for index, name in enumerate(values):
        if name in seen:
            duplicates.append(((index,), f"{name} is listed twice"))
        seen.add(name)
    if duplicates:
        raise InvalidValue.from_errors(duplicates)
    return tuple(values)


def map_of(raw: object, example: str) -> dict[str, object]:
    """Return a map with text keys. None is an empty map."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        kind = "a list" if isinstance(raw, list | tuple) else quoted(raw)
        raise InvalidValue(f"is {kind}; expected a map, like {example}")
    return {str(key): item for key, item in raw.items()}


def _integer(raw: object) -> int | None:
    """Return an integer, or None if the value is anything else."""
    value = unwrap(raw)
    return None if isinstance(value, bool) or not isinstance(value, int) else value


def _parse_seconds(raw: object, expected: str) -> float:
    seconds = unwrap(raw)
    if isinstance(seconds, str) and (match := _DURATION.fullmatch(seconds.strip()[:40])):
        seconds = float(match["number"]) * _UNITS[match["unit"]]
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds):
        raise InvalidValue(f"is {quoted(raw)}; expected {expected}")
    return float(seconds)


# --- the keys of a job file -------------------------------------------------------------------


def variable(raw: object) -> str:
    """Return the name of an environment variable that the user may set."""
    name = text(raw)
    if not _VARIABLE.fullmatch(name):
        raise InvalidValue(
            f"{quoted(name)} is not a variable name; "
            "use letters, digits and _, and do not start with a digit"
        )
    if name.startswith("DRUMLINE_"):
        raise InvalidValue(f"{quoted(name)}: names that begin with DRUMLINE_ are reserved")
    return name


def environment(raw: object) -> dict[str, str]:
    """Return the program's variables. Numbers and booleans keep the spelling of the file."""
    variables = map_of(raw, "LEARNING_RATE: 3e-4")

    def pair(item: tuple[str, object]) -> tuple[str, str]:
        return variable(item[0]), _variable_text(item[1])

    return dict(check_all(((name, (name, item)) for name, item in variables.items()), pair))


def _variable_text(raw: object) -> str:
    if isinstance(raw, Scalar):
        return raw.text
    if isinstance(raw, bool | int | float):
        return json.dumps(raw)
    if raw is None:
        raise InvalidValue("has no value; write '' for an empty one")
    if not isinstance(raw, str):
        raise InvalidValue(f"is {quoted(raw)}; expected text")
    if "\0" in raw:
        raise InvalidValue("contains a character that is not valid in text")
    return raw


def secrets(raw: object) -> tuple[str, ...]:
    """Return names of variables, without their values."""
    if raw is None or raw in ([], ()):
        return ()
    if isinstance(raw, Mapping):
        raise InvalidValue("is a map; list only the names, values come from your environment")
    return unique(check_all(enumerate(as_list(raw)), _secret))


def _secret(raw: object) -> str:
    if isinstance(raw, str) and "=" in raw:
        name = raw.partition("=")[0]
        raise InvalidValue(
            f"contains a value; write only the name {quoted(name)}, "
            "the value comes from your environment"
        )
    return variable(raw)


def hosts(raw: object) -> str | tuple[int, ...]:
    """Return `all`, or sorted host indices."""
    if raw == "all":
        return "all"
    index = _integer(raw)
    if index is not None:
        raise InvalidValue(f"{index} could be a host or a number of hosts; write a list: [{index}]")
    if not isinstance(raw, list | tuple):
        raise InvalidValue(f"is {quoted(raw)}; expected all, or a list of hosts like [0, 1]")
    return tuple(sorted(unique(check_all(enumerate(as_list(raw)), _host))))


def _host(raw: object) -> int:
    index = _integer(raw)
    if index is None or index < 0:
        raise InvalidValue(f"{quoted(raw)} is not a host; hosts are numbered from 0")
    return index


def allowance(raw: object) -> int | str:
    """Return the number of times that something may happen, or `unlimited`."""
    if unwrap(raw) == UNLIMITED:
        return UNLIMITED
    count = _integer(raw)
    if count is None or not 0 <= count <= 10**9:
        raise InvalidValue(f"is {quoted(raw)}; expected a whole number from 0, or {UNLIMITED}")
    return count


def burnin(raw: object) -> str:
    """Return the kind of burn-in. YAML reads `off` as a boolean."""
    return "off" if unwrap(raw) is False else choice(raw, BURN_INS)


def ask(raw: object) -> int:
    """Return the maximum number of zones to request slices in at the same time."""
    count = _integer(raw)
    if count is None or not 1 <= count <= MAX_ASKED:
        raise InvalidValue(f"is {quoted(raw)}; expected a whole number from 1 to {MAX_ASKED}")
    return count


def parking(raw: object) -> int:
    """Return the maximum number of slices to hold back."""
    count = _integer(raw)
    if count is None or not 0 <= count <= MAX_HELD_BACK:
        raise InvalidValue(f"is {quoted(raw)}; expected a whole number from 0 to {MAX_HELD_BACK}")
    return count


def grace(raw: object) -> float:
    """Return a duration such as `30`, `30s` or `2m` in seconds, at most an hour."""
    seconds = _parse_seconds(raw, "seconds, like 30, or 30s, 2m")
    if not 0 <= seconds <= _MAX_GRACE_SECONDS:
        raise InvalidValue(f"is {quoted(raw)}; expected 0 s to 1 h")
    return seconds


def stuck_after(raw: object) -> float | str:
    """Return a timeout such as `30m` or `2h` in seconds, or `never`."""
    if raw == NEVER:
        return NEVER
    seconds = _parse_seconds(raw, f"a duration, like 30m, 2h, or {NEVER}")
    if not 1 <= seconds <= _MAX_SECONDS:
        raise InvalidValue(f"is {quoted(raw)}; expected 1 s to 7 days, or {NEVER}")
    return seconds


def keep(raw: object) -> float:
    """Return a duration such as `0`, `30m` or `2h` in seconds, at most seven days."""
    seconds = _parse_seconds(raw, "a duration, like 30m, 2h, or 0")
    if not 0 <= seconds <= _MAX_SECONDS:
        raise InvalidValue(f"is {quoted(raw)}; expected 0 s to 7 days")
    return seconds


def progress(raw: object) -> str:
    """Return a regular expression with a group for the step."""
    pattern = text(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            reason = getattr(error, "msg", "too large")
            raise InvalidValue(f"{quoted(pattern)} is not a regular expression: {reason}") from None
    if "step" not in compiled.groupindex:
        raise InvalidValue(f"{quoted(pattern)} has no group called step, like (?P<step>\\d+)")
    slow = find_slow_line(compiled)
    if slow is not None:
        raise InvalidValue(
            f"{quoted(pattern)} takes too long to match a line of {len(slow)} {slow[0]!r};"
            " avoid a repeat inside a repeat: write \\d+ instead of (\\d+)+"
        )
    return pattern


def project(raw: object) -> str:
    """Return a Google Cloud project id."""
    project_id = text(raw).strip()
    if not _PROJECT.fullmatch(project_id):
        raise InvalidValue(
            f"{quoted(project_id)} is not a project id; "
            "it has 6 to 30 lower-case letters, digits and hyphens"
        )
    return project_id


def version(raw: object) -> str:
    """Return a Python version with the spelling of the file: 3.10 is not 3.1."""
    written = raw.text if isinstance(raw, Scalar) else raw
    if not isinstance(written, str) or not _VERSION.fullmatch(written):
        raise InvalidValue(f"is {quoted(raw)}; expected a version of Python, like 3.12")
    return written


def image(raw: object) -> str:
    """Return the name of a container image."""
    name = text(raw).strip()
    if not _IMAGE.fullmatch(name) or len(name) > 400:
        raise InvalidValue(f"{quoted(name)} is not an image name; example: python:3.12-slim")
    return name


_MEMORY = re.compile(r"[1-9][0-9]*[bkmg]", re.IGNORECASE)


def registry_login(raw: object) -> str:
    """Return `service-account`, or the name of a secret."""
    return SERVICE_ACCOUNT if raw == SERVICE_ACCOUNT else variable(raw)


def memory_size(raw: object) -> str:
    """Return a size such as `16g`."""
    size = text(raw).strip()
    if not _MEMORY.fullmatch(size):
        raise InvalidValue(f"is {quoted(size)}; expected a size with its unit, like 16g or 512m")
    return size.lower()


def container(raw: object) -> dict[str, object]:
    """Return a map with `image`. The name of an image alone is enough."""
    return {"image": raw} if isinstance(raw, str) else map_of(raw, "image: python:3.12-slim")


def include(raw: object) -> tuple[str, ...]:
    """Return the files to send although they look secret: paths in workdir, or patterns."""
    if raw is None or raw in ([], ()):
        return ()
    return unique(check_all(enumerate(as_list(raw)), _include_entry))


def _include_entry(raw: object) -> str:
    name = text(raw)
    if "\n" in name or "\r" in name:
        raise InvalidValue(f"{quoted(name)} contains a line break; write one file per entry")
    if not set("*?[\\") & set(name):
        name = posixpath.normpath(name) + ("/" if name.endswith("/") else "")
    if name.startswith(("/", "~")) or ".." in name.split("/"):
        raise InvalidValue(f"{quoted(name)} is not inside workdir; write a path relative to it")
    if name.startswith(("!", "#")) or not name.strip("/ ."):
        raise InvalidValue(
            f"{quoted(name)} is not a file; write a path in workdir, or a pattern like *.py"
        )
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([name])
    except ValueError:
        raise InvalidValue(f"{quoted(name)} is not a .gitignore pattern") from None
    return name if set("*?[") & set(name) else name.rstrip("/")


def outputs(raw: object) -> tuple[str, ...]:
    """Return the files to copy from the hosts: paths in the folder of the program, or patterns."""
    if raw is None or raw in ([], ()):
        return ()
    return unique(check_all(enumerate(as_list(raw)), _output))


def _output(raw: object) -> str:
    name = line_of_text(raw)
    if name.startswith(("/", "~")) or "://" in name or ".." in name.split("/"):
        raise InvalidValue(
            f"{quoted(name)} is not in the folder of the program; write a path relative to it,"
            " like results/ or *.png"
        )
    normalized = posixpath.normpath(name)
    if normalized == ".":
        raise InvalidValue(
            f"{quoted(name)} is the folder of the program itself; name the files or folders that it"
            " writes"
        )
    return normalized + ("/" if name.endswith("/") else "")


def requirements(raw: object) -> str | tuple[str, ...]:
    """Return a file in workdir, or a list of packages to install."""
    if isinstance(raw, list | tuple):
        return tuple(check_all(enumerate(as_list(raw)), line_of_text))
    name = line_of_text(raw)
    if name.startswith(("/", "~", "-")) or ".." in name.split("/"):
        raise InvalidValue(
            f"{quoted(name)} is not inside workdir; name a file there, or list the packages"
        )
    return name


# --- buckets, mounts and the checkpoint folder ------------------------------------------------


def bucket_of(url: str) -> str:
    """Return `lab-data` for `gs://lab-data/imagenet`."""
    return url.removeprefix(GCS_SCHEME).partition("/")[0]


def storage_url(raw: object) -> str:
    """Return `gs://bucket/prefix` without a trailing slash."""
    url = text(raw).strip()
    if not url.startswith(GCS_SCHEME):
        raise InvalidValue(f"{quoted(url)} is not a bucket; write gs://bucket/folder")
    bucket, _, prefix = url.removeprefix(GCS_SCHEME).partition("/")
    if reason := _bucket_name_error(bucket):
        raise InvalidValue(f"{quoted(bucket)} is not a bucket name: {reason}")
    prefix = prefix.rstrip("/")
    *folders, last = prefix.split("/")
    if not prefix.isprintable() or {"", ".", ".."} & set(folders) or last in {".", ".."}:
        raise InvalidValue(
            f"{quoted(url)} contains an empty folder name, a folder named . or .., "
            "or an unprintable character"
        )
    if len(prefix.encode()) > 1000:
        raise InvalidValue("has a prefix longer than 1,000 bytes")
    return f"{GCS_SCHEME}{bucket}/{prefix}" if prefix else f"{GCS_SCHEME}{bucket}"


def _bucket_name_error(bucket: str) -> str | None:
    """Return the rule of Google that a bucket name breaks."""
    if not _BUCKET.fullmatch(bucket):
        return "use lower-case letters, digits, - _ and ., with a letter or digit at both ends"
    if len(bucket) < 3 or len(bucket) > 222 or any(len(part) > 63 for part in bucket.split(".")):
        return "it must have 3 to 63 characters"
    if "" in bucket.split("."):
        return "it contains two dots in a row"
    if _IP_ADDRESS.fullmatch(bucket):
        return "it looks like an IP address"
    if bucket.startswith("goog") or "google" in bucket or "g00gle" in bucket:
        return "Google reserves names that contain google"
    return None


def folder(raw: object) -> str:
    """Return a folder on a host, absolute or below the home folder, without a trailing slash."""
    path = text(raw)
    if not path.startswith(("/", "~/")):
        raise InvalidValue(f"{quoted(path)} is neither absolute nor below ~/")
    if not path.isprintable():
        raise InvalidValue(f"{quoted(path)} contains a line break or an unprintable character")
    if ".." in path.split("/"):
        raise InvalidValue(f"{quoted(path)} contains ..; write the folder without it")
    normalized = posixpath.normpath(path).replace("//", "/")
    if normalized in {"/", "~"}:
        raise InvalidValue(f"{quoted(path)} is the root or home folder; name a folder inside it")
    return normalized


def mounts(raw: object) -> dict[str, str]:
    """Return folders on the hosts, each with the bucket that is mounted there."""
    entries = map_of(raw, "/data: gs://lab-data")
    if len(entries) > _MAX_MOUNTS:
        raise InvalidValue(f"has {len(entries):,} mounts; the maximum is {_MAX_MOUNTS}")

    def pair(item: tuple[str, object]) -> tuple[str, str]:
        return folder(item[0]), storage_url(item[1])

    pairs = check_all(((path, (path, url)) for path, url in entries.items()), pair)
    clashes: list[tuple[KeyPath, str]] = [
        ((written,), f"is inside the mount {other}")
        for written, (path, _) in zip(entries, pairs, strict=True)
        for other, _ in pairs
        if path != other and is_below(path, other)
    ]
    if len(dict(pairs)) < len(pairs):
        clashes.append(((), "two mounts have the same folder"))
    if clashes:
        raise InvalidValue.from_errors(clashes)
    return dict(pairs)


def is_below(path: str, parent: str) -> bool:
    """Return True if a path is `parent` or inside it."""
    return path == parent or path.startswith(f"{parent}/")


def mount_of(path: str, mounts: Mapping[str, str]) -> str | None:
    """Return the mount that contains a path."""
    return next((mount for mount in mounts if is_below(path, mount)), None)


def checkpoint(raw: object) -> str:
    """Return a folder, or a location in a bucket."""
    location = text(raw).strip()
    return storage_url(location) if "://" in location else folder(location)
