"""Python environments, which later jobs and attempts on this host reuse.

An environment is named by the digest of everything that decides its packages. It is made in a new
folder, under a lock, and its record is written last: a folder without a record is what a killed
installation left behind, and is never used. The record has a digest of the installed packages. If a
program has changed them, only that program's job reuses the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time

from .environment import program_environment, read_program, working_copy
from .files import CACHE, ROOT, acquire_lock, read_json, remove, write_json
from .log import append_to_log
from .processes import POLL_SECONDS, all_pids, process_environment
from .wire import PythonRecipe

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .wire import HostProgram

    Json = dict[str, Any]

SHARED = os.path.join(CACHE, "python")
OWN = os.path.join(ROOT, "python")
"""The folder of environments that their job changes. Emulated hosts do not share it."""
MAX_BYTES = 20 * 10**9
"""The size of all environments from which the least recently used are removed."""
MAX_AGE_SECONDS = 7 * 86400.0
IN_USE_SECONDS = 3600.0
"""The time after its last set-up in which an environment is not removed: the program may still
wait for the other hosts."""
VARIABLE = "DRUMLINE_ENVIRONMENT"
"""The variable with the folder of the environment, for the scripts of set-up and program."""


class CachedEnvironment:
    """The environment of an attempt: an existing one, or a new one that the caller installs."""

    def __init__(self, folder: str, recipe: PythonRecipe) -> None:
        """`folder` is that of the attempt."""
        self._folder = folder
        self._recipe = recipe
        self._parent = OWN if recipe.own else SHARED
        self._digest = environment_digest(folder, read_program(folder), recipe)
        self._lock: int | None = None
        self._path = ""
        self._started_at = 0.0

    def lock(self) -> bool:
        """Wait until no other attempt makes this environment. Return False if this one is stopped.

        The lock lasts until the end of this process.
        """
        waits = False
        while self._lock is None:
            self._lock = acquire_lock(_lock_file(self._parent, self._digest))
            if self._lock is None:
                if os.path.exists(os.path.join(self._folder, "stop.json")):
                    return False
                if not waits:
                    self._log("another job is making", "; waiting for it")
                waits = True
                time.sleep(POLL_SECONDS)
        return True

    def reuse(self) -> bool:
        """Use an existing environment for the attempt. Return False if there is none."""
        for name, record in sorted(_records(self._parent).items(), reverse=True):
            path = os.path.join(self._parent, name)
            if record["digest"] != self._digest or not _has_python(path):
                continue
            same_job = record["job"] == self._recipe.job and not record["shared"]
            changed = record["packages"] != installed_packages(path)
            made = f"(made {_clock_time(record['made'])}"
            if changed and not same_job:
                self._log("changed by a program and not reused", f" {made})")
                continue
            record["shared"] = not same_job
            write_json(record, path + ".json")
            self._select(path)
            self._log("reused", f" {made}{', changed by this job' if changed else ''})")
            return True
        return False

    def begin(self) -> None:
        """Choose a new folder for the installation, and remove those of killed installations."""
        os.makedirs(self._parent, mode=0o700, exist_ok=True)
        prefix = self._recipe.kind + "-" + self._digest[:12]
        known = _records(self._parent)
        for name in _folders(self._parent):
            if name.startswith(prefix) and name not in known:
                _remove_folder(os.path.join(self._parent, name))
        self._started_at = time.time()
        # Never the name of a previous environment, because set-up steps ran in it.
        self._select(os.path.join(self._parent, f"{prefix}-{int(1000 * self._started_at):x}"))

    def finish(self, installed: bool) -> None:
        """Record a complete installation, or remove an incomplete one. Remove old environments."""
        if not installed or not _has_python(self._path):
            _remove_folder(self._path)
            return
        # After a loss of power, the record must not exist without the files.
        os.sync()
        record = {
            "digest": self._digest,
            "made": self._started_at,
            "packages": installed_packages(self._path),
            "bytes": _size(self._path),
            "job": self._recipe.job,
            "shared": False,
        }
        write_json(record, self._path + ".json")
        self._log("made", f" in {time.time() - self._started_at:.0f} s")
        prune(self._parent)

    def _select(self, path: str) -> None:
        self._path = path
        write_json({"path": path}, self._folder, "environment.json")

    def _log(self, action: str, rest: str) -> None:
        append_to_log(self._folder, f"environment: {action} {self._digest[:12]}{rest}")


# The digest --------------------------------------------------------------------------------------

_VARIABLES = r"(PIP|UV|CONDA|MAMBA|CMAKE)_.*|CC|CXX|(C|CXX|CPP|LD|MAKE)FLAGS"
"""The variables that change an installation."""
_SETTINGS = (
    "~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf", "~/.config/uv/uv.toml",
    "/etc/uv/uv.toml", "~/.condarc",
)  # fmt: skip
_PROJECT_FILES = ("pyproject.toml", "uv.toml", "uv.lock", ".python-version")
_PROJECT_PACKAGE = r"\[build-system\]|\bpackage\s*=\s*true|\bworkspace\b|\bpath\s*="
"""The parts of a pyproject.toml with which uv installs the code itself."""
_NESTED_FILE = (
    r"(?:-r|-c|--requirements?|--constraints?|--build-constraints?|--overrides?)(?:\s+|=)?(\S.*)"
)
_OPTION_WITH_PATH = (
    r"(-e|--editable|-f|--find-links|-i|--index-url|--extra-index-url)(?:\s+|=)?(\S.*)"
)
_OPTION_ALONE = r"(?m)^(-[a-z]|--[a-z-]+)\n(?!-)"
_COMMENT = r"(^|\s+)#.*"
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz")
_LOGIN = r"://[^/@\s]*@"
"""The user and password in an address, which are no part of the digest."""


def _without_login(text: str) -> str:
    return re.sub(_LOGIN, "://", text)


def environment_digest(folder: str, program: HostProgram, recipe: PythonRecipe) -> str:
    """Return the digest of everything that decides the packages of an environment."""
    work, variables = working_copy(program.work), program_environment(folder, program)
    secrets = read_json(folder, "secrets.json") or {}
    lines = [*_requirement_lines(work, recipe)]
    references = {name for line in lines for name in re.findall(r"\$\{(\w+)\}", line)}
    values = {
        name: "" if name in secrets and "://" not in value else _without_login(value)
        for name, value in variables.items()
        if re.fullmatch(_VARIABLES, name) or name in references
    }
    paths = [path for path in map(_local_path, [*lines, *values.values()]) if path]
    paths += [value for value in values.values() if value and os.path.exists(f"{work}/{value}")]
    project = recipe.kind == "uv" and not (recipe.requirements or recipe.requirements_file)
    files = {name: _text(name) for name in _SETTINGS}
    if recipe.kind == "uv":
        files.update((name, _text(os.path.join(work, name))) for name in _PROJECT_FILES)
    installs_code = project and bool(re.search(_PROJECT_PACKAGE, files["pyproject.toml"]))
    linked = installs_code or any(
        re.match(r"(-e|--editable)\b", line) and _local_path(line) for line in lines
    )
    inputs = [
        recipe.kind, recipe.version, os.uname().machine, _python(recipe, variables, work),
        lines, sorted(values.items()), sorted(files.items()),
        # A local package depends on the code, whose folder has its digest in its name. An editable
        # one is a link to the working copy of this job.
        os.path.basename(work) if paths or installs_code else "",
        sorted(_outside_files(work, paths)),
        work if linked else "",
        recipe.job if recipe.own else "",
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _requirement_lines(work: str, recipe: PythonRecipe) -> Iterator[str]:
    """Yield the requirements and options, and those of all files that they name."""
    file = [f"-r {recipe.requirements_file}"] if recipe.requirements_file else []
    # An option and its value may be two items of a list.
    listed = re.sub(_OPTION_ALONE, r"\1 ", "\n".join(recipe.requirements)).splitlines()
    remaining = [(line, "") for line in [*file, *listed]]
    files_read = set()
    while remaining:
        line, folder = remaining.pop(0)
        line = _without_login(re.sub(_COMMENT, "", line).strip())
        if not line:
            continue
        yield line
        nested = re.fullmatch(_NESTED_FILE, line)
        if not nested:
            continue
        name = os.path.normpath(os.path.join(folder, nested.group(1).strip()))
        if "://" in line or name in files_read:
            continue
        files_read.add(name)
        text = _text(os.path.join(work, name)).replace("\\\n", " ")
        remaining += [(line, os.path.dirname(name)) for line in text.splitlines()]


def _local_path(line: str) -> str:
    """Return the path of files or packages that a requirement or option names; else empty."""
    option = re.fullmatch(_OPTION_WITH_PATH, line)
    target = option.group(2) if option else (line.partition(" @ ")[2] or line)
    target = target.split(";")[0].strip()
    if target.startswith("file:"):
        return "/" + target[len("file:") :].lstrip("/")
    if "://" in target:
        return ""
    is_path = option or "/" in target or target.startswith((".", "~"))
    return target if is_path or target.endswith(_ARCHIVES) else ""


def _outside_files(work: str, paths: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of files outside the code that an installation reads."""
    for path in paths:
        path = os.path.normpath(os.path.join(work, os.path.expanduser(path)))
        if (path + os.sep).startswith(work + os.sep):
            continue
        with contextlib.suppress(OSError):
            names = [path]
            if os.path.isdir(path):
                names += [os.path.join(path, name) for name in os.listdir(path)]
            for name in names:
                status = os.stat(name)
                yield name, status.st_size, status.st_mtime_ns


def _python(recipe: PythonRecipe, variables: dict[str, str], work: str) -> str:
    """Return the path and version of the Python from which an environment is made."""
    import subprocess

    if recipe.version and recipe.kind != "venv":
        return ""
    script = "import sys; print(sys.executable, sys.prefix, sys.version)"
    command = [f"python{recipe.version}" if recipe.version else "python3", "-c", script]
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # the installation reports the error
    return done.stdout.decode("utf-8", "replace")


def _text(path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
            return _without_login(file.read(1 << 24))
    except OSError:
        return ""


# Environments on the disk ------------------------------------------------------------------------


def environment_of(folder: str) -> str:
    """Return the folder of an attempt's environment; empty if it has none."""
    return str((read_json(folder, "environment.json") or {}).get("path", ""))


def installed_packages(path: str) -> str:
    """Return a digest of the packages in an environment, which an installation changes.

    The caches of bytecode are not part of it, nor files inside of packages.
    """
    folders = [os.path.join(path, "conda-meta")]
    with contextlib.suppress(OSError):
        library = os.path.join(path, "lib")
        folders += [os.path.join(library, name, "site-packages") for name in os.listdir(library)]
    entries = []
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name == "__pycache__":
                    continue
                file = os.path.join(entry.path, "RECORD") if entry.is_dir() else entry.path
                times = (0, 0)
                with contextlib.suppress(OSError):
                    status = os.stat(file)
                    times = status.st_size, status.st_mtime_ns
                entries.append((entry.name, *times))
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def prune(parent: str) -> None:
    """Remove unused environments: old ones, the least recently used beyond `MAX_BYTES`, and the
    remains of killed installations.
    """
    now, total, records = time.time(), 0, []
    for name, record in _records(parent).items():
        with contextlib.suppress(OSError):
            used_at = os.stat(os.path.join(parent, name + ".json")).st_mtime
            records.append((used_at, name, record))
    for used_at, name, record in sorted(records, key=lambda item: item[0], reverse=True):
        total += record["bytes"]
        if now - used_at > MAX_AGE_SECONDS or total > MAX_BYTES:
            _remove_if_unused(parent, name, record["digest"], now)
    known = {name for _, name, _ in records}
    for name in _folders(parent):
        if name not in known:
            _remove_if_unused(parent, name, name.partition("-")[2], now)


def _remove_if_unused(parent: str, name: str, digest: str, now: float) -> None:
    """Remove an environment that nobody makes, uses or is about to use."""
    lock = acquire_lock(_lock_file(parent, digest))
    if lock is None:
        return
    path = os.path.join(parent, name)
    variable = f"{VARIABLE}={path}".encode() + b"\0"
    with contextlib.suppress(OSError):
        recent = os.path.exists(path + ".json") and (
            now - os.stat(path + ".json").st_mtime < IN_USE_SECONDS
        )
        if not recent and not any(variable in process_environment(pid) for pid in all_pids()):
            remove(path + ".json")
            _remove_folder(path)
    os.close(lock)


def _lock_file(parent: str, digest: str) -> str:
    return os.path.join(parent, digest[:12] + ".lock")


_RECORD_FIELDS = {"digest", "made", "packages", "bytes", "job", "shared"}


def _records(parent: str) -> dict[str, Json]:
    """Return the records of complete environments by their names, without invalid ones."""
    records = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            record = read_json(parent, name) if name.endswith(".json") else None
            if record is not None and record.keys() >= _RECORD_FIELDS:
                records[name[: -len(".json")]] = record
    return records


def _folders(parent: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    return []


def _has_python(path: str) -> bool:
    return os.path.exists(os.path.join(path, "bin", "python"))


def _remove_folder(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _size(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _clock_time(moment: float) -> str:
    """Format as `14:02`, or as `18 Nov 14:02` on another day."""
    local, today = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M" if local[:3] == today[:3] else "%d %b %H:%M", local)
