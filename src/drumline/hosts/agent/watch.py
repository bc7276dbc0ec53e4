"""The log and the status of an attempt, told as they change."""

from __future__ import annotations

import base64
import os
import time

from .caller import say
from .status import status
from .system.log import CHUNK, log_size, read_log, stretches
from .system.processes import BEAT, POLL
from .wire import AttemptStatus, Line


def watch(folder: str, offset: str) -> None:
    """Log from an offset and the status at each change, for as long as somebody listens."""
    position = int(offset)
    say(Line(log_size=log_size(folder)))
    names = ["program.json", "started.json", "exit.json", "heartbeat.json", "error.json"]
    names += ["stop.json", "burnin.json"]
    seen: list[tuple[int, int] | None] | None = None
    said: AttemptStatus | None = None
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
            say(Line(log=base64.b64encode(data).decode(), offset=position, at=at))
            position += len(data)
            beat = time.monotonic()
        if known != said:
            say(Line(status=known))
            said = known
            beat = time.monotonic()
        if time.monotonic() > beat + BEAT:
            say(Line(beat=time.time()))
            beat = time.monotonic()
        time.sleep(POLL)


def stamp(path: str) -> tuple[int, int] | None:
    """Changes with each replacement of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
