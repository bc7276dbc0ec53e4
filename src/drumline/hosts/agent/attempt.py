"""An attempt from its program to its end: prepare, start, wait."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

from .caller import heard, say
from .code import unpacked
from .devices import clear
from .environment import (
    environment_of,
    prepared_program,
    working_copy,
    write_names,
    write_script,
)
from .first_error import FirstError
from .status import conclude, status, waited_for
from .system.files import read_json, remove, take_lock, write_json
from .system.identity import identity
from .system.log import Growth, log_size, write_log
from .system.machine import boot, free_port
from .system.processes import POLL, become, detach, end, members, started_as
from .wire import HostProgram, Port, Prepare, Prepared, Start

# A shell that is told to stop together with what it runs would be gone at once, and with it the
# exit code of a program that saves its work and asks (with 75) to be started again. A shell with a
# trap waits for the program. On the first line of the script, so that its line numbers stay true.
TRAP = "trap 'if [ $? = 75 ]; then exit 75; fi; trap - TERM; kill -TERM $$' TERM; "


def prepare(folder: str, limit: str) -> None:
    """Free the chips, write down what the attempt runs, and unpack its code if it is here.

    What has been started, or stopped, is left as it is.
    """
    sent = heard(Prepare)
    trouble = clear(folder, float(limit))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    started = os.path.exists(os.path.join(folder, "started.json"))
    if not started and not os.path.exists(os.path.join(folder, "stop.json")):
        write_json(sent.program, folder, "program.json")
        write_json(sent.secrets, folder, "secrets.json")
    have = sent.archive is None or unpacked(sent.archive, HostProgram(**sent.program).work)
    say(Prepared(trouble=trouble, have_code=have, identity=identity()))


def start(folder: str) -> None:
    """Start the program, once for ever; a second call reports the first one's program."""
    sent = heard(Start)
    deadline = time.monotonic() + 10
    while not os.path.exists(os.path.join(folder, "started.json")):
        if os.path.exists(os.path.join(folder, "stop.json")):
            break
        lock = take_lock(os.path.join(folder, "waiting.lock"))
        if lock is not None:
            if not os.path.exists(os.path.join(folder, "started.json")):
                record = {"at": time.time(), "boot": boot(), "coordinator": sent.coordinator}
                if sent.before:
                    record["before"] = sent.before
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
    program = prepared_program(folder)
    started = read_json(folder, "started.json") or {}
    environment = environment_of(folder, program)
    write_names(folder, program, environment)
    script = write_script(folder, "run.sh", TRAP + str(started.get("before", "")) + program.run)
    command = [*program.wrap, "bash", "-eo", "pipefail", script]
    work = working_copy(program.work)
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


def choose_port() -> None:
    """Say where the first host may listen."""
    say(Port(port=free_port()))
