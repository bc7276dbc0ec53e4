"""Set-up steps: each runs once per host and reports the command that failed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time

from .environment import program_environment, read_program, working_copy, write_script
from .environment_cache import CachedEnvironment, environment_of
from .files import ROOT, acquire_lock, open_file, read_json, remove, write_json
from .log import GrowthRecorder, append_to_log, last_lines, log_size
from .machine import boot_id
from .processes import (
    KEEP_ALIVE_SECONDS,
    POLL_SECONDS,
    adopt_orphans,
    exec_program,
    exit_code,
    process_record,
    reap,
    run_detached,
)
from .transient import find_transient_error
from .wire import KeepAlive, PythonRecipe, SetUpStep, StepResult, receive_message, send

# Makes a script write the exit code, line and text of the command that failed. If the script ends
# with `exit`, no command has failed; the line is then found by the text of the command. The traps
# are on the first line of the script, so that line numbers stay correct.
RECORD_FAILURE = (
    'set -E; trap \'echo "$? $LINENO $BASH_COMMAND" >"$DRUMLINE_FAILED"\' ERR; '
    'trap \'drumline_code=$?; if [ $drumline_code != 0 ] && [ ! -e "$DRUMLINE_FAILED" ]; then '
    'echo "$drumline_code 0 $BASH_COMMAND" >"$DRUMLINE_FAILED"; fi\' EXIT; '
)


def run_step(folder: str) -> None:
    """Run a set-up step unless it ran on this host since its boot, and wait for its end.

    Every attempt looks for its environment again, and the user's set-up runs in each new one. The
    step is independent of the connection: a repeated call waits for the same step.
    """
    step = receive_message(SetUpStep)
    program = read_program(folder)
    inputs = [step.name, step.script, program.work, program.environment]
    if step.name == "setup" and environment_of(folder):
        inputs.append(environment_of(folder))
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    result_file = os.path.join(ROOT, "steps", key + ".json")
    started, sent_at = False, 0.0
    while True:
        lock = acquire_lock(os.path.join(ROOT, "steps", "lock"))
        if lock is None:
            if time.monotonic() > sent_at + KEEP_ALIVE_SECONDS:
                sent_at = time.monotonic()
                send(KeepAlive(beat=time.time()))
            time.sleep(POLL_SECONDS / 2)
            continue
        result = read_json(result_file)
        if (
            result
            and result["boot"] == boot_id()
            and (result["for"] == folder or (result["exit_code"] == 0 and step.recipe is None))
        ):
            send(StepResult(**dict(result, ran=started)))
        elif os.path.exists(os.path.join(folder, "stop.json")):
            send(StepResult(exit_code=-15, error="stopped", tail=(), ran=False))
        elif started:
            error = f"set-up {step.name!r} was killed"
            tail = tuple(last_lines(folder))
            send(StepResult(exit_code=-9, error=error, tail=tail, ran=True))
        else:
            started = True
            run_detached(lambda: run_and_record(folder, step, result_file), folder, keep={lock})
            os.close(lock)
            continue
        os.close(lock)
        return


def run_and_record(folder: str, step: SetUpStep, result_file: str) -> None:
    """Run a set-up step and record its result. Repeat it after an error that passes by itself."""
    append_to_log(folder, f"--- set-up: {step.name}")
    environment = None
    if step.recipe is not None:
        environment = CachedEnvironment(folder, PythonRecipe(**step.recipe))
        if not environment.lock():
            record_result(folder, result_file, -15, "stopped", [])
            return
        if environment.reuse():
            record_result(folder, result_file, 0, "", [])
            return
        environment.begin()
    for attempt in range(step.retries + 1):
        started_at = time.monotonic()
        code, lines, location = run_script(folder, step)
        outcome = "done" if code == 0 else f"failed at {location}, {describe_exit(code)}"
        reason = "" if code == 0 else find_transient_error("\n".join(lines))
        again = bool(reason) and attempt < step.retries
        if again:
            reason += f"; retry {attempt + 1} of {step.retries}"
            outcome += f": {reason} in {step.pause:g} s"
            write_json({"reason": reason}, folder, "repeating.json")
        seconds = time.monotonic() - started_at
        append_to_log(folder, f"--- set-up: {step.name} {outcome} ({seconds:.1f} s)")
        if not again or stopped_during_pause(folder, step.pause):
            break
    remove(os.path.join(folder, "repeating.json"))
    if environment is not None:
        environment.finish(code == 0)
    error = "" if code == 0 else f"{location}  {describe_exit(code)}"
    if error and lines:
        error += f": {lines[-1]}"
    error = error.replace(folder + os.sep, "")[:500]
    record_result(folder, result_file, code, error, lines)


def record_result(folder: str, file: str, code: int, error: str, lines: list[str]) -> None:
    """Record the result of a set-up step for this boot."""
    record = {"exit_code": code, "error": error, "tail": lines, "for": folder, "boot": boot_id()}
    write_json(dict(record, at=time.time()), file)


def run_script(folder: str, step: SetUpStep) -> tuple[int, list[str], str]:
    """Run the script of a step. Return its exit code, its last lines and the failed command."""
    program = read_program(folder)
    size = log_size(folder)
    growth = GrowthRecorder(folder, size)
    script = write_script(folder, "step.sh", RECORD_FAILURE + step.script)
    failure_file = os.path.join(folder, "failed")
    remove(failure_file)
    adopt_orphans()
    waiter = process_record(os.getpid())
    child = os.fork()
    if child == 0:
        write_json(dict(process_record(os.getpid()), waiter=waiter), folder, "step.json")
        command = ["bash", "-eo", "pipefail", script]
        environment = dict(program_environment(folder, program), DRUMLINE_FAILED=failure_file)
        exec_program(folder, command, environment, working_copy(program.work))
    while True:
        wait_status = reap(child)
        growth.update()
        if wait_status is not None:
            break
        time.sleep(POLL_SECONDS)
    remove(folder, "step.json")
    code = exit_code(wait_status)
    location = "" if code == 0 else failed_command(failure_file, code, step)
    return code, last_lines(folder, size), location


def stopped_during_pause(folder: str, seconds: float) -> bool:
    """Wait before a repetition. Return True at once if the attempt is stopped."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(os.path.join(folder, "stop.json")):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def failed_command(failure_file: str, code: int, step: SetUpStep) -> str:
    """Return `setup:2  pip install nope`, or the step's name if the command is unknown."""
    is_user_step = step.name == "setup"
    name = "setup" if is_user_step else f"set-up of {step.name}"
    with contextlib.suppress(OSError, ValueError):
        with open_file(failure_file) as file:
            text = file.read(1000).decode("utf-8", "replace")
        recorded_code, line, command = text.strip().split(" ", 2)
        if int(recorded_code) != (128 - code if code < 0 else code):
            return name  # the script continued after this failure
        lines = step.script.splitlines()
        number = int(line)
        if not number:
            matches = [index for index, text in enumerate(lines, 1) if command in text]
            number = matches[0] if len(matches) == 1 else 0
        elif 1 < number <= len(lines):
            first = number
            while first > 1 and lines[first - 2].endswith("\\"):
                first -= 1
            if first == number and not lines[number - 1].endswith("\\"):
                command = lines[number - 1].strip()
            number = first
        command = " ".join(command.split())
        # Line numbers help the user only in the user's own script.
        return f"{name}:{number}  {command}" if is_user_step and number else f"{name}  {command}"
    return name


def describe_exit(code: int) -> str:
    """Return the exit code of a step, or the signal that killed it."""
    if code > 0:
        return f"exit code {code}"
    names = {member.value: member.name for member in signal.Signals}
    return "killed by {}".format(names.get(-code, f"signal {-code}"))
