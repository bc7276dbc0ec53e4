"""Processes: list them, find those of an attempt, start them detached, and kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from .files import read_json
from .log import append_to_log

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Json = dict[str, Any]


POLL_SECONDS = 0.1
KEEP_ALIVE_SECONDS = 2.0
HAS_PROC = os.path.isdir("/proc/self")


# Listing -----------------------------------------------------------------------------------------


def all_pids() -> Iterator[int]:
    """Yield the ids of all processes; nothing on a system without /proc."""
    if HAS_PROC:
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def process_stat(pid: int) -> tuple[str, int, int, int] | None:
    """Return state, group, session and start time of a process, or None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[2]), int(fields[3]), int(fields[19])


def process_environment(pid: int) -> bytes:
    """Return the environment that a process was started with, each variable ended by a NUL.

    The result is empty if the process has ended or belongs to another user.
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


def attempt_processes(folder: str) -> set[int]:
    """Return all live processes of the attempt, including those of a set-up step."""
    return program_processes(folder) | program_processes(folder, "step.json")


def program_processes(folder: str, record: str = "pid.json") -> set[int]:
    """Return all live processes of the program whose leader is recorded in a file.

    They are the leader's session and group, and every process with the attempt's environment. The
    kernel does not reuse an id while it names a group or session, so the session belongs to the
    program unless its leader is a later process with the same id.
    """
    record_of_leader = read_json(folder, record)
    leader = int(record_of_leader["pid"]) if record_of_leader else 0
    if record_of_leader:
        stat = process_stat(leader)
        ticks = record_of_leader["ticks"]
        if stat is not None and ticks is not None and stat[3] != ticks:
            leader = 0
    variable = b"DRUMLINE_HEARTBEAT=" + os.path.join(folder, "heartbeat.json").encode() + b"\0"
    pids = set()
    for pid in all_pids():
        stat = process_stat(pid)
        if pid == os.getpid() or stat is None or stat[0] in "ZX":
            continue
        if (leader and leader in stat[1:3]) or variable in process_environment(pid):
            pids.add(pid)
    if leader and not HAS_PROC:
        pids |= _group_id(leader)
    return pids


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


def send_signal(pids: set[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


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
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
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
        for number in range(1, signal.NSIG):
            # An ignored signal stays ignored in the program, which could then not catch SIGTERM.
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
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
