"""Goodput: the share of the time since the first start that went into steps that counted.

Time without a slice, restarts, compilation, saving, evaluation and repeated steps all reduce it. A
small file beside the checkpoints, `attempts.json`, has what later attempts need: the time of the
first start, and the seconds of steps up to each checkpoint.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from etils import epath  # type: ignore[import-untyped]

from drumline.errors import UserError
from drumline.train.checkpoints.files import open_folder, read_json, write_json
from drumline.train.multihost import broadcast_from_host_0, failed_hosts

_MAX_CHECKPOINTS = 1000
"""The number of earlier checkpoints in the file. A run never returns to an older checkpoint."""


@dataclass(frozen=True)
class RunHistory:
    """The contents of `attempts.json`."""

    first_start: float
    attempt: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    """The seconds of steps up to each checkpoint, by its step."""

    def with_checkpoint(self, step: int, seconds: float) -> "RunHistory":
        """Add a checkpoint. Later ones belong to steps that were discarded, and are removed."""
        earlier = sorted(other for other in self.seconds if other < step)[-_MAX_CHECKPOINTS:]
        kept = {other: self.seconds[other] for other in earlier}
        return replace(self, seconds={**kept, step: seconds})

    def goodput(self, seconds: float, now: float) -> float:
        """Return the goodput until now, with this many seconds of steps that counted."""
        return min(1.0, seconds / max(now - self.first_start, 1e-9))

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the file."""
        seconds = {str(step): round(value, 3) for step, value in self.seconds.items()}
        return {"first_start": self.first_start, "attempt": self.attempt, "seconds": seconds}


def start_attempt(saved: Mapping[str, Any] | None, attempt: int | None, now: float) -> RunHistory:
    """Return the history at the start of an attempt. By default the attempts are numbered from 1.

    `saved` is the contents of the file.
    """
    try:
        first_start = float(saved["first_start"]) if saved else now
        last = int(saved["attempt"]) if saved else 0
        seconds = {int(step): float(s) for step, s in saved["seconds"].items()} if saved else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        # The file is only for the record, so an invalid file must not prevent the training.
        first_start, last, seconds = now, 0, {}
    return RunHistory(first_start, attempt if attempt is not None else last + 1, seconds)


class StepClock:
    """Counts the seconds of steps only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start at zero."""
        self._now = now
        self.restart(0.0)

    def restart(self, seconds: float) -> None:
        """Continue from this count. The first step after it warms up and does not count."""
        self.seconds = seconds
        self._last_time: float | None = None
        self._window = (0, 0.0)
        self._steps_per_second = 0.0

    def end_step(self) -> None:
        """Count the time since the last step."""
        now = self._now()
        if self._last_time is not None:
            elapsed = now - self._last_time
            self.seconds += elapsed
            self._window = (self._window[0] + 1, self._window[1] + elapsed)
        self._last_time = now

    def end_pause(self) -> None:
        """Do not count the time since the last step, which went into something else."""
        if self._last_time is not None:
            self._last_time = self._now()

    def steps_per_second(self) -> float:
        """Return the rate since the last call, or the last rate if no step has ended since."""
        steps, seconds = self._window
        if steps:
            self._window, self._steps_per_second = (0, 0.0), steps / max(seconds, 1e-9)
        return self._steps_per_second


class Goodput:
    """The goodput of a run, from this attempt's clock and the history of earlier attempts."""

    def __init__(self, history: RunHistory, clock: StepClock) -> None:
        """Count from `resume` on."""
        self.clock = clock
        self._history = history

    def resume(self, step: int) -> None:
        """Continue from the count at the checkpoint of this step."""
        self.clock.restart(self._history.seconds.get(step, 0.0))

    def add_checkpoint(self, step: int) -> RunHistory:
        """Return the history with a new checkpoint, to be written once it is complete."""
        self._history = self._history.with_checkpoint(step, self.clock.seconds)
        return self._history

    def value(self, now: float) -> float:
        """Return the goodput until now."""
        return self._history.goodput(self.clock.seconds, now)


def open_history(folder: str | None) -> RunHistory:
    """Start an attempt in this folder. All hosts call this, and all must see the same folder."""
    text = os.environ.get("DRUMLINE_ATTEMPT", "")
    attempt = int(text) if text.isdigit() else None
    if folder is None:
        return start_attempt(None, attempt, time.time())
    history = None
    if jax.process_index() == 0:
        open_folder(folder)
        history = start_attempt(read_json(_file(folder)), attempt, time.time())
        write_history(folder, history)
    broadcast_from_host_0([])  # Wait until host 0 has written the file.
    failed = failed_hosts(bool(epath.Path(_file(folder)).exists()))
    if failed:
        raise UserError(
            f"checkpoint: host {failed[0]} does not see {folder}; use a folder that all hosts share"
        )
    return history or start_attempt(read_json(_file(folder)), attempt, time.time())


def write_history(folder: str, history: RunHistory) -> None:
    """Write the history for the next attempt."""
    write_json(_file(folder), history.as_json())


def _file(folder: str) -> str:
    return f"{folder}/attempts.json"
