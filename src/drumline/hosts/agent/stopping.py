"""Ending an attempt: SIGTERM, grace, SIGKILL to all that belongs to it, its container too."""

from __future__ import annotations

import contextlib
import functools
import os
import time

from .caller import say
from .environment import find_program
from .status import status, waited_for
from .system.files import remove, take_lock, write_json
from .system.processes import POLL, detach, end, members


def stop(folder: str, grace: str) -> None:
    """End the program on this host and see to it that it never starts again."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.exists(os.path.join(folder, "stop.json")):
        write_json({"at": time.time()}, folder, "stop.json")
    remove(folder, "secrets.json")
    lock = take_lock(os.path.join(folder, "stopping.lock"))
    if lock is not None:
        detach(lambda: end_attempt(folder, float(grace)), folder, keep={lock})
        os.close(lock)
    while True:
        lock = take_lock(os.path.join(folder, "stopping.lock"))
        if lock is not None:
            break
        time.sleep(POLL / 2)
    os.close(lock)
    say(status(folder))


def end_attempt(folder: str, grace: float) -> None:
    """The work of `stop`, in a process that no connection holds."""

    name = container_of(folder)
    if name:
        # The first process of a container ignores SIGTERM unless it asked for it; tell the rest.
        docker("exec", name, "sh", "-c", "kill -TERM -1")
    end(functools.partial(everyone, folder), grace)
    if name:
        # A container is not a child of ours: SIGKILL ends its client only.
        docker("rm", "--force", name)
    deadline = time.monotonic() + 5
    while waited_for(folder) and time.monotonic() < deadline:
        time.sleep(POLL / 2)


def everyone(folder: str) -> set[int]:
    """The attempt's processes, those of a set-up step among them."""
    return members(folder) | members(folder, "step.json")


def docker(*words: str) -> None:
    """Ask docker for something that may have become needless."""
    import shutil
    import subprocess

    command = [shutil.which("docker") or "docker", *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, check=False, capture_output=True, timeout=60)


def container_of(folder: str) -> str:
    """The name of the attempt's container, if it runs in one."""
    program = find_program(folder)
    if program and any("docker run" in part for part in program.wrap):
        return str(program.variables.get("DRUMLINE_CONTAINER", ""))
    return ""
