"""`follow`, `create --follow`: a job's events as they come, and a line of progress, redrawn.

`Story` turns events into lines and keeps what earlier events said; `Screen` puts lines on a
terminal or into a pipe; `follow` asks the server and moves things from one to the other.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import typer

from drumline.cli.connect import runnable
from drumline.cli.rendering.show import after_what, cause_lines, next_steps, result_lines
from drumline.cli.rendering.text import cut, duration, harmless, width, wrapped
from drumline.cli.rendering.views import (
    ENDED,
    Job,
    figure,
    is_number,
    percent,
    progress_count,
    rates,
    setbacks,
)

if TYPE_CHECKING:
    from drumline.jobs.client import Client

Event = Mapping[str, Any]

TIMES_AT = 62
LONGEST_TIME = 12
INDENT = 4
SMALLEST_BAR = 6
MOST_LINES = 40
"""The most lines of a story that began long ago."""
BAR = 22
# A terminal is watched; a log file is read later.
POLL_TERMINAL, POLL_PIPE = 1.0, 5.0
PROGRESS_IN_PIPE = 15.0

_DONE = {"slice": "slice", "code": "code", "setup": "setup", "burnin": "burn-in", "run": "run"}
_SETBACKS = {
    "preempted": "!",
    "badhost": "!",
    "refused": "!",
    "parked": "!",
    "stuck": "!",
    "left": "!",
    "failed": "✗",
}
_SAID = {"refused": "slice refused: ", "parked": "slice parked: "}
_QUIET = {"created", "asked", "succeeded", "cancelled", "ended"}
_COLOURS = {"✓": "green", "!": "yellow", "✗": "red", "▸": "cyan", "●": "cyan"}


class Story:
    """What has been printed of a job so far, so that each event adds only what is new."""

    def __init__(self, columns: int | None = None) -> None:
        """Before the first event; `columns` is the most columns of a line."""
        self._times_at = TIMES_AT if columns is None else min(TIMES_AT, columns - LONGEST_TIME)
        self._milestone: float | None = None
        self._printed: dict[str, str] = {}

    def lines(self, event: Event) -> list[str]:
        """The lines for an event, mostly one."""
        kind, text = str(event["kind"]), harmless(event["text"])
        since, again = self._milestone, self._printed.get(kind) == text
        self._printed[kind] = text
        if kind in _DONE or kind in {"created", "asked", "resumed"}:
            self._milestone = float(event["time"])
        if kind in _QUIET:
            return []
        if kind in _DONE:
            # The next attempt sends the same code and runs the same command: print them once.
            if again and kind != "slice":
                return []
            took = duration(event["time"] - since) if since is not None and kind != "run" else ""
            return [_timed(f"  ✓ {_DONE[kind]:7} {text}", took, self._times_at)]
        if kind in _SETBACKS:
            return [f"  {_SETBACKS[kind]} {_SAID.get(kind, '')}{text}"]
        mark = "!" if kind == "warning" else "·"
        return [] if again else [f"  {mark} {text}"]


def _timed(line: str, took: str, column: int) -> str:
    return line + " " * max(column - width(line), 2) + took if took else line


def opening(job: Job) -> str:
    """`● 000001 digits · v4-16 · local`."""
    zones = (job.get("spec") or {}).get("zones") or []
    listed = [zones] if isinstance(zones, str) else [str(zone) for zone in zones]
    local = job.get("cloud") == "emulator" and listed == ["any"]
    if local or (listed and all(zone.startswith("local-") for zone in listed)):
        listed = ["local"]
    accelerator = job.get("accelerator") or ""
    parts = [f"{job['id']} {harmless(job['name'])}", harmless(accelerator), ", ".join(listed)]
    return "● " + " · ".join(part for part in parts if part)


def progress_line(job: Job, columns: int | None = None) -> str:
    """`  ▸ step  140/300 ━━━━━━━━╸━━━━  loss 0.412  9.8k img/s  MFU 41.2 %`, or nothing.

    Without columns it is for a pipe and has no bar; with few, the bar is short or left out.
    """
    progress = job.get("progress") or {}
    at = progress_count(progress)
    if not at or job["status"] not in {"RUNNING", *ENDED}:
        return ""
    parts = [f"step {at}" if columns is None else f"step {at:>8}"]
    if "loss" in progress:
        parts.append(f"loss {figure(progress['loss'])}")
    parts += rates(progress, brief=True)
    if "mfu" in progress:
        parts.append(f"MFU {percent(progress['mfu'])}")
    if columns is not None:
        while len(parts) > 1 and width("  ▸ " + "  ".join(parts)) >= columns:
            parts.pop()
        room = columns - 2 - width("  ▸ " + "  ".join(parts))
        parts[0] += _bar(progress, min(room, BAR))
    return "  ▸ " + "  ".join(parts)


def _bar(progress: Mapping[str, Any], size: int) -> str:
    """` ━━━━━━━━╸━━━━`, if the end is known and there is room."""
    total = progress.get("total")
    if not is_number(total) or total <= 0 or size < SMALLEST_BAR:
        return ""
    done = min(max(int(size * progress["step"] / total), 0), size)
    return " " + ("━" * done + "╸" + "━" * size)[:size]


def waiting_line(job: Job, now: float) -> str:
    """The line while there is no progress: the state, its reason, and for how long."""
    text = f"  ▸ {str(job['status']).lower()}"
    if job.get("reason"):
        text += f" · {harmless(job['reason'])}"
    return text + f" · {duration(now - job['created'])} since it was created"


def closing(job: Job) -> list[str]:
    """How the job ended, why it failed if it did, and what to do next."""
    number, status = job["id"], job["status"]
    took = (job.get("ended") or 0.0) - (job.get("created") or 0.0)
    if status == "SUCCEEDED":
        result, *more = result_lines(job) or [""]
        facts = [f"✓ {number} succeeded" + after_what(job), result, ", ".join(setbacks(job))]
        lines = [" · ".join(fact for fact in facts if fact)]
        lines += [f"  {line}" for line in more]
    elif status == "FAILED":
        lines = [f"✗ {number} failed" + after_what(job)]
        lines += [f"  {line}" for line in cause_lines(job)]
    else:
        lines = [f"! {number} was cancelled" + (f" after {duration(took)}" if took > 0 else "")]
    return [*lines, runnable(f"  next: {closing_steps(job)}")]


def closing_steps(job: Job) -> str:
    """The next commands; after a success, those that show its results."""
    if job["status"] == "SUCCEEDED":
        stepped = progress_count(job.get("progress"))
        verbs = ("show", "plot", "logs") if stepped else ("show", "logs")
        return " · ".join(f"drumline {verb} {job['id']}" for verb in verbs)
    return next_steps(job)


class Screen:
    """Lines that stay and, below them on a terminal, a line that is redrawn."""

    def __init__(
        self,
        stream: TextIO,
        columns: int | None = None,
        colour: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`columns` is None for a pipe, where progress is a plain line now and then."""
        self._stream = stream
        self._columns = columns
        self._colour = colour
        self._clock = clock
        self._drawn = ""
        self._written = ""
        self._written_at: float | None = None

    @property
    def columns(self) -> int | None:
        """The width of the terminal; None for a pipe."""
        return self._columns

    @property
    def redraws(self) -> bool:
        """Whether this is a terminal."""
        return self._columns is not None

    def say(self, line: str, keep_progress: bool = False) -> None:
        """Write a line that stays, and keep the progress above it or erase it."""
        if self._drawn:
            self._write("\n" if keep_progress else "\r\x1b[K")
            self._drawn = ""
        first, *more = [line] if self._columns is None else wrapped(line, self._columns, INDENT)
        self._write("\n".join([self._painted(first), *more]) + "\n")

    def progress(self, line: str, last: bool = False) -> None:
        """Redraw the progress; in a pipe, write it now and then, and always the last."""
        if not line or line in (self._drawn, self._written):
            return
        if self._columns is not None:
            self._write("\r\x1b[K" + self._painted(cut(line, self._columns - 1)))
            self._drawn = line
            return
        now = self._clock()
        if last or self._written_at is None or now - self._written_at >= PROGRESS_IN_PIPE:
            self._written, self._written_at = line, now
            self._write(line + "\n")

    def wipe(self) -> None:
        """Erase the redrawn line."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _painted(self, line: str) -> str:
        mark = line.lstrip()[:1]
        if not self._colour or mark not in _COLOURS:
            return line
        return line.replace(mark, typer.style(mark, fg=_COLOURS[mark]), 1)


def follow(client: "Client", job: Job, screen: Screen) -> Job:
    """Print a job's events until it has ended; returns the job at its end."""
    screen.say(opening(job))
    story, after = Story(screen.columns), 0
    patience, moving = 0.0, ""
    while True:
        answer = client.events(job["id"], after, patience)
        now: Job = answer["job"]
        ended = now["status"] in ENDED
        lines: list[tuple[str, bool]] = []
        for event in answer["events"]:
            after = max(after, int(event["id"]))
            if ended and event is answer["events"][-1] and event["kind"] == now["status"].lower():
                continue  # the closing line says it
            keep = event["kind"] in _SETBACKS and bool(moving)
            lines += [(line, keep) for line in story.lines(event)]
        if len(lines) > MOST_LINES:
            screen.say(f"  … {len(lines) - MOST_LINES:,} earlier lines: show {job['id']} --json")
        for line, keep in lines[-MOST_LINES:]:
            screen.say(line, keep_progress=keep)
        moving = progress_line(now, screen.columns)
        if moving or not screen.redraws:
            screen.progress(moving, last=ended)
        elif not ended:
            screen.progress(waiting_line(now, time.time()))
        if ended:
            break
        patience = POLL_TERMINAL if screen.redraws else POLL_PIPE
    # The summary in the events does not say why a job failed.
    final = client.show(job["id"])
    first, *rest = closing(final)
    screen.say(first, keep_progress=bool(moving))
    for line in rest:
        screen.say(line)
    return final
