"""The errors of a job file. Each becomes one line with its place and its fix."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from drumline.chips.names import nearest
from drumline.errors import UserError
from drumline.jobs.spec.checks import InvalidValue, quoted
from drumline.jobs.spec.yaml_lines import KeyPath

# Keys of other tools whose spelling is not close to ours.
_FOREIGN_KEYS = {
    "env": "environment",
    "envs": "environment",
    "cmd": "run",
    "command": "run",
    "script": "run",
    "tpu": "accelerator",
    "type": "accelerator",
    "pricing": "capacity",
    "tier": "capacity",
    "spot": "capacity",
    "gcsfuse": "mounts",
    "buckets": "mounts",
    "volumes": "mounts",
    "requirements": "python.requirements",
    "image": "docker.image",
    "container": "docker.image",
    "workers": "hosts",
    "max_retries": "retry.failures",
    "cwd": "workdir",
    "internal_ips": "external_ip",
    "internal-ips": "external_ip",
    "service-account": "service_account",
    "scopes": "service_account.scopes",
    "data_disk": "data_disks",
    "data-disk": "data_disks",
    "disks": "data_disks",
    "proxy_command": "ssh.proxy_command",
    "reserved": "capacity",
}
_MISSING = {
    "accelerator": "is missing; name a slice, like v4-8",
    "run": "is missing; write a command, like python train.py",
    "source": "is missing; name a disk, like imagenet",
    "image": "is missing; name an image, like python:3.12-slim",
    "kind": "is missing; it is one of system, uv, venv, conda, docker",
}


@dataclass(frozen=True)
class Problem:
    """One error in a job file: its file or option, line, key, and a message with the fix."""

    source: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        """Return a line such as `job.yaml:4  zones: 'us-central2' is a region; …`."""
        location = self.source if self.line is None else f"{self.source}:{self.line}"
        return (
            f"{location}  {self.key}: {self.message}" if self.key else f"{location}  {self.message}"
        )


class SpecError(UserError):
    """A job file is invalid. The text has one line for each problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Sort the problems by line, with those of `--set` last."""
        ordered = sorted(
            dict.fromkeys(problems), key=lambda problem: (problem.line is None, problem.line or 0)
        )
        self.problems: tuple[Problem, ...] = tuple(ordered)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_name(path: KeyPath) -> str:
    """Return a path as messages write it: `retry.failures`, `mounts /data`, `zones`.

    Items of a list have the key of the list, because the line identifies them.
    """
    names = [_one_line(part) for part in path if isinstance(part, str)]
    if names[:1] == ["mounts"]:
        return " ".join(names)
    return ".".join(names)


def _one_line(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 60 else quoted(name)


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return the message for a key that does not exist."""
    keys = list(known)
    translation = _FOREIGN_KEYS.get(name.casefold())
    if translation and translation.partition(".")[0] in keys:
        return f"unknown key; did you mean {translation}?"
    if near := nearest(name[:60], keys, 1):
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; the keys are {', '.join(keys)}"


def messages(
    error: ValidationError, keys_at: Callable[[KeyPath], Iterable[str]]
) -> Iterable[tuple[KeyPath, str]]:
    """Yield the path and a message for each error of pydantic. `keys_at` lists a map's keys."""
    for details in error.errors(include_url=False):
        path: KeyPath = details["loc"]
        cause = details.get("ctx", {}).get("error")
        match details["type"]:
            case _ if isinstance(cause, InvalidValue):
                yield from ((path + inner, message) for inner, message in cause.errors)
            case "extra_forbidden":
                yield path, unknown_key(str(path[-1]), keys_at(path[:-1]))
            case "missing":
                yield path, _MISSING.get(str(path[-1]), "is missing")
            case _:
                yield path, f"is {quoted(details['input'])}, which is not allowed here"


def keys_of(
    model: type[BaseModel], submodels: Mapping[str, type[BaseModel]], path: KeyPath
) -> list[str]:
    """Return the keys of the job file at a path: its own, or those of one of its maps."""
    return list((submodels.get(str(path[0]), model) if path else model).model_fields)
