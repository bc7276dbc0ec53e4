"""The status of an attempt, from its files and processes: reported once or watched."""

from __future__ import annotations

import base64
import os
import signal
import time

from .environment import find_program, working_copy
from .files import acquire_lock, read_json, write_json
from .first_error import FirstError
from .log import CHUNK_BYTES, TAIL_LINES, growth_times, last_lines, log_size, read_log
from .machine import announced_shutdown, boot_id
from .processes import KEEP_ALIVE_SECONDS, POLL_SECONDS, find_process, is_alive
from .remaining import end_remaining
from .wire import AttemptStatus, WatchLine, bound_report, send

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

ROUND_BYTES, ROUND_SECONDS = 1_000_000, 1.0
"""The bytes of the log, and the seconds, after which a round of `watch` sends the status. A slow
link must not delay it. A round every POLL_SECONDS sends 10 MB of log per second at most."""
MAX_BACKLOG_BYTES, RESUME_BYTES = 256_000_000, 64_000_000
"""If more of the log waits to be sent, which takes 26 s, all but the newest 6 s are skipped.
Otherwise the server would receive the log, and the exit after it, later and later."""
BURN_IN_FIELDS = ("verdict", "seconds", "said")
WATCHED_FILES = (
    "program.json",
    "started.json",
    "exit.json",
    "heartbeat.json",
    "error.json",
    "stop.json",
    "burnin.json",
    "repeating.json",
)


def report_status(folder: str) -> None:
    """Send the status of the attempt and the size of its log."""
    status = attempt_status(folder)
    status.log_size = log_size(folder)
    send(status)


def attempt_status(folder: str) -> AttemptStatus:
    """Return the status of the attempt, and record its exit if no waiter could."""
    started, heartbeat = read_json(folder, "started.json"), read_json(folder, "heartbeat.json")
    status = AttemptStatus(
        state="none",
        prepared=os.path.exists(os.path.join(folder, "program.json")),
        stopped=os.path.exists(os.path.join(folder, "stop.json")),
        going_down=announced_shutdown(),
        heartbeat=heartbeat and bound_report(heartbeat),
    )
    if started is None or not isinstance(started.get("at"), (int, float)):
        if repeating := read_json(folder, "repeating.json"):
            status.repeating = str(repeating.get("reason", ""))
        return status
    status.state = "running"
    status.started_at, status.coordinator = started["at"], str(started.get("coordinator", ""))
    if started.get("before"):
        status.burnin = burn_in_report(folder)
    record = read_exit(folder)
    if record is None and not has_waiter(folder) and not program_runs(folder):
        record = read_exit(folder)
        if record is None and started.get("boot") != boot_id():
            status.state = "lost"
            return status
        if record is None:
            record = _record_unseen_exit(folder, int(started.get("log_from", 0)))
    if record is not None:
        # The keys of the record, from this agent or an older one, are fields of the status.
        vars(status).update(record, state="exited")
    elif os.path.exists(os.path.join(folder, "error.json")):
        error = read_json(folder, "error.json") or {}
        status.error = _reported_error(error)
        status.error_at = _time_or_default(error.get("at"), None)
    return status


EXIT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "exit_code": int,
    "ended_at": (int, float),
    "error": str,
    "error_at": (int, float),
    "tail": list,
    "chip_holder": str,
    "chip_error": str,
    "location": str,
}
"""The fields of `exit.json`."""


def read_exit(folder: str) -> Json | None:
    """Return the valid fields of the recorded exit; None if there is no valid exit code.

    The program can write to this folder, and the server rejects a status with other types.
    """
    record = read_json(folder, "exit.json") or {}
    fields = {
        name: record[name]
        for name, kind in EXIT_FIELDS.items()
        if isinstance(record.get(name), kind)
    }
    if "exit_code" not in fields:
        return None
    fields["error"] = fields.get("error", "")[:500]
    fields["tail"] = [str(line)[:500] for line in fields.get("tail", ())[-TAIL_LINES:]]
    return fields


def _record_unseen_exit(folder: str, log_from: int) -> Json:
    """Record the exit of a program whose waiter was killed."""
    first_error = FirstError(folder, log_from)
    first_error.scan()
    exited_at = os.stat(os.path.join(folder, "log")).st_mtime if log_size(folder) else 0.0
    if first_error.at is not None:
        first_error.at = exited_at
    record = exit_record(folder, None, exited_at or time.time(), first_error)
    end_remaining(folder, grace=1)
    write_json(record, folder, "exit.json")
    return record


def exit_record(folder: str, code: int | None, exited_at: float, first_error: FirstError) -> Json:
    """Return the record of the program's exit; `code` is None if no waiter saw it."""
    record: Json = {"exit_code": -9 if code is None else code, "ended_at": exited_at}
    lines = last_lines(folder)
    reported = read_json(folder, "error.json")
    program = find_program(folder)
    work = working_copy(program.work if program else "work")
    error = ""
    error_at: float | None = None
    if code == 0:
        pass
    elif os.path.exists(os.path.join(folder, "stop.json")):
        error, error_at = "stopped", exited_at
    elif reported:
        error = _reported_error(reported)
        error_at = _time_or_default(reported.get("at"), exited_at)
    elif code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        error, error_at = "killed (SIGKILL), most likely out of memory", exited_at
    elif first_error.at is not None:
        error, error_at = first_error.message(work), first_error.at
    elif code is None:
        error, error_at = "exit code unknown: the agent that waited for it was killed", exited_at
    else:
        error, error_at = (lines[-1] if lines else f"exit code {code}"), exited_at
    # bash names the script by its path on the host, which is of no use to the user.
    error = error.replace(folder + os.sep, "")
    record.update(error=error[:500], error_at=error_at, tail=lines)
    return record


def _reported_error(report: Json) -> str:
    """Return the error that a program reported, or an empty text if it is not a text."""
    error = report.get("error")
    return error[:500] if isinstance(error, str) else ""


def _time_or_default(value: Any, default: float | None) -> float | None:
    """Return a time that the program reported, or the default if it is not a number."""
    return value if isinstance(value, (int, float)) else default


def burn_in_report(folder: str) -> Json:
    """Return the verdict of the burn-in and its message, without the measurements."""
    report = read_json(folder, "burnin.json")
    if report is None:
        exists = os.path.lexists(os.path.join(folder, "burnin.json"))
        # The file is replaced by a rename: if it is unreadable now, it stays unreadable.
        message = "chips were tested, but the report cannot be read"
        return {"verdict": "warn", "said": message} if exists else {"verdict": "running"}
    return bound_report({name: report[name] for name in BURN_IN_FIELDS if name in report})


def has_waiter(folder: str) -> bool:
    """Return True if the process that waits for the program is running."""
    lock = acquire_lock(os.path.join(folder, "waiting.lock"), shared=True)
    if lock is None:
        return True
    os.close(lock)
    return False


def program_runs(folder: str) -> bool:
    """Return True if the program runs, with or without a waiter."""
    leader = find_process(read_json(folder, "pid.json"))
    return leader != 0 and is_alive(leader)


def watch(folder: str, offset: str) -> None:
    """Send the log from an offset, and the status at each change, until disconnected.

    Each round sends a part of the log and then the status, so that a program that logs faster than
    the link carries does not delay its status.
    """
    position = int(offset)
    initial_size, times = log_size(folder), growth_times(folder)
    send(WatchLine(log_size=initial_size))
    previous_stamps: list[tuple[int, int] | None] | None = None
    status: AttemptStatus | None = None
    sent_status: AttemptStatus | None = None
    sent_at, checked_at = time.monotonic(), 0.0
    segment_end, segment_time = 0, 0.0
    skipped = 0
    log_end_at_exit: int | None = None
    while True:
        # The status is read before the log: an exit is sent only after the whole log up to it.
        stamps = [_file_stamp(os.path.join(folder, name)) for name in WATCHED_FILES]
        if stamps != previous_stamps or time.monotonic() > checked_at + 1:
            status = attempt_status(folder)
            previous_stamps, checked_at = stamps, time.monotonic()
        log_end = log_size(folder)
        if log_end_at_exit is None and status is not None and status.state == "exited":
            log_end_at_exit = log_end
        if log_end - position > MAX_BACKLOG_BYTES:
            skipped += log_end - RESUME_BYTES - position
            position = log_end - RESUME_BYTES
        round_end, deadline = position + ROUND_BYTES, time.monotonic() + ROUND_SECONDS
        data = b"the first piece"
        while data and position < round_end and time.monotonic() < deadline:
            # Bytes from before this call have the time that was recorded for them.
            size, written_at = CHUNK_BYTES, time.time()
            if position < initial_size:
                while segment_end <= position:
                    segment_end, segment_time = next(times)
                size, written_at = min(CHUNK_BYTES, segment_end - position), segment_time
            data = read_log(folder, position, size)
            if data:
                text = base64.b64encode(data).decode()
                send(WatchLine(log=text, offset=position, skipped=skipped, at=written_at))
                position += len(data)
                skipped = 0
                sent_at = time.monotonic()
        log_sent = not data or log_end_at_exit is None or position >= log_end_at_exit
        if status != sent_status and log_sent:
            send(WatchLine(status=status))
            sent_status = status
            sent_at = time.monotonic()
        if time.monotonic() > sent_at + KEEP_ALIVE_SECONDS:
            send(WatchLine(beat=time.time()))
            sent_at = time.monotonic()
        time.sleep(POLL_SECONDS)


def _file_stamp(path: str) -> tuple[int, int] | None:
    """Return a value that changes whenever the file is replaced."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino
