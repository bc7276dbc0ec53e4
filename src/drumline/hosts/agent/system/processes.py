"""Processes: who lives, who belongs to an attempt, and ending them all."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from .files import read_json
from .log import write_log

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Json = dict[str, Any]


POLL = 0.1
BEAT = 2.0


def process_stat(pid: int) -> tuple[str, int, int, int] | None:
    """State, group, session and start of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            parts = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return parts[0].decode(), int(parts[2]), int(parts[3]), int(parts[19])


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    if os.path.isdir("/proc/self"):
        stat = process_stat(pid)
        return stat is not None and stat[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def started_as(pid: int) -> Json:
    """What tells this process from a later one under the same number."""
    stat = process_stat(pid)
    return {"pid": pid, "ticks": stat[3] if stat else None}


def every_pid() -> Iterator[int]:
    """All processes one can see."""
    if os.path.isdir("/proc/self"):
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def members(folder: str, record: str = "pid.json") -> set[int]:
    """All live processes of the attempt: its session and group, and what left them but is marked.

    A number is not given to a new process while it still names a group or a session; so the
    session is ours unless its leader is a later process under the same number.
    """
    leader = read_json(folder, record)
    number = int(leader["pid"]) if leader else 0
    if leader:
        stat = process_stat(number)
        if stat is not None and leader["ticks"] is not None and stat[3] != leader["ticks"]:
            number = 0
    marker = b"DRUMLINE_HEARTBEAT=" + os.path.join(folder, "heartbeat.json").encode() + b"\0"
    found = set()
    for pid in every_pid():
        stat = process_stat(pid)
        if pid == os.getpid() or stat is None or stat[0] in "ZX":
            continue
        if number and number in stat[1:3]:
            found.add(pid)
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if marker in environ.read() + b"\0":
                found.add(pid)
    if number and not os.path.isdir("/proc/self"):
        # Without /proc (an emulated host on a Mac) the group is all one can name: by its minus.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-number, 0)
            found.add(-number)
    return found


def send(pids: set[int], number: int) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end(alive: Callable[[], set[int]], grace: float) -> int:
    """SIGTERM, grace, SIGKILL until none is left; how many there were."""
    first = alive()
    send(first, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and alive():
        time.sleep(POLL / 2)
    # Whoever forks while it is being killed leaves a child: look again until nobody is there. A
    # process stuck in the kernel (a wedged device) never goes; that is for `clear` to report.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = alive()
        if not left:
            break
        send(left, signal.SIGKILL)
        time.sleep(POLL / 2)
    return len(first)


def close_all_but(keep: set[int]) -> None:
    """Let go of what was inherited: an SSH channel stays open while anyone holds its pipes."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        numbers = list(range(1024))
    for number in numbers:
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def detach(work: Callable[[], None], folder: str, keep: set[int]) -> None:
    """Do `work` in a process that belongs to no connection; returns at once."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        close_all_but(keep)
        # A host that shuts down ends everyone; who waits must be the last to go.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        work()
    except BaseException as trouble:
        with contextlib.suppress(OSError):
            write_log(folder, f"drumline: the agent failed: {trouble!r}")
    finally:
        os._exit(0)


def become(folder: str, command: list[str], environment: dict[str, str], work: str) -> NoReturn:
    """Turn this fresh fork into the program: own session, the log as output, no other files."""
    try:
        os.setsid()
        os.umask(0o022)
        for number in range(1, signal.NSIG):
            # What is ignored stays ignored in the program, which could then not catch SIGTERM.
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        # Out of memory, the program should go before the SSH server and whoever waits for it.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("300")
        log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        close_all_but(set())
        os.chdir(work)
        os.execvpe(command[0], command, environment)  # noqa: S606
    except BaseException as trouble:
        os.write(2, f"drumline: cannot run {command[0]}: {trouble}\n".encode())
    finally:
        os._exit(127)


def session_of(leader: int) -> set[int]:
    """All live processes of the session and the group that this process leads."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-leader, 0)
            return {-leader}
        return set()
    found = ((pid, process_stat(pid)) for pid in every_pid())
    return {pid for pid, stat in found if stat and stat[0] not in "ZX" and leader in stat[1:3]}
