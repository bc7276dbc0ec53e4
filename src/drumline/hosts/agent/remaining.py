"""The end of an attempt: none of its processes and no container of it remains."""

from __future__ import annotations

from .containers import container_name, remove_container
from .log import append_to_log
from .processes import program_processes, terminate


def end_remaining(folder: str, grace: float = 5) -> None:
    """End the processes and the container that a program has left behind."""
    count = terminate(lambda: program_processes(folder), grace)
    container = container_name(folder)
    if container:
        # A container outlives its docker client, which the kernel may have killed.
        remove_container(container)
    if count:
        append_to_log(folder, f"drumline: ended {count} process(es) the run left behind")
