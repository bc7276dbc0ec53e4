"""Processes: list them, find those of an attempt, start them detached, and kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from .files import read_json, write_json
from .log import append_to_log

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Json = dict[str, Any]


POLL_SECONDS = 0.1
KEEP_ALIVE_SECONDS = 2.0
HAS_PROC = os.path.isdir("/proc/self")
MAX_ORPHANS = 1000
_PR_SET_CHILD_SUBREAPER = 36


# Listing -----------------------------------------------------------------------------------------


def all_pids() -> Iterator[int]:
    """Yield the ids of all processes; none on a system without /proc."""
    if HAS_PROC:
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def process_stat(pid: int) -> tuple[str, int, int, int, int] | None:
    """Return state, group, session, start time and parent of a process; None if it has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[2]), int(fields[3]), int(fields[19]), int(fields[1])


def process_environment(pid: int) -> bytes:
    """Return the environment that a process was started with, with a NUL after each variable.

    The result is empty if the process has exited or belongs to a different user.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return b""
    return environment if environment.endswith(b"\0") else environment + b"\0"


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A zombie does not."""
    if HAS_PROC:
        stat = process_stat(pid)
        return stat is not None and stat[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def process_record(pid: int) -> Json:
    """Return a record that distinguishes a process from a later one with the same id."""
    stat = process_stat(pid)
    return {"pid": pid, "ticks": stat[3] if stat else None}


def find_process(record: Json | None) -> int:
    """Return the id of a recorded process, or 0 if another process has that id now."""
    if not record or not isinstance(record.get("pid"), int):
        return 0
    pid, ticks = int(record["pid"]), record.get("ticks")
    stat = process_stat(pid)
    return 0 if stat is not None and ticks is not None and stat[3] != ticks else pid


def attempt_processes(folder: str) -> set[int]:
    """Return all live processes of the attempt, including those of a set-up step."""
    return program_processes(folder) | program_processes(folder, "step.json")


def program_processes(folder: str, record: str = "pid.json") -> set[int]:
    """Return all live processes of the program whose leader is recorded in a file.

    They are the leader's session and group, every process with the attempt's environment, and all
    descendants of the waiter and of the orphans that it has adopted. The kernel does not reuse an
    id while it names a group or session, so the session belongs to the program unless its leader
    is a later process with the same id.
    """
    leader_record = read_json(folder, record)
    leader = find_process(leader_record)
    adopted = (read_json(folder, "adopted.json") or {}).get("processes")
    roots = [find_process(process) for process in adopted or () if isinstance(process, dict)]
    variable = b"DRUMLINE_HEARTBEAT=" + os.path.join(folder, "heartbeat.json").encode() + b"\0"
    stats = {}
    for pid in all_pids():
        stat = process_stat(pid)
        if stat is not None:
            stats[pid] = stat
    pids = {pid for pid in roots if pid}
    pids |= {pid for pid, stat in stats.items() if leader and leader in stat[1:3]}
    pids |= {pid for pid in stats.keys() - pids if variable in process_environment(pid)}
    waiter = find_process((leader_record or {}).get("waiter"))
    pids |= _descendants(stats, pids | {waiter} if waiter else pids)
    alive = {pid for pid in pids if pid in stats and stats[pid][0] not in "ZX"}
    if leader and not HAS_PROC:
        alive |= _group_id(leader)
    return alive - {os.getpid(), waiter}


def _descendants(stats: dict[int, tuple[str, int, int, int, int]], roots: set[int]) -> set[int]:
    """Return the children of these processes, their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat[4], []).append(pid)
    descendants: set[int] = set()
    remaining = [*roots]
    while remaining:
        new = set(children.get(remaining.pop(), ())) - descendants
        descendants |= new
        remaining += new
    return descendants


def session_processes(leader: int) -> set[int]:
    """Return all live processes of the session and the group of a leader."""
    if not HAS_PROC:
        return _group_id(leader)
    stats = ((pid, process_stat(pid)) for pid in all_pids())
    return {pid for pid, stat in stats if stat and stat[0] not in "ZX" and leader in stat[1:3]}


def _group_id(leader: int) -> set[int]:
    """Return the negative id of a group, which stands for its processes on a Mac."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-leader, 0)
        return {-leader}
    return set()


# Killing -----------------------------------------------------------------------------------------


def send_signal(pids: set[int], signum: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def terminate(list_processes: Callable[[], set[int]], grace: float) -> int:
    """Send SIGTERM, wait `grace` seconds, and send SIGKILL. Return the number of processes."""
    processes = list_processes()
    send_signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and list_processes():
        time.sleep(POLL_SECONDS / 2)
    # A process that forks while it is killed leaves a child, so repeat until none is left. A
    # process that is stuck in the kernel (a wedged device) never ends; `free_chips` reports it.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        remaining = list_processes()
        if not remaining:
            break
        send_signal(remaining, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 2)
    return len(processes)


# Children ----------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can escape.

    A process that forks twice and begins a session would otherwise become a child of `init`.
    """
    with contextlib.suppress(Exception):  # not on a Mac, nor in a Python without ctypes
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(leader: int) -> int | None:
    """Reap every exited child. Return the leader's wait status if the leader is among them."""
    leader_status = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return leader_status
        if not pid:
            return leader_status
        if pid == leader:
            leader_status = wait_status


class AdoptedOrphans:
    """Records the orphans that this process has adopted, for the case that it is killed."""

    def __init__(self, folder: str, leader: int) -> None:
        """`leader` is the child that this process has started itself."""
        self._folder = folder
        self._leader = leader
        self._recorded: set[int] = set()

    def update(self) -> None:
        """Record the adopted processes if they have changed."""
        try:
            # One small file, so it can be read at each poll. This process has one thread.
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = {int(pid) for pid in file.read().split()} - {self._leader}
        except OSError:
            return
        if children != self._recorded:
            processes = [process_record(pid) for pid in sorted(children)[:MAX_ORPHANS]]
            write_json({"processes": processes}, self._folder, "adopted.json")
            self._recorded = children


# Starting ----------------------------------------------------------------------------------------


def close_descriptors(keep: set[int]) -> None:
    """Close inherited files: an SSH channel stays open while a process holds its pipes."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        descriptors = list(range(1024))
    for descriptor in descriptors:
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def run_detached(task: Callable[[], None], folder: str, keep: set[int]) -> None:
    """Run `task` in a process that is independent of the connection, and return at once."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        close_descriptors(keep)
        # A host that shuts down signals all processes. The waiter must outlive the program.
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        os.chdir("/")
        task()
    except BaseException as error:
        with contextlib.suppress(OSError):
            append_to_log(folder, f"drumline: the agent failed: {error!r}")
    finally:
        os._exit(0)


def exec_program(
    folder: str, command: list[str], environment: dict[str, str], work: str
) -> NoReturn:
    """Replace this forked process by the program, in a new session and with the log as output."""
    try:
        os.setsid()
        os.umask(0o022)
        for signum in range(1, signal.NSIG):
            # An ignored signal stays ignored in the program, which could then not catch SIGTERM.
            with contextlib.suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
        # When memory runs out, the kernel should kill the program before sshd and the waiter.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("300")
        log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        close_descriptors(set())
        os.chdir(work)
        os.execvpe(command[0], command, environment)  # noqa: S606
    except BaseException as error:
        os.write(2, f"drumline: cannot run {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def exit_code(wait_status: int) -> int:
    """Return the exit code from a status of waitpid. A negative code is a signal."""
    # os.waitstatus_to_exitcode needs Python 3.9.
    if os.WIFSIGNALED(wait_status):
        return -os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)
