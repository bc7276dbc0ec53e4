"""What a program finds: its environment, its working copy, its script."""

from __future__ import annotations

import os

from .system.files import below_root, read_json
from .wire import HostProgram


def on_this_host(checkpoint: str) -> str:
    """Where a checkpoint is: Cloud Storage is a folder on an emulated host."""
    buckets = os.environ.get("DRUMLINE_BUCKETS")
    if not buckets or not checkpoint.startswith("gs://"):
        return checkpoint
    path = os.path.normpath(os.path.join(buckets, checkpoint[len("gs://") :]))
    if not path.startswith(os.path.normpath(buckets) + os.sep):
        raise ValueError(f"{checkpoint!r} leads out of the bucket folder")
    os.makedirs(path, exist_ok=True)
    return path


def find_program(folder: str) -> HostProgram | None:
    """What the attempt runs; None where it was not prepared."""
    kept = read_json(folder, "program.json")
    return HostProgram(**kept) if kept else None


def prepared_program(folder: str) -> HostProgram:
    """What the attempt runs, of which nothing can be done before it was prepared."""
    program = find_program(folder)
    if program is None:
        raise FileNotFoundError(f"nothing was prepared in {folder}")
    return program


def environment_of(folder: str, program: HostProgram) -> dict[str, str]:
    """The host's environment, then the user's, then the secrets, then what we set."""
    # Left over from an earlier multislice job they hang the next one; SSH's say nothing here.
    made = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEGASCALE_", "SSH_"))
    }
    made.setdefault("PYTHONUNBUFFERED", "1")
    made.update(program.environment)
    made.update(read_json(folder, "secrets.json") or {})
    made.update(program.variables)
    started = read_json(folder, "started.json") or {}
    made["DRUMLINE_COORDINATOR"] = started.get("coordinator", "")
    made["DRUMLINE_HEARTBEAT"] = os.path.join(folder, "heartbeat.json")
    made["DRUMLINE_ENV_FILE"] = os.path.join(folder, "names.env")
    if program.checkpoint:
        made["DRUMLINE_CHECKPOINT"] = on_this_host(program.checkpoint)
    return made


def write_names(folder: str, program: HostProgram, environment: dict[str, str]) -> None:
    """Which variables a container gets. Names alone: it takes the values from its caller's."""
    names = set(program.environment) | set(read_json(folder, "secrets.json") or {})
    names |= {name for name in environment if name.startswith(("DRUMLINE_", "PYTHONUNBUFFERED"))}
    with open(os.path.join(folder, "names.env"), "w") as file:
        file.writelines(name + "\n" for name in sorted(names))


def working_copy(work: str) -> str:
    """Where the job's code is; an empty folder for a job without any."""
    path = below_root(work)
    os.makedirs(path, exist_ok=True)
    return path


def write_script(folder: str, name: str, text: str) -> str:
    """A script on disk, so that no value of the user's ever stands in a process list."""
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    return path
