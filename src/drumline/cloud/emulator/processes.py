"""Processes of this machine: descendants, processes by their environment, and how to kill them.

Linux has /proc for this. On other systems `ps` lists the descendants, and detached processes are
not found, because no process can adopt orphans there.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from drumline.hosts.agent.processes import all_pids, process_environment

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform.startswith("linux")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies.

    No descendant can escape, even one that has forked twice or created a session.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ON_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents before children."""
    result: list[int] = []
    if ON_LINUX:
        queue = [pid]
        while queue:
            children = _children(queue.pop(0))
            result += children
            queue += children
        return result
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)  # noqa: S607
    parents = [tuple(map(int, line.split())) for line in listing.stdout.splitlines()]
    family = {pid}
    while True:
        new = [child for child, parent in parents if parent in family and child not in family]
        if not new:
            return result
        family.update(new)
        result += new


def _children(pid: int) -> list[int]:
    children: list[int] = []
    # Each thread lists the children that it has created.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                children += map(int, text.split())
    return children


def find_by_environment(text: str) -> list[int]:
    """Return all processes that were started with a text in their environment."""
    return [pid for pid in all_pids() if text.encode() in process_environment(pid)]


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def reap() -> None:
    """Reap all exited children."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_all(list_processes: Callable[[], list[int]], timeout: float = 30.0) -> bool:
    """Kill the listed processes until none is left. Return False if some remain.

    A process may fork after it was listed, so a single pass is not enough.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while pids := list_processes():
        if time.monotonic() > deadline:
            return False
        # Stopped first, as in a power failure: no process can log the death of another.
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        reap()
    return True


def output_file(pid: int) -> Path | None:
    """Return the regular file that is the standard output of a process, if it is one."""
    link = Path(f"/proc/{pid}/fd/1")
    with contextlib.suppress(OSError):
        if link.is_file():
            return link.resolve()
    return None


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has exited."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""
