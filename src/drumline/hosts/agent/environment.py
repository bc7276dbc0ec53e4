"""The environment, the working copy and the script of a program."""

from __future__ import annotations

import os
import shlex

from .files import below_root, read_json
from .wire import HostProgram


def local_checkpoint(checkpoint: str) -> str:
    """Return the path of a checkpoint. On an emulated host, Cloud Storage is a folder."""
    buckets = os.environ.get("DRUMLINE_BUCKETS")
    if not buckets or not checkpoint.startswith("gs://"):
        return checkpoint
    path = os.path.normpath(os.path.join(buckets, checkpoint[len("gs://") :]))
    if not path.startswith(os.path.normpath(buckets) + os.sep):
        raise ValueError(f"{checkpoint!r} points outside the folder of buckets")
    os.makedirs(path, exist_ok=True)
    return path


def find_program(folder: str) -> HostProgram | None:
    """Return the program of the attempt, or None if the attempt was not prepared."""
    fields = read_json(folder, "program.json")
    return HostProgram(**fields) if fields else None


def read_program(folder: str) -> HostProgram:
    """Return the program of the attempt. Raise FileNotFoundError if it was not prepared."""
    program = find_program(folder)
    if program is None:
        raise FileNotFoundError(f"the attempt in {folder} was not prepared")
    return program


def host_environment(folder: str, program: HostProgram | None) -> dict[str, str]:
    """Return the variables of the host, with the Python of the job first in PATH."""
    environment = dict(os.environ)
    if program is not None and program.interpreter:
        folders = [os.path.join(folder, "bin"), os.path.dirname(program.interpreter)]
        folders.append(environment.get("PATH", os.defpath))
        environment["PATH"] = os.pathsep.join(folders)
    return environment


def write_interpreter(folder: str, interpreter: str) -> None:
    """Write the commands `python` and `python3`, which start this Python.

    They are no links, because a linked Python does not find the packages of its environment.
    """
    os.makedirs(os.path.join(folder, "bin"), exist_ok=True)
    for name in ("python", "python3"):
        script = f'#!/bin/sh\nexec {shlex.quote(interpreter)} "$@"'
        os.chmod(write_script(os.path.join(folder, "bin"), name, script), 0o700)


def program_environment(folder: str, program: HostProgram) -> dict[str, str]:
    """Return the variables of the host, the user, the secrets and Drumline, in that order."""
    # Variables of a previous multislice job make the next job hang.
    environment = {
        name: value
        for name, value in host_environment(folder, program).items()
        if not name.startswith(("MEGASCALE_", "SSH_"))
    }
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.update(program.environment)
    environment.update(read_json(folder, "secrets.json") or {})
    environment.update(program.variables)
    started = read_json(folder, "started.json") or {}
    environment["DRUMLINE_COORDINATOR"] = started.get("coordinator", "")
    environment["DRUMLINE_HEARTBEAT"] = os.path.join(folder, "heartbeat.json")
    cached = read_json(folder, "environment.json")
    if cached:
        environment["DRUMLINE_ENVIRONMENT"] = cached["path"]
    environment["DRUMLINE_ENV_FILE"] = os.path.join(folder, "names.env")
    if program.checkpoint:
        environment["DRUMLINE_CHECKPOINT"] = local_checkpoint(program.checkpoint)
    return environment


def write_variable_names(folder: str, program: HostProgram, environment: dict[str, str]) -> None:
    """Write the names of the variables for a container, which docker reads from its own."""
    names = set(program.environment) | set(read_json(folder, "secrets.json") or {})
    names |= {name for name in environment if name.startswith(("DRUMLINE_", "PYTHONUNBUFFERED"))}
    with open(os.path.join(folder, "names.env"), "w") as file:
        file.writelines(name + "\n" for name in sorted(names))


def working_copy(work: str) -> str:
    """Return the folder of the job's code, which is empty for a job without code."""
    path = below_root(work)
    os.makedirs(path, exist_ok=True)
    return path


def write_script(folder: str, name: str, text: str) -> str:
    """Write a script to a file, so that its text does not appear in a list of processes."""
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    return path
