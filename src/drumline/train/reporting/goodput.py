"""Goodput: of all the time since a job first started, the share spent on steps that counted.

Time without a slice, restarts, compilation, saving, evaluation and steps that had to be run again
all count against it. What is needed across attempts stands in one small file beside the
checkpoints: when it all began, and how many seconds of steps led to each checkpoint.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from drumline.train.agree import as_host_0_says, hosts_without
from drumline.train.checkpoints.files import exists, open_folder, read_json, write_json
from drumline.train.mistakes import Mistake

_REMEMBERED = 1000
"""Checkpoints whose seconds are known; nobody goes back further."""


@dataclass(frozen=True)
class History:
    """What earlier attempts left for this one to know."""

    first_start: float
    attempt: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Step of a checkpoint → seconds of steps that led to it."""

    def at_checkpoint(self, step: int, seconds: float) -> "History":
        """With one more checkpoint. Those after it belong to a course that was given up."""
        earlier = sorted(before for before in self.seconds if before < step)[-_REMEMBERED:]
        kept = {before: self.seconds[before] for before in earlier}
        return replace(self, seconds={**kept, step: seconds})

    def goodput(self, seconds: float, now: float) -> float:
        """The share so far, with this many seconds of steps that counted."""
        return min(1.0, seconds / max(now - self.first_start, 1e-9))

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        told = {str(step): round(spent, 3) for step, spent in self.seconds.items()}
        return {"first_start": self.first_start, "attempt": self.attempt, "seconds": told}


def begin_attempt(before: Mapping[str, Any] | None, attempt: int | None, now: float) -> History:
    """This attempt's history, from the file as it stood; its number is the job's, or the next."""
    try:
        first = float(before["first_start"]) if before else now
        last = int(before["attempt"]) if before else 0
        seconds = {int(step): float(s) for step, s in before["seconds"].items()} if before else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        # It is only for the record: a file that makes no sense is no reason not to train.
        first, last, seconds = now, 0, {}
    return History(first, attempt if attempt is not None else last + 1, seconds)


class Clock:
    """Counts the seconds of steps, and only those."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing counted."""
        self._now = now
        self.start(0.0)

    def start(self, seconds: float) -> None:
        """From here, with this much counted. The first step warms up: its time is not counted."""
        self.seconds = seconds
        self._mark: float | None = None
        self._window = (0, 0.0)
        self._pace = 0.0

    def tick(self) -> None:
        """A step was seen to end."""
        now = self._now()
        if self._mark is not None:
            self.seconds += now - self._mark
            self._window = (self._window[0] + 1, self._window[1] + now - self._mark)
        self._mark = now

    def go_on(self) -> None:
        """Something else took the time since the last step."""
        if self._mark is not None:
            self._mark = self._now()

    def steps_per_second(self) -> float:
        """Since this was last asked; what it was then if there has been no step."""
        steps, seconds = self._window
        if steps:
            self._window, self._pace = (0, 0.0), steps / max(seconds, 1e-9)
        return self._pace


class Goodput:
    """The clock of this attempt's steps, together with what earlier attempts left to know."""

    def __init__(self, history: History, clock: Clock) -> None:
        """Nothing counted before `resume`."""
        self.clock = clock
        self._history = history

    def resume(self, step: int) -> None:
        """Count on from the seconds that led to this step's checkpoint."""
        self.clock.start(self._history.seconds.get(step, 0.0))

    def at_checkpoint(self, step: int) -> History:
        """The history with a checkpoint of this moment, for its file once that is whole."""
        self._history = self._history.at_checkpoint(step, self.clock.seconds)
        return self._history

    def share(self, now: float) -> float:
        """The goodput so far."""
        return self._history.goodput(self.clock.seconds, now)


def open_history(folder: str | None) -> History:
    """Begin an attempt in this folder. All hosts call it, and all must see the same folder."""
    given = os.environ.get("DRUMLINE_ATTEMPT", "")
    attempt = int(given) if given.isdigit() else None
    if folder is None:
        return begin_attempt(None, attempt, time.time())
    history = None
    if jax.process_index() == 0:
        open_folder(folder)
        history = begin_attempt(read_json(_file(folder)), attempt, time.time())
        write_history(folder, history)
    as_host_0_says([])  # until it has written
    blind = hosts_without(exists(_file(folder)))
    if blind:
        raise Mistake(f"checkpoint: host {blind[0]} does not see {folder}; use one that all share")
    return history or begin_attempt(read_json(_file(folder)), attempt, time.time())


def write_history(folder: str, history: History) -> None:
    """Leave it for the next attempt."""
    write_json(_file(folder), history.as_json())


def _file(folder: str) -> str:
    return f"{folder}/attempts.json"
