"""What a run tells, on host 0: a progress bar or plain lines, JSON lines, TensorBoard."""

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from drumline.train.checkpoints.files import grow, still_writable
from drumline.train.reporting.tensorboard import EventFile

PRINT_EVERY = 1.0
"""Seconds between two lines where there is no progress bar: a log is read afterwards."""


class Reports:
    """Everything that is written down about one attempt."""

    def __init__(self, folder: str | None, attempt: int, steps: int, *, item: str) -> None:
        """Without a folder only the terminal hears of it."""
        self._folder, self._attempt, self._steps, self._item = folder, attempt, steps, item
        self._lines = grow(f"{folder}/metrics.jsonl", lines=True) if folder else None
        self._events: EventFile | None = None
        self._printed = -math.inf
        self._bar = _Bar(steps) if sys.stdout.isatty() else None

    def say(self, text: str) -> None:
        """One sentence for whoever watches."""
        if self._bar:
            self._bar.progress.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def tell(self, step: int, values: Mapping[str, float | None], now: float) -> None:
        """The values of a step."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._lines and self._folder:
            line = {"attempt": self._attempt, "step": step, "time": round(now, 3)}
            told = {name: _plain(value) for name, value in known.items()}
            with still_writable(self._folder):
                self._lines.add(json.dumps({**line, **told}).encode() + b"\n")
                if self._events is None:
                    folder = f"{self._folder}/tensorboard"
                    self._events = EventFile(folder, self._attempt, step)
                self._events.write(step, known)
        text = "  ".join(described(known) + speed(known, self._item))
        if self._bar:
            self._bar.move(step, text)
        elif time.monotonic() - self._printed >= PRINT_EVERY or step == self._steps:
            self._printed = time.monotonic()
            print(f"step {step:,}/{self._steps:,}  {text}", flush=True)

    def close(self) -> None:
        """See to it that everything is there."""
        if self._bar:
            self._bar.progress.stop()
        for file in (self._lines, self._events):
            if file:
                file.close()


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
