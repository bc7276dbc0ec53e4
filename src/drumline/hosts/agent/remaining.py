"""The end of an attempt: none of its processes and no container of it remains."""

from __future__ import annotations

import contextlib

from .environment import find_program
from .log import append_to_log
from .processes import program_processes, terminate


def end_remaining(folder: str, grace: float = 5) -> None:
    """End the processes and the container that a program has left behind."""
    count = terminate(lambda: program_processes(folder), grace)
    container = container_name(folder)
    if container:
        # A container outlives its docker client, which the kernel may have killed.
        run_docker("rm", "--force", container)
    if count:
        append_to_log(folder, f"drumline: ended {count} process(es) the run left behind")


def run_docker(*arguments: str) -> None:
    """Run docker and ignore a failure: the container may have ended."""
    import shutil
    import subprocess

    command = [shutil.which("docker") or "docker", *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, check=False, capture_output=True, timeout=60)


def container_name(folder: str) -> str:
    """Return the name of the attempt's container, or an empty text without container."""
    program = find_program(folder)
    if program and any("docker run" in argument for argument in program.wrap):
        return str(program.variables.get("DRUMLINE_CONTAINER", ""))
    return ""
