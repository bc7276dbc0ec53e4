"""The agent: runs one attempt's program on one host and outlives every connection.

This one file is pushed to each host and called as `python3 agent.py VERB …`. It needs nothing but
Python 3.8. All it knows stands in files below ~/.drumline, each replaced in one rename, so any
later call, from any connection, finds out what became of an attempt:

    jobs/<job>/<attempt>/  program.json  what to run             pid.json    the program's leader
                           started.json  claimed once, for good  exit.json   how it ended
                           log           set-up and program      stop.json   it must not run (on)
                           times         when the log grew
                           secrets.json  0600, gone once the program has them in its environment
                           heartbeat.json, error.json            written by the program itself
    steps/<key>.json       a set-up step that ran on this host
    code/<sha>.tar.gz      the code as it was sent               work/<job>/<sha>/  unpacked

Three processes belong to a running attempt: the program, in a session of its own, which writes
straight into the log; the one that waits for it; and, while somebody looks, `watch`. Either of the
last two may be killed without the program noticing.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    Json = dict[str, Any]

ROOT = os.path.join(os.path.expanduser("~"), ".drumline")
POLL = 0.1
BEAT = 2.0
CHUNK = 48 * 1024
TAIL_LINES = 20
# A command whose caller left may put its things away, but nobody waits for what it says.
EXEC_GRACE = 3.0

TRACEBACK = b"Traceback (most recent call last)"
# What ends a JAX program without a traceback, or is the reason behind the traceback that follows.
FATAL = re.compile(
    rb"Traceback \(most recent call last\)|^Fatal Python error|^F\d{4} \d\d:|open\(/dev/vfio"
    rb"|Couldn.t open iommu group|Failed to initialize TPU system|TPU initialization failed"
    rb"|No accelerator found|libtpu\.so already in use",
    re.MULTILINE,
)
FRAME = re.compile(r'^\s+File "(.+?)", line (\d+)')
CHAINED = ("During handling of the above", "The above exception was the direct cause")
NOT_THE_USERS = re.compile(r"site-packages|dist-packages|/lib/python3|^<")

# A shell that is told to stop together with what it runs would be gone at once, and with it the
# exit code of a program that saves its work and asks (with 75) to be started again. A shell with a
# trap waits for the program. On the first line of the script, so that its line numbers stay true.
TRAP = "trap 'if [ $? = 75 ]; then exit 75; fi; trap - TERM; kill -TERM $$' TERM; "

# Has a set-up step write down which of its commands failed, with its exit code and its line. What
# ends by `exit` fails at no command; its line is found by its text. On the first line as well.
WITNESS = (
    'set -E; trap \'echo "$? $LINENO $BASH_COMMAND" >"$DRUMLINE_FAILED"\' ERR; '
    'trap \'drumline_code=$?; if [ $drumline_code != 0 ] && [ ! -e "$DRUMLINE_FAILED" ]; then '
    'echo "$drumline_code 0 $BASH_COMMAND" >"$DRUMLINE_FAILED"; fi\' EXIT; '
)


# Files -------------------------------------------------------------------------------------------


def read_json(*path: str) -> Json | None:
    """The object in a file; None where there is none or it is not whole."""
    try:
        # The program writes some of these: a pipe in its place must not hold us up, and a huge one
        # is cut, and so taken for none.
        number = os.open(os.path.join(*path), os.O_RDONLY | os.O_NONBLOCK)
        with open(number, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return None
            value = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(value: Json, *path: str) -> None:
    """Replace a file in one rename, readable by its owner alone."""
    final = os.path.join(*path)
    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    os.replace(draft, final)


def remove(*path: str) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(*path))


def say(value: Json) -> None:
    """One line to whoever called."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def heard() -> Json:
    """What the caller sent on standard input."""
    value = json.load(sys.stdin)
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value


def heard_line() -> Json:
    """The first line the caller sent, and not a byte more: the rest is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value


def take_lock(path: str, shared: bool = False) -> int | None:
    """A lock that is held as long as any copy of the descriptor is open; None when taken."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def below_root(name: str) -> str:
    """A folder of ours by the name the server uses for it."""
    path = os.path.normpath(os.path.join(ROOT, name))
    if not path.startswith(ROOT + os.sep):
        raise ValueError(f"{name!r} is not below {ROOT}")
    return path


def log_size(folder: str) -> int:
    """How much of the log there is."""
    try:
        return os.stat(os.path.join(folder, "log")).st_size
    except OSError:
        return 0


def write_log(folder: str, text: str) -> None:
    """Add a line of ours to the attempt's log."""
    with open(os.path.join(folder, "log"), "ab") as log:
        log.write(text.encode() + b"\n")


def read_log(folder: str, offset: int, most: int) -> bytes:
    """A piece of the log."""
    try:
        with open(os.path.join(folder, "log"), "rb") as log:
            log.seek(offset)
            return log.read(most)
    except OSError:
        return b""


class Growth:
    """Notes when the log grew, so that whoever reads it later can tell when a line was written."""

    def __init__(self, folder: str, offset: int) -> None:
        """Begin where the output begins whose growth is to be noted."""
        self.folder = folder
        self.size = offset
        self.noted = 0.0

    def look(self) -> None:
        """Note the moment if there is more than at the last look; once a second is enough."""
        size, now = log_size(self.folder), time.time()
        if size > self.size and abs(now - self.noted) >= 1:
            with open(os.path.join(self.folder, "times"), "a") as times:
                times.write(f"{self.size} {now:.2f}\n")
            self.noted = now
        self.size = size


def stretches(folder: str) -> Iterator[tuple[int, float]]:
    """Up to which place the log was written at which moment, in order."""
    written = 0.0
    with contextlib.suppress(OSError), open(os.path.join(folder, "times")) as times:
        for line in times:
            with contextlib.suppress(ValueError):
                place, moment = line.split()
                yield int(place), written or float(moment)
                written = float(moment)
    # What came after the last moment that was noted came within a second of it.
    yield sys.maxsize, written or time.time()


def last_lines(folder: str) -> list[str]:
    """The end of the log."""
    size = log_size(folder)
    text = read_log(folder, max(0, size - 16384), 16384).decode("utf-8", "replace")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-TAIL_LINES:]


# Processes ---------------------------------------------------------------------------------------


def boot() -> str:
    """Differs after a restart of the host; empty where the system does not say."""
    emulated = os.environ.get("DRUMLINE_DEV")
    place = emulated + "/boot_id" if emulated else "/proc/sys/kernel/random/boot_id"
    try:
        with open(place) as file:
            return file.read().strip()
    except OSError:
        return ""


PREEMPTED = "/computeMetadata/v1/instance/preempted"
METADATA_EVERY = 5.0
_asked_metadata: Json = {"at": None, "preempted": False}


def going_down() -> str:
    """Why this host will be gone in a moment, as far as it knows itself; empty where it stays."""
    emulated = os.environ.get("DRUMLINE_DEV")
    if emulated:
        try:
            with open(emulated + "/going_down") as file:
                return file.read().strip()
        except OSError:
            return ""
    if preempted():
        return "preempted"
    # systemd forbids new logins as the first thing it does when it shuts down.
    return "shutting down" if os.path.exists("/run/nologin") else ""


def preempted() -> bool:
    """Whether Google has announced that it takes this machine; asked every few seconds at most."""
    last = _asked_metadata["at"]
    if _asked_metadata["preempted"] or (last and time.monotonic() < last + METADATA_EVERY):
        return bool(_asked_metadata["preempted"])
    _asked_metadata["at"] = time.monotonic()
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            if "Google" not in file.read():
                return False
    except OSError:
        return False
    import http.client  # only here: it takes as long to load as all the rest

    with contextlib.suppress(OSError, http.client.HTTPException):
        server = http.client.HTTPConnection("metadata.google.internal", timeout=0.5)
        try:
            server.request("GET", PREEMPTED, headers={"Metadata-Flavor": "Google"})
            _asked_metadata["preempted"] = server.getresponse().read(10).strip() == b"TRUE"
        finally:
            server.close()
    return bool(_asked_metadata["preempted"])


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


# Environment -------------------------------------------------------------------------------------


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


def environment_of(folder: str, program: Json) -> dict[str, str]:
    """The host's environment, then the user's, then the secrets, then what we set."""
    # Left over from an earlier multislice job they hang the next one; SSH's say nothing here.
    made = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEGASCALE_", "SSH_"))
    }
    made.setdefault("PYTHONUNBUFFERED", "1")
    made.update(program["environment"])
    made.update(read_json(folder, "secrets.json") or {})
    made.update(program["variables"])
    started = read_json(folder, "started.json") or {}
    made["DRUMLINE_COORDINATOR"] = started.get("coordinator", "")
    made["DRUMLINE_HEARTBEAT"] = os.path.join(folder, "heartbeat.json")
    made["DRUMLINE_ENV_FILE"] = os.path.join(folder, "names.env")
    if program.get("checkpoint"):
        made["DRUMLINE_CHECKPOINT"] = on_this_host(program["checkpoint"])
    return made


def write_names(folder: str, program: Json, environment: dict[str, str]) -> None:
    """Which variables a container gets. Names alone: it takes the values from its caller's."""
    names = set(program["environment"]) | set(read_json(folder, "secrets.json") or {})
    names |= {name for name in environment if name.startswith(("DRUMLINE_", "PYTHONUNBUFFERED"))}
    with open(os.path.join(folder, "names.env"), "w") as file:
        file.writelines(name + "\n" for name in sorted(names))


def working_copy(program: Json) -> str:
    """Where the job's code is; an empty folder for a job without any."""
    path = below_root(program["work"])
    os.makedirs(path, exist_ok=True)
    return path


def write_script(folder: str, name: str, text: str) -> str:
    """A script on disk, so that no value of the user's ever stands in a process list."""
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    return path


# How a program ended -----------------------------------------------------------------------------


def described(text: str, work: str) -> str:
    """`train.py:214  ValueError: …` from the first traceback in the text and what it led to."""
    lines = text.splitlines()
    head = TRACEBACK.decode()
    start = next((at for at, line in enumerate(lines) if head in line), None)
    if start is None:
        return ""
    group = "Exception Group " in lines[start]
    prefix = "" if group else lines[start][: lines[start].index(head)]

    def plain(line: str) -> str:
        if group:
            return re.sub(r"^\s*[|+] ?", "", line)
        return line[len(prefix) :] if line.startswith(prefix) else line

    frames: list[tuple[str, str]] = []
    at = start + 1
    while at < len(lines):
        line = plain(lines[at])
        at += 1
        frame = FRAME.match(line)
        if frame:
            frames.append((frame.group(1), frame.group(2)))
        elif line.startswith(head):
            frames = []
        elif not line.strip() or line[0] in " \t" or line.startswith(CHAINED):
            continue
        else:
            ahead = [plain(later) for later in lines[at : at + 60]]
            chain = next((n for n, later in enumerate(ahead) if later.startswith(CHAINED)), None)
            if chain is None or any(later.startswith(head) for later in ahead[:chain]):
                return (place(frames, work) + line.strip())[:500]
            at += chain
    return place(frames, work) + "error" if frames else ""


def place(frames: list[tuple[str, str]], work: str) -> str:
    """The innermost frame in the user's own code."""
    if not frames:
        return ""
    theirs = [frame for frame in frames if not NOT_THE_USERS.search(frame[0])]
    path, line = (theirs or frames)[-1]
    inside = path.startswith(work + os.sep)
    return f"{os.path.relpath(path, work) if inside else os.path.basename(path)}:{line}  "


class FirstError:
    """Looks through the log as it grows, for the moment the program began to fail."""

    def __init__(self, folder: str, offset: int) -> None:
        """Start where the program's own output starts."""
        self.folder = folder
        self.position = offset
        self.at: float | None = None
        self.offset = offset

    def look(self) -> None:
        """Take in what was written since the last look."""
        if self.at is not None:
            # A program that reported progress after a traceback had caught the exception.
            with contextlib.suppress(OSError):
                beat = os.stat(os.path.join(self.folder, "heartbeat.json")).st_mtime
                if beat > self.at + 0.5:
                    self.at = None
        for _ in range(16):
            data = read_log(self.folder, self.position, 1 << 20)
            if self.at is None:
                found = FATAL.search(data)
                if found:
                    self.at = time.time()
                    self.offset = self.position + data.rfind(b"\n", 0, found.start()) + 1
            # A phrase cut in two by the end of what there is now is whole the next time.
            line = data.rfind(b"\n") + 1
            step = line or (len(data) if len(data) > 65536 else 0)
            self.position += step
            if not step:
                return

    def text(self, work: str) -> str:
        """What it says, in one line."""
        data = read_log(self.folder, self.offset, 1 << 18)
        first = data.split(b"\n", 1)[0]
        if TRACEBACK in first:
            return described(data.decode("utf-8", "replace"), work)
        return first.decode("utf-8", "replace").strip()[:500]


def moment(value: Any, otherwise: float | None) -> float | None:
    """A time that the program reported, if it is one."""
    return value if isinstance(value, (int, float)) else otherwise


def conclude(folder: str, code: int | None, ended: float, first: FirstError) -> Json:
    """How the attempt ended on this host; code None where nobody was there to see."""
    ending: Json = {"exit_code": -9 if code is None else code, "ended_at": ended}
    lines = last_lines(folder)
    reported = read_json(folder, "error.json")
    work = working_copy(read_json(folder, "program.json") or {"work": "work"})
    error = ""
    at: float | None = None
    if code == 0:
        pass
    elif os.path.exists(os.path.join(folder, "stop.json")):
        error, at = "stopped", ended
    elif reported:
        error, at = str(reported.get("error", "")), moment(reported.get("at"), ended)
    elif code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        error, at = "killed (SIGKILL), most likely out of memory", ended
    elif first.at is not None:
        error, at = first.text(work), first.at
    elif code is None:
        error, at = "exit code unknown: who waited for the program was killed", ended
    else:
        error, at = (lines[-1] if lines else f"exit code {code}"), ended
    # bash names the script by its path on the host, which says nothing to the user.
    error = error.replace(folder + os.sep, "")
    ending.update(error=error[:500], error_at=at, tail=lines)
    return ending


def status(folder: str) -> Json:
    """What is known of the attempt: state is none, running, exited, or lost by a restart."""
    started = read_json(folder, "started.json")
    beat = read_json(folder, "heartbeat.json")
    known: Json = {
        "state": "none",
        "prepared": os.path.exists(os.path.join(folder, "program.json")),
        "stopped": os.path.exists(os.path.join(folder, "stop.json")),
        "going_down": going_down(),
        "heartbeat": beat,
    }
    if started is None:
        return known
    known.update(
        state="running", started_at=started["at"], coordinator=started.get("coordinator", "")
    )
    ending = read_json(folder, "exit.json")
    if ending is None and not waited_for(folder) and not program_lives(folder):
        ending = read_json(folder, "exit.json")
        if ending is None and started["boot"] != boot():
            known["state"] = "lost"
            return known
        if ending is None:
            first = FirstError(folder, started["log_from"])
            first.look()
            ended = os.stat(os.path.join(folder, "log")).st_mtime if log_size(folder) else 0.0
            if first.at is not None:
                first.at = ended
            ending = conclude(folder, None, ended or time.time(), first)
            write_json(ending, folder, "exit.json")
    if ending is not None:
        known.update(ending, state="exited")
    elif os.path.exists(os.path.join(folder, "error.json")):
        reported = read_json(folder, "error.json") or {}
        known.update(
            error=str(reported.get("error", "")), error_at=moment(reported.get("at"), None)
        )
    return known


def waited_for(folder: str) -> bool:
    """Whether the process that waits for the program is there."""
    lock = take_lock(os.path.join(folder, "waiting.lock"), shared=True)
    if lock is None:
        return True
    os.close(lock)
    return False


def program_lives(folder: str) -> bool:
    """Whether the program runs, though nobody may be waiting for it."""
    leader = read_json(folder, "pid.json")
    if leader is None or not lives(leader["pid"]):
        return False
    stat = process_stat(leader["pid"])
    return stat is None or leader["ticks"] in (None, stat[3])


# Verbs -------------------------------------------------------------------------------------------


def prepare(folder: str, limit: str) -> None:
    """Free the chips, write down what the attempt runs, and unpack its code if it is here.

    What has been started, or stopped, is left as it is.
    """
    sent = heard()
    trouble = clear(folder, float(limit))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    started = os.path.exists(os.path.join(folder, "started.json"))
    if not started and not os.path.exists(os.path.join(folder, "stop.json")):
        write_json(sent["program"], folder, "program.json")
        write_json(sent["secrets"], folder, "secrets.json")
    have = sent["archive"] is None or unpacked(sent["archive"], sent["program"]["work"])
    say({"trouble": trouble, "have_code": have})


def start(folder: str) -> None:
    """Start the program, once for ever; a second call reports the first one's program."""
    coordinator = heard().get("coordinator", "")
    deadline = time.monotonic() + 10
    while not os.path.exists(os.path.join(folder, "started.json")):
        if os.path.exists(os.path.join(folder, "stop.json")):
            break
        lock = take_lock(os.path.join(folder, "waiting.lock"))
        if lock is not None:
            if not os.path.exists(os.path.join(folder, "started.json")):
                record = {"at": time.time(), "boot": boot(), "coordinator": coordinator}
                write_json(dict(record, log_from=log_size(folder)), folder, "started.json")
                detach(functools.partial(run_and_wait, folder), folder, keep={lock})
            os.close(lock)
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"another start of {folder} does not come to an end")
        time.sleep(POLL / 4)
    while not os.path.exists(os.path.join(folder, "pid.json")) and time.monotonic() < deadline:
        if not waited_for(folder):
            break
        time.sleep(POLL / 4)
    say(status(folder))


def run_and_wait(folder: str) -> None:
    """The process that waits: starts the program, notes the first error and the end."""
    program = read_json(folder, "program.json") or {}
    started = read_json(folder, "started.json") or {}
    environment = environment_of(folder, program)
    write_names(folder, program, environment)
    script = write_script(folder, "run.sh", TRAP + program["run"])
    command = [*program["wrap"], "bash", "-eo", "pipefail", script]
    work = working_copy(program)
    child = os.fork()
    if child == 0:
        # Before it is anyone's program it writes down who it is: it never runs unrecorded.
        write_json(started_as(os.getpid()), folder, "pid.json")
        become(folder, command, environment, work)
    remove(folder, "secrets.json")
    first = FirstError(folder, started["log_from"])
    growth = Growth(folder, started["log_from"])
    while True:
        done, result = os.waitpid(child, os.WNOHANG)
        ended = time.time()
        with contextlib.suppress(Exception):
            first.look()
            growth.look()
        if done:
            break
        time.sleep(POLL)
    code = -os.WTERMSIG(result) if os.WIFSIGNALED(result) else os.WEXITSTATUS(result)
    stopping = os.path.exists(os.path.join(folder, "stop.json"))
    if stopping or code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        # Told to stop, the shell goes at once while what it ran may be saving a checkpoint. Who
        # stops us keeps the time; a host that shuts down leaves about a minute.
        deadline = time.monotonic() + (3600 if stopping else 60)
        while members(folder) and time.monotonic() < deadline:
            time.sleep(POLL)
        ended = time.time()
    write_json(conclude(folder, code, ended, first), folder, "exit.json")
    left = end(lambda: members(folder), grace=5)
    if left:
        write_log(folder, f"drumline: ended {left} process(es) the run left behind")


def step(folder: str) -> None:
    """Run one set-up step unless it ran on this host since it booted; waits for its end.

    The step itself belongs to no connection: whoever calls again waits for the same one.
    """
    wanted = heard()
    program = read_json(folder, "program.json") or {}
    sort = [wanted["name"], wanted["script"], program["work"], program["environment"]]
    key = hashlib.sha256(json.dumps(sort, sort_keys=True).encode()).hexdigest()
    marker = os.path.join(ROOT, "steps", key + ".json")
    ran, beat = False, 0.0
    while True:
        lock = take_lock(os.path.join(ROOT, "steps", "lock"))
        if lock is None:
            if time.monotonic() > beat + BEAT:
                beat = time.monotonic()
                say({"beat": time.time()})
            time.sleep(POLL / 2)
            continue
        done = read_json(marker)
        if done and done["boot"] == boot() and (done["exit_code"] == 0 or done["for"] == folder):
            say(dict(done, ran=ran))
        elif os.path.exists(os.path.join(folder, "stop.json")):
            say({"exit_code": -15, "error": "stopped", "tail": [], "ran": False})
        elif ran:
            text = "set-up {!r} was killed".format(wanted["name"])
            say({"exit_code": -9, "error": text, "tail": last_lines(folder), "ran": True})
        else:
            ran = True
            detach(lambda: run_step(folder, wanted, marker), folder, keep={lock})
            os.close(lock)
            continue
        os.close(lock)
        return


def run_step(folder: str, wanted: Json, marker: str) -> None:
    """The process that waits for a set-up step."""
    program = read_json(folder, "program.json") or {}
    growth = Growth(folder, log_size(folder))
    write_log(folder, "--- set-up: {}".format(wanted["name"]))
    script = write_script(folder, "step.sh", WITNESS + wanted["script"])
    failed = os.path.join(folder, "failed")
    remove(failed)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        write_json(started_as(os.getpid()), folder, "step.json")
        command = ["bash", "-eo", "pipefail", script]
        environment = dict(environment_of(folder, program), DRUMLINE_FAILED=failed)
        become(folder, command, environment, working_copy(program))
    while True:
        done, result = os.waitpid(child, os.WNOHANG)
        growth.look()
        if done:
            break
        time.sleep(POLL)
    code = -os.WTERMSIG(result) if os.WIFSIGNALED(result) else os.WEXITSTATUS(result)
    lines = [line for line in last_lines(folder) if not line.startswith("--- set-up: ")]
    where = "" if code == 0 else failing_command(failed, code, wanted)
    error = "" if code == 0 else f"{where}  {ended_how(code)}"
    if error and lines:
        error += f": {lines[-1]}"
    error = error.replace(folder + os.sep, "")[:500]
    note = "done" if code == 0 else f"failed at {where}, {ended_how(code)}"
    seconds = time.monotonic() - began
    write_log(folder, "--- set-up: {} {} ({:.1f} s)".format(wanted["name"], note, seconds))
    remove(folder, "step.json")
    ending = {"exit_code": code, "error": error, "tail": lines, "for": folder, "boot": boot()}
    write_json(dict(ending, at=time.time()), marker)


def failing_command(witness: str, code: int, wanted: Json) -> str:
    """`setup:2  pip install nope`, or the step's name where nobody saw which command it was."""
    own = wanted["name"] == "setup"
    name = "setup" if own else "set-up of {}".format(wanted["name"])
    with contextlib.suppress(OSError, ValueError):
        with open(witness, errors="replace") as file:
            seen, line, command = file.read(1000).strip().split(" ", 2)
        if int(seen) != (128 - code if code < 0 else code):
            return name  # a failure that the script went on from
        lines = wanted["script"].splitlines()
        number = int(line)
        if not number:
            found = [at for at, text in enumerate(lines, 1) if command in text]
            number = found[0] if len(found) == 1 else 0
        elif 1 < number <= len(lines):
            begun = number
            while begun > 1 and lines[begun - 2].endswith("\\"):
                begun -= 1
            if begun == number and not lines[number - 1].endswith("\\"):
                command = lines[number - 1].strip()
            number = begun
        command = " ".join(command.split())
        # Only in the user's own lines do numbers say something to the user.
        return f"{name}:{number}  {command}" if own and number else f"{name}  {command}"
    return name


def ended_how(code: int) -> str:
    """How a step ended that failed."""
    if code > 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return "killed by {}".format(known.get(-code, f"signal {-code}"))


def watch(folder: str, offset: str) -> None:
    """Log from an offset and the status at each change, for as long as somebody listens."""
    position = int(offset)
    say({"log_size": log_size(folder)})
    names = ["program.json", "started.json", "exit.json", "heartbeat.json", "error.json"]
    names.append("stop.json")
    seen: Any = None
    said: Any = None
    beat, looked = time.monotonic(), 0.0
    # What was written before we came was written when it was noted to be, all else just now.
    behind, noted = log_size(folder), stretches(folder)
    until, moment = 0, 0.0
    while True:
        # How it ended is told only after all that was logged by then.
        stamps = [stamp(os.path.join(folder, name)) for name in names]
        known = said
        if stamps != seen or time.monotonic() > looked + 1:
            known = status(folder)
            seen, looked = stamps, time.monotonic()
        while True:
            most, at = CHUNK, time.time()
            if position < behind:
                while until <= position:
                    until, moment = next(noted)
                most, at = min(CHUNK, until - position), moment
            data = read_log(folder, position, most)
            if not data:
                break
            say({"log": base64.b64encode(data).decode(), "offset": position, "at": at})
            position += len(data)
            beat = time.monotonic()
        if known != said:
            say({"status": known})
            said = known
            beat = time.monotonic()
        if time.monotonic() > beat + BEAT:
            say({"beat": time.time()})
            beat = time.monotonic()
        time.sleep(POLL)


def stamp(path: str) -> tuple[int, int] | None:
    """Changes with each replacement of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


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
    command = [shutil.which("docker") or "docker", *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, check=False, capture_output=True, timeout=60)


def container_of(folder: str) -> str:
    """The name of the attempt's container, if it runs in one."""
    program = read_json(folder, "program.json") or {}
    if any("docker run" in part for part in program.get("wrap", [])):
        return str(program["variables"].get("DRUMLINE_CONTAINER", ""))
    return ""


def clear(folder: str, limit: float) -> str:
    """End earlier attempts' programs, wait until the chips can be opened; why they cannot."""
    deadline = time.monotonic() + limit
    for other in glob.glob(os.path.join(ROOT, "jobs", "*", "*")):
        if other != folder:
            end(functools.partial(everyone, other), grace=3)
    devices = os.environ.get("DRUMLINE_DEV", "/dev")
    end(lambda: holders(devices, folder), grace=3)
    emulated = "DRUMLINE_DEV" in os.environ
    lockfile = os.path.join(devices if emulated else "/tmp", "libtpu_lockfile")  # noqa: S108
    if os.path.exists(lockfile):
        remove(lockfile)
        if os.path.exists(lockfile):
            # Made by another user (root, as a rule). Ours may use sudo on a TPU VM.
            command = ["sudo", "-n", "rm", "-f", lockfile]
            with contextlib.suppress(OSError):
                subprocess.run(command, check=False, capture_output=True, timeout=10)
    while True:
        trouble = device_trouble(os.path.join(devices, "vfio", "0"))
        if not trouble or time.monotonic() > deadline:
            return trouble
        # The kernel takes seconds to let go of a chip after its holder ended.
        time.sleep(POLL)


def holders(devices: str, folder: str) -> set[int]:
    """Processes of earlier attempts that hold a chip."""
    ours = os.path.join(folder, "heartbeat.json").encode()
    patterns = (os.path.join(devices, "accel"), os.path.join(devices, "vfio") + os.sep)
    found = set()
    for pid in every_pid():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = file.read()
            if b"DRUMLINE_JOB_ID=" not in environ or ours in environ or pid == os.getpid():
                continue
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(patterns):
                    found.add(pid)
    return found


def device_trouble(path: str) -> str:
    """Why the first chip cannot be opened; empty when it can or there is no such device."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as trouble:
        if trouble.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        return f"open(/dev/vfio/0): {os.strerror(trouble.errno or errno.EBUSY)}"
    return ""


def receive(sha: str) -> None:
    """Store an archive sent on standard input; one that is cut short leaves nothing."""
    folder = os.path.join(ROOT, "code")
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f"{sha}.{os.getpid()}.draft")
    digest = hashlib.sha256()
    try:
        with open(draft, "wb") as file:
            while True:
                data = sys.stdin.buffer.read(1 << 20)
                if not data:
                    break
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != sha:
            raise ValueError("the code arrived damaged or cut short")
        os.replace(draft, below_root(os.path.join("code", sha + ".tar.gz")))
    finally:
        remove(draft)
    say({"received": True})


def unpack(sha: str, work: str) -> None:
    """Unpack an archive that was received."""
    say({"have_code": unpacked(sha, work)})


def unpacked(sha: str, work: str) -> bool:
    """Unpack an archive into a working copy, all of it or nothing; False if it is not here."""
    final = below_root(work)
    archive = below_root(os.path.join("code", sha + ".tar.gz"))
    if os.path.isdir(final):
        return True
    if not os.path.exists(archive):
        return False
    os.makedirs(os.path.dirname(final), exist_ok=True)
    draft = f"{final}.{os.getpid()}.draft"
    try:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                target = os.path.normpath(os.path.join(draft, member.name))
                link = os.path.normpath(os.path.join(os.path.dirname(target), member.linkname))
                good = target.startswith(draft + os.sep) and (member.isreg() or member.issym())
                if member.issym():
                    good = good and (link + os.sep).startswith(draft + os.sep)
                if not good:
                    raise ValueError(f"{member.name!r} leads out of the working copy")
                tar.extract(member, draft)
        os.makedirs(draft, exist_ok=True)
        with contextlib.suppress(OSError):
            os.rename(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return os.path.isdir(final)


def free_port() -> None:
    """A port nobody uses, and that no connection gets by chance before the program listens there.

    The system gives connections ports from 32768 on, or from 49152, and a program takes seconds
    until it listens.
    """
    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            say({"port": port})
            return


def execute(folder: str) -> None:
    """Run a command for the user in the job's working copy; ends it when its time is up.

    It also ends when nobody is left to read what it writes: whoever asked for it is gone.
    """
    wanted = heard_line()
    program = read_json(folder, "program.json")
    cwd = working_copy(program) if program else os.path.expanduser("~")
    command = ["bash", "-c", wanted["command"]]
    stdin = None if wanted.get("stdin") else subprocess.DEVNULL
    child = subprocess.Popen(command, cwd=cwd, stdin=stdin, start_new_session=True)

    def end_all(*_: object) -> None:
        end(lambda: session_of(child.pid), EXEC_GRACE)

    cut_off = threading.Event()

    def end_all_when_cut_off() -> None:
        # Asked for nothing, a poll still tells that the other end of the pipe was closed.
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        output.poll()
        cut_off.set()
        end_all()

    signal.signal(signal.SIGHUP, end_all)
    signal.signal(signal.SIGTERM, end_all)
    listening = threading.Thread(target=end_all_when_cut_off, daemon=True)
    listening.start()
    try:
        code = child.wait(wanted.get("timeout"))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        code = 124
    if cut_off.is_set():
        listening.join()  # what does not heed SIGTERM outlives the shell
    sys.exit(128 - code if code < 0 else code)


def session_of(leader: int) -> set[int]:
    """All live processes of the session and the group that this process leads."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-leader, 0)
            return {-leader}
        return set()
    found = ((pid, process_stat(pid)) for pid in every_pid())
    return {pid for pid, stat in found if stat and stat[0] not in "ZX" and leader in stat[1:3]}


def forget(folder: str) -> None:
    """Remove the secrets."""
    remove(folder, "secrets.json")
    say({"forgotten": True})


def main(words: list[str]) -> None:
    """Do what the first word says."""
    os.umask(0o077)
    of_attempt: dict[str, Callable[..., None]] = {
        "prepare": prepare,
        "start": start,
        "status": lambda folder: say(dict(status(folder), log_size=log_size(folder))),
        "step": step,
        "watch": watch,
        "stop": stop,
        "exec": execute,
        "forget": forget,
    }
    others: dict[str, Callable[..., None]] = {
        "receive": receive,
        "unpack": unpack,
        "free-port": free_port,
    }
    verb, rest = words[0], words[1:]
    try:
        if verb in others:
            others[verb](*rest)
        else:
            of_attempt[verb](below_root(rest[0]), *rest[1:])
    except BrokenPipeError:
        # Whoever listened is gone. Python would complain once more when it flushes at exit.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
