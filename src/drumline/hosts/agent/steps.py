"""Set-up steps: each runs once on a host, and says which of its commands failed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time

from .caller import heard, say
from .environment import environment_of, prepared_program, working_copy, write_script
from .system.files import ROOT, read_json, remove, take_lock, write_json
from .system.log import Growth, last_lines, log_size, write_log
from .system.machine import boot
from .system.processes import BEAT, POLL, become, detach, started_as
from .wire import Beat, SetUpStep, StepEnded

# Has a set-up step write down which of its commands failed, with its exit code and its line. What
# ends by `exit` fails at no command; its line is found by its text. On the first line as well.
WITNESS = (
    'set -E; trap \'echo "$? $LINENO $BASH_COMMAND" >"$DRUMLINE_FAILED"\' ERR; '
    'trap \'drumline_code=$?; if [ $drumline_code != 0 ] && [ ! -e "$DRUMLINE_FAILED" ]; then '
    'echo "$drumline_code 0 $BASH_COMMAND" >"$DRUMLINE_FAILED"; fi\' EXIT; '
)


def step(folder: str) -> None:
    """Run one set-up step unless it ran on this host since it booted; waits for its end.

    The step itself belongs to no connection: whoever calls again waits for the same one.
    """
    wanted = heard(SetUpStep)
    program = prepared_program(folder)
    sort = [wanted.name, wanted.script, program.work, program.environment]
    key = hashlib.sha256(json.dumps(sort, sort_keys=True).encode()).hexdigest()
    marker = os.path.join(ROOT, "steps", key + ".json")
    ran, beat = False, 0.0
    while True:
        lock = take_lock(os.path.join(ROOT, "steps", "lock"))
        if lock is None:
            if time.monotonic() > beat + BEAT:
                beat = time.monotonic()
                say(Beat(beat=time.time()))
            time.sleep(POLL / 2)
            continue
        done = read_json(marker)
        if done and done["boot"] == boot() and (done["exit_code"] == 0 or done["for"] == folder):
            say(StepEnded(**dict(done, ran=ran)))
        elif os.path.exists(os.path.join(folder, "stop.json")):
            say(StepEnded(exit_code=-15, error="stopped", tail=(), ran=False))
        elif ran:
            text = f"set-up {wanted.name!r} was killed"
            tail = tuple(last_lines(folder))
            say(StepEnded(exit_code=-9, error=text, tail=tail, ran=True))
        else:
            ran = True
            detach(lambda: run_step(folder, wanted, marker), folder, keep={lock})
            os.close(lock)
            continue
        os.close(lock)
        return


def run_step(folder: str, wanted: SetUpStep, marker: str) -> None:
    """The process that waits for a set-up step."""
    program = prepared_program(folder)
    growth = Growth(folder, log_size(folder))
    write_log(folder, f"--- set-up: {wanted.name}")
    script = write_script(folder, "step.sh", WITNESS + wanted.script)
    failed = os.path.join(folder, "failed")
    remove(failed)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        write_json(started_as(os.getpid()), folder, "step.json")
        command = ["bash", "-eo", "pipefail", script]
        environment = dict(environment_of(folder, program), DRUMLINE_FAILED=failed)
        become(folder, command, environment, working_copy(program.work))
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
    write_log(folder, f"--- set-up: {wanted.name} {note} ({seconds:.1f} s)")
    remove(folder, "step.json")
    ending = {"exit_code": code, "error": error, "tail": lines, "for": folder, "boot": boot()}
    write_json(dict(ending, at=time.time()), marker)


def failing_command(witness: str, code: int, wanted: SetUpStep) -> str:
    """`setup:2  pip install nope`, or the step's name where nobody saw which command it was."""
    own = wanted.name == "setup"
    name = "setup" if own else f"set-up of {wanted.name}"
    with contextlib.suppress(OSError, ValueError):
        with open(witness, errors="replace") as file:
            seen, line, command = file.read(1000).strip().split(" ", 2)
        if int(seen) != (128 - code if code < 0 else code):
            return name  # a failure that the script went on from
        lines = wanted.script.splitlines()
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
