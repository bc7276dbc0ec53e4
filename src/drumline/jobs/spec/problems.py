"""What is wrong with a job file, each problem as one line that a user can act on."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from drumline.chips.names import nearest
from drumline.jobs.spec.checks import Wrong, shown
from drumline.jobs.spec.yaml_lines import Path

# Names in other tools that are not similar in spelling.
_ELSEWHERE = {
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
    "docker": "python.image",
    "image": "python.image",
    "workers": "hosts",
    "max_retries": "retry.failures",
    "cwd": "workdir",
}
_MISSING = {
    "accelerator": "is missing; name the slice you want, like v4-8",
    "run": "is missing; say what to run, like python train.py",
    "kind": "is missing; it is one of system, uv, venv, conda, docker",
}


@dataclass(frozen=True)
class Problem:
    """A mistake: its file or option, its line, its key, and what to do."""

    source: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        """`job.yaml:4  zones: 'us-central2' is a region; …`."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}  {self.key}: {self.message}" if self.key else f"{place}  {self.message}"


class SpecError(Exception):
    """A job file is invalid. The text has one line for each problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Problems in the order of their lines; those of options come last."""
        ordered = sorted(
            dict.fromkeys(problems), key=lambda problem: (problem.line is None, problem.line or 0)
        )
        self.problems: tuple[Problem, ...] = tuple(ordered)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_of(path: Path) -> str:
    """A place in the file as sentences name it: `retry.failures`, `mounts /data`, `zones`."""
    # A list's items have the key of the list: the line says which it is.
    names = [_one_line(part) for part in path if isinstance(part, str)]
    if names[:1] == ["mounts"]:
        return " ".join(names)
    return ".".join(names)


def _one_line(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 60 else shown(name)


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The sentence for a key that does not exist."""
    keys = list(known)
    elsewhere = _ELSEWHERE.get(name.casefold())
    if elsewhere and elsewhere.partition(".")[0] in keys:
        return f"unknown key; did you mean {elsewhere}?"
    if near := nearest(name[:60], keys, 1):
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; the keys are {', '.join(keys)}"


def sentences(
    error: ValidationError, keys_at: Callable[[Path], Iterable[str]]
) -> Iterable[tuple[Path, str]]:
    """A sentence of ours for each error of validation. `keys_at` gives the keys of a map."""
    for found in error.errors(include_url=False):
        path: Path = found["loc"]
        cause = found.get("ctx", {}).get("error")
        match found["type"]:
            case _ if isinstance(cause, Wrong):
                yield from ((path + inside, message) for inside, message in cause.flaws)
            case "extra_forbidden":
                yield path, unknown_key(str(path[-1]), keys_at(path[:-1]))
            case "missing":
                yield path, _MISSING.get(str(path[-1]), "is missing")
            case _:
                yield path, f"is {shown(found['input'])}, which it cannot be"


def keys_of(model: type[BaseModel], inside: Mapping[str, type[BaseModel]], path: Path) -> list[str]:
    """The keys of the job file at a path: its own, or those of one of its maps."""
    return list((inside.get(str(path[0]), model) if path else model).model_fields)
