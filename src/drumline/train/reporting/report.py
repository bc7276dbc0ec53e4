"""What a run tells, on host 0: a progress bar or plain lines, JSON lines, TensorBoard."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
from rich.progress import BarColumn, Progress, TextColumn

from drumline.train.checkpoints.fence import FencedOff
from drumline.train.checkpoints.files import grow, still_writable
from drumline.train.reporting.tensorboard import EventFile

CHECK_SECONDS = 1.0
"""The longest that lines are added without a look at whether the folder is still ours."""
PRINT_EVERY = 1.0
"""Seconds between two lines where there is no progress bar: a log is read afterwards."""


class Reports:
    """Everything that is written down about one attempt. Only host 0 speaks, once it is open."""

    def __init__(self, steps: int, *, item: str) -> None:
        """Mute until `open`: a full disk may have to be cleared before a file can be begun."""
        self._steps, self._item = steps, item
        self._terminal: _Terminal | None = None
        self._files: _Files | None = None

    def open(
        self, folder: str | None, attempt: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to write, on host 0. Without a folder, write to the terminal only.

        `check` raises FencedOff if another program has taken over the folder.
        """
        if jax.process_index() == 0:
            self._files = _Files(folder, attempt, check) if folder else None
            self._terminal = _Terminal(self._steps)

    def say(self, text: str) -> None:
        """One sentence for whoever watches."""
        if self._terminal:
            self._terminal.say(text)

    def tell(self, step: int, values: Mapping[str, float | None], now: float) -> None:
        """The values of a step."""
        if self._terminal is None:
            return
        known = {name: value for name, value in values.items() if value is not None}
        if self._files:
            self._files.add(step, known, now)
        self._terminal.show(step, "  ".join(described(known) + speed(known, self._item)))

    def close(self) -> None:
        """See to it that everything is there."""
        if self._terminal:
            self._terminal.close()
        if self._files:
            self._files.close()


class _Files:
    """The metrics in the run's folder: JSON lines, and TensorBoard's events."""

    def __init__(self, folder: str, attempt: int, check: Callable[[], None]) -> None:
        self._folder, self._attempt = folder, attempt
        self._check, self._checked_at = check, time.monotonic()
        self._lines = grow(f"{folder}/metrics.jsonl", lines=True, check=check)
        self._events: EventFile | None = None

    def add(self, step: int, values: Mapping[str, float], now: float) -> None:
        line = {"attempt": self._attempt, "step": step, "time": round(now, 3)}
        told = {name: _plain(value) for name, value in values.items()}
        with still_writable(self._folder):
            if time.monotonic() - self._checked_at >= CHECK_SECONDS:
                self._check()
                self._checked_at = time.monotonic()
            self._lines.add(json.dumps({**line, **told}).encode() + b"\n")
            if self._events is None:
                folder = f"{self._folder}/tensorboard"
                self._events = EventFile(folder, self._attempt, step, self._check)
            self._events.write(step, values)

    def close(self) -> None:
        with suppress(FencedOff):
            self._lines.close()
        with suppress(FencedOff):
            if self._events:
                self._events.close()


class _Terminal:
    """A progress bar where somebody watches, plain lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed = -math.inf
        self._bar = _Bar(steps) if sys.stdout.isatty() else None

    def say(self, text: str) -> None:
        if self._bar:
            self._bar.progress.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def show(self, step: int, text: str) -> None:
        if self._bar:
            self._bar.move(step, text)
        elif time.monotonic() - self._printed >= PRINT_EVERY or step == self._steps:
            self._printed = time.monotonic()
            print(f"step {step:,}/{self._steps:,}  {text}", flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.progress.stop()


class _Bar:
    def __init__(self, steps: int) -> None:
        self.progress = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            refresh_per_second=4,
        )
        self._task = self.progress.add_task("", total=steps)
        self.progress.start()

    def move(self, step: int, text: str) -> None:
        self.progress.update(self._task, completed=step, description=text)


def described(values: Mapping[str, float]) -> list[str]:
    """What was measured, without the speed: `loss 0.412`."""
    aside = ("rate", "mfu", "goodput", "grad_norm")
    return [f"{k.replace('_', ' ')} {v:.4g}" for k, v in values.items() if k not in aside]


def speed(values: Mapping[str, float], item: str) -> list[str]:
    """`9.8k images/s`, `MFU 41.2 %`."""
    words = [f"{_short(values['rate'])} {item}/s"] if "rate" in values else []
    return [*words, f"MFU {100 * values['mfu']:.1f} %"] if "mfu" in values else words


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _plain(value: float) -> Any:
    """JSON has no word for what is not finite: it is told as text, as in the heartbeat."""
    return value if math.isfinite(value) else str(value)
