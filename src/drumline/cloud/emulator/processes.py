"""Processes of this machine: finding descendants and marked processes, and ending them.

Linux has /proc for this. Elsewhere `ps` gives the tree, and fully detached processes are not
found: no process there can adopt orphans.
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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform.startswith("linux")


def adopt_orphans() -> None:
    """From now on every descendant whose parent dies becomes a child of this process.

    So none escapes, not even one that forked twice or made a session of its own.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ON_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents before children."""
    found: list[int] = []
    if ON_LINUX:
        waiting = [pid]
        while waiting:
            below = _children(waiting.pop(0))
            found += below
            waiting += below
        return found
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)  # noqa: S607
    parents = [tuple(map(int, line.split())) for line in listing.stdout.splitlines()]
    family = {pid}
    grew = True
    while grew:
        new = [child for child, parent in parents if parent in family and child not in family]
        family.update(new)
        found += new
        grew = bool(new)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # Each thread lists the children that it made.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def bearing(mark: str) -> list[int]:
    """Every process with that text in the environment it was started with."""
    wanted = mark.encode()
    found: list[int] = []
    for entry in os.listdir("/proc") if ON_LINUX else ():
        with contextlib.suppress(OSError):
            if entry.isdigit() and wanted in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
    return found


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Signal each process; those that are gone already are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, what)


def reap() -> None:
    """Reap every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(find: Callable[[], list[int]], deadline: float = 30.0) -> bool:
    """Kill what `find` finds, again and again, until it finds nothing; False if it never does.

    A process may fork between being found and being killed, so one round is never enough.
    """
    end = time.monotonic() + deadline
    pause = 0.001
    while pids := find():
        if time.monotonic() > end:
            return False
        # Stopped first, as in a power failure: no process should see and log another's death.
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        reap()
    return True


def stdout_of(pid: int) -> Path | None:
    """The regular file that a process writes its output to, if it is one."""
    link = Path(f"/proc/{pid}/fd/1")
    with contextlib.suppress(OSError):
        if link.is_file():
            return link.resolve()
    return None


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""
