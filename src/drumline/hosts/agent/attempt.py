"""An attempt on one host: prepare it, start it, wait for its end, stop it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

from .chips import ChipMonitor
from .code import unpack_code
from .containers import container_name, remove_container, signal_container
from .environment import (
    program_environment,
    read_program,
    working_copy,
    write_interpreter,
    write_script,
    write_variable_names,
)
from .files import acquire_lock, read_json, remove, write_json
from .first_error import FirstError
from .log import GrowthRecorder, log_size
from .machine import boot_id, free_chips, machine_identity
from .processes import (
    POLL_SECONDS,
    AdoptedOrphans,
    adopt_orphans,
    attempt_processes,
    exec_program,
    exit_code,
    process_record,
    program_processes,
    reap,
    run_detached,
    terminate,
)
from .remaining import end_remaining
from .status import attempt_status, exit_record, has_waiter
from .wire import HostProgram, Prepare, PrepareResult, Start, receive_message, send

# If a shell gets SIGTERM together with the program that it runs, it ends at once, and the exit code
# of a program that saves its work and asks for a restart (75) is lost. A shell with a trap waits
# for the program. It is put on the first line of the script, so that line numbers stay correct.
TRAP = "trap 'if [ $? = 75 ]; then exit 75; fi; trap - TERM; kill -TERM $$' TERM; "


def prepare(folder: str, chip_timeout: str) -> None:
    """Free the chips, store the program of the attempt, and unpack its code if it is here.

    An attempt that was started or stopped is left unchanged.
    """
    message = receive_message(Prepare)
    chip_error = free_chips(folder, float(chip_timeout))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    started = os.path.exists(os.path.join(folder, "started.json"))
    if not started and not os.path.exists(os.path.join(folder, "stop.json")):
        write_json(message.program, folder, "program.json")
        write_json(message.secrets, folder, "secrets.json")
        program = HostProgram(**message.program)
        if program.interpreter:
            write_interpreter(folder, program.interpreter)
    missing: tuple[str, ...] = ()
    if message.archive is not None:
        work = HostProgram(**message.program).work
        missing = unpack_code(message.archive, message.large_files, work)
    identity = machine_identity()
    send(
        PrepareResult(trouble=chip_error, have_code=not missing, missing=missing, identity=identity)
    )


def start(folder: str) -> None:
    """Start the program. Later calls never restart it and report its status."""
    message = receive_message(Start)
    deadline = time.monotonic() + 10
    while not os.path.exists(os.path.join(folder, "started.json")):
        if os.path.exists(os.path.join(folder, "stop.json")):
            break
        lock = acquire_lock(os.path.join(folder, "waiting.lock"))
        if lock is not None:
            if not os.path.exists(os.path.join(folder, "started.json")):
                record = {"at": time.time(), "boot": boot_id(), "coordinator": message.coordinator}
                if message.before:
                    record["before"] = message.before
                write_json(dict(record, log_from=log_size(folder)), folder, "started.json")
                run_detached(functools.partial(run_and_wait, folder), folder, keep={lock})
            os.close(lock)
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"another start of {folder} did not finish within 10 s")
        time.sleep(POLL_SECONDS / 4)
    while not os.path.exists(os.path.join(folder, "pid.json")) and time.monotonic() < deadline:
        if not has_waiter(folder):
            break
        time.sleep(POLL_SECONDS / 4)
    send(attempt_status(folder))


def run_and_wait(folder: str) -> None:
    """Run the program as its waiter: start it and record its first error and its exit."""
    program = read_program(folder)
    started = read_json(folder, "started.json") or {}
    environment = program_environment(folder, program)
    write_variable_names(folder, program, environment)
    script = write_script(folder, "run.sh", TRAP + str(started.get("before", "")) + program.run)
    command = [*program.wrap, "bash", "-eo", "pipefail", script]
    work = working_copy(program.work)
    adopt_orphans()
    waiter = process_record(os.getpid())
    child = os.fork()
    if child == 0:
        # The child records itself before it becomes the program: no program runs unrecorded.
        write_json(dict(process_record(os.getpid()), waiter=waiter), folder, "pid.json")
        exec_program(folder, command, environment, work)
    remove(folder, "secrets.json")
    first_error = FirstError(folder, started["log_from"])
    container = container_name(folder)
    chips = ChipMonitor(folder, started["log_from"], container)
    growth = GrowthRecorder(folder, started["log_from"])
    orphans = AdoptedOrphans(folder, child)
    while True:
        wait_status = reap(child)
        exited_at = time.time()
        with contextlib.suppress(Exception):
            first_error.scan()
            growth.update()
            orphans.update()
            chips.update()
        if wait_status is not None:
            break
        time.sleep(POLL_SECONDS)
    code = exit_code(wait_status)
    stopping = os.path.exists(os.path.join(folder, "stop.json"))
    if stopping or code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        # After SIGTERM the shell ends at once, while its children may still save a checkpoint.
        # `stop` enforces its own grace period; a host that shuts down leaves about a minute.
        deadline = time.monotonic() + (3600 if stopping else 60)
        while program_processes(folder) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        exited_at = time.time()
    record = exit_record(folder, code, exited_at, first_error)
    if code != 0 and not stopping:
        with contextlib.suppress(Exception):
            record.update(chips.after_failure())
    # The exit is recorded last: a reader of the record may start the next attempt.
    end_remaining(folder)
    write_json(record, folder, "exit.json")


# Stopping ----------------------------------------------------------------------------------------


def stop(folder: str, grace: str) -> None:
    """Stop the program on this host and make sure that it never restarts."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.exists(os.path.join(folder, "stop.json")):
        write_json({"at": time.time()}, folder, "stop.json")
    remove(folder, "secrets.json")
    lock = acquire_lock(os.path.join(folder, "stopping.lock"))
    if lock is not None:
        run_detached(lambda: stop_processes(folder, float(grace)), folder, keep={lock})
        os.close(lock)
    while True:
        lock = acquire_lock(os.path.join(folder, "stopping.lock"))
        if lock is not None:
            break
        time.sleep(POLL_SECONDS / 2)
    os.close(lock)
    send(attempt_status(folder))


def stop_processes(folder: str, grace: float) -> None:
    """Stop all processes of an attempt and its container, independently of the connection."""
    container = container_name(folder)
    if container:
        signal_container(container)
    terminate(functools.partial(attempt_processes, folder), grace)
    if container:
        remove_container(container)
    # The waiter ends what is left of the program before it records the exit.
    deadline = time.monotonic() + 15
    while has_waiter(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 2)
