"""The container of an attempt, which is not a child of the agent."""

from __future__ import annotations

import contextlib
import time

from .environment import find_program

GRACE_SECONDS = 3.0
"""Seconds that the container of a previous attempt has between SIGTERM and its removal."""


def run_docker(*arguments: str) -> str:
    """Run docker and return its output, which is empty after a failure: docker may be missing."""
    import shutil
    import subprocess

    command = [shutil.which("docker") or "docker", *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        completed = subprocess.run(command, check=False, capture_output=True, timeout=60)
        if completed.returncode == 0:
            return completed.stdout.decode("utf-8", "replace")
    return ""


def container_name(folder: str) -> str:
    """Return the name of the attempt's container, or an empty text without container."""
    program = find_program(folder)
    if program and any("docker run" in argument for argument in program.wrap):
        return str(program.variables.get("DRUMLINE_CONTAINER", ""))
    return ""


def container_processes(container: str) -> set[int]:
    """Return the ids on this host of the processes of a running container."""
    if not container:
        return set()
    words = run_docker("top", container, "-eo", "pid").split()
    return {int(word) for word in words if word.isdigit()}


def exists(container: str) -> bool:
    """Return True if a container exists, running or not."""
    return bool(run_docker("ps", "--all", "--quiet", "--filter", f"name=^/{container}$").strip())


def signal_container(container: str) -> None:
    """Send SIGTERM to all processes of a container: the first one ignores it by default."""
    run_docker("exec", container, "sh", "-c", "kill -TERM -1")


def remove_container(container: str) -> None:
    """Remove a container: SIGKILL would only end the docker client."""
    run_docker("rm", "--force", container)


def end_container(folder: str) -> None:
    """Stop the container of a previous attempt, as `terminate` does with processes."""
    container = container_name(folder)
    if container and exists(container):
        signal_container(container)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and container_processes(container):
            time.sleep(0.2)
        remove_container(container)
