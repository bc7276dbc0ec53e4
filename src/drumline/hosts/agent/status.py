"""What became of an attempt, from its files and its processes."""

from __future__ import annotations

import os
import signal
import time

from .caller import say
from .environment import find_program, working_copy
from .first_error import FirstError
from .system.files import read_json, take_lock, write_json
from .system.log import last_lines, log_size
from .system.machine import boot, going_down
from .system.processes import lives, process_stat
from .wire import AttemptStatus

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


def moment(value: Any, otherwise: float | None) -> float | None:
    """A time that the program reported, if it is one."""
    return value if isinstance(value, (int, float)) else otherwise


def conclude(folder: str, code: int | None, ended: float, first: FirstError) -> Json:
    """How the attempt ended on this host; code None where nobody was there to see."""
    ending: Json = {"exit_code": -9 if code is None else code, "ended_at": ended}
    lines = last_lines(folder)
    reported = read_json(folder, "error.json")
    program = find_program(folder)
    work = working_copy(program.work if program else "work")
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


def status(folder: str) -> AttemptStatus:
    """What is known of the attempt: state is none, running, exited, or lost by a restart."""
    started = read_json(folder, "started.json")
    beat = read_json(folder, "heartbeat.json")
    known = AttemptStatus(
        state="none",
        prepared=os.path.exists(os.path.join(folder, "program.json")),
        stopped=os.path.exists(os.path.join(folder, "stop.json")),
        going_down=going_down(),
        heartbeat=beat,
    )
    if started is None:
        return known
    known.state = "running"
    known.started_at, known.coordinator = started["at"], started.get("coordinator", "")
    if started.get("before"):
        known.burnin = burnin(folder)
    ending = read_json(folder, "exit.json")
    if ending is None and not waited_for(folder) and not program_lives(folder):
        ending = read_json(folder, "exit.json")
        if ending is None and started["boot"] != boot():
            known.state = "lost"
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
        # As it was written down, by this agent or an earlier one: those are fields of a status.
        vars(known).update(ending, state="exited")
    elif os.path.exists(os.path.join(folder, "error.json")):
        reported = read_json(folder, "error.json") or {}
        known.error = str(reported.get("error", ""))
        known.error_at = moment(reported.get("at"), None)
    return known


def burnin(folder: str) -> Json:
    """How the burn-in went: the verdict and why, without what was measured."""
    found = read_json(folder, "burnin.json")
    if found is None:
        there = os.path.lexists(os.path.join(folder, "burnin.json"))
        # It is replaced in one rename: what cannot be read now will never be.
        said = "chips were tested, but the report cannot be read"
        return {"verdict": "warn", "said": said} if there else {"verdict": "running"}
    return {name: found[name] for name in ("verdict", "seconds", "said") if name in found}


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


def tell(folder: str) -> None:
    """Say what became of the attempt, and how long its log is."""
    known = status(folder)
    known.log_size = log_size(folder)
    say(known)
