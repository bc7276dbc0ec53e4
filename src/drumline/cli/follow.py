"""`follow` and `create --follow`: print a job's events as they happen, and a progress line.

`EventFormatter` formats events, `Screen` writes lines to a terminal or a pipe, and `follow` reads
the events from the server.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import typer

from drumline.cli.connect import runnable
from drumline.cli.rendering.show import (
    next_steps,
    outcome_suffix,
    render_cause,
    render_result,
    render_slice,
)
from drumline.cli.rendering.text import display_width, format_duration, sanitize, truncate, wrap
from drumline.cli.rendering.views import (
    FINAL_STATUSES,
    Job,
    format_number,
    format_percent,
    format_progress,
    format_rates,
    interruptions_and_reruns,
    is_number,
)

if TYPE_CHECKING:
    from drumline.jobs.client import Client

Event = Mapping[str, Any]

DURATION_COLUMN = 62
MAX_DURATION_WIDTH = 12
INDENT = 4
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 6, 22
MIN_STEP_WIDTH = 8
MAX_LINES = 40
"""The maximum number of past events to print."""
# A user watches a terminal, and reads a log file later.
TERMINAL_POLL_SECONDS, PIPE_POLL_SECONDS = 1.0, 5.0
PIPE_PROGRESS_SECONDS = 15.0
MIN_PACKING_BYTES = 10**7
"""The size of code from which the progress of packing is shown."""

_STEPS = {"slice": "slice", "code": "code", "setup": "setup", "burnin": "burn-in", "run": "run"}
_ERROR_MARKS = {
    "preempted": "!",
    "badhost": "!",
    "unreachable": "!",
    "unclear": "!",
    "refused": "!",
    "parked": "!",
    "stuck": "!",
    "left": "!",
    "failed": "✗",
}
_PREFIXES = {
    "refused": "rejected slice: ",
    "parked": "slice held back: ",
    "outputs": "outputs: ",
    "resumed": "resumed ",
}
_HIDDEN = {"created", "asked", "succeeded", "cancelled", "ended"}
_COLOURS = {"✓": "green", "!": "yellow", "✗": "red", "▸": "cyan", "●": "cyan"}


class EventFormatter:
    """Formats the events of a job, without repeating earlier lines."""

    def __init__(self, columns: int | None = None) -> None:
        """`columns` is the width of the terminal, or None for a pipe."""
        self._duration_column = DURATION_COLUMN
        if columns is not None:
            self._duration_column = min(DURATION_COLUMN, columns - MAX_DURATION_WIDTH)
        self._step_at: float | None = None
        self._printed: dict[str, str] = {}

    def lines(self, event: Event) -> list[str]:
        """Return the lines for an event, usually one."""
        kind, text = str(event["kind"]), sanitize(event["text"])
        since, repeated = self._step_at, self._printed.get(kind) == text
        self._printed[kind] = text
        if kind in _STEPS or kind in {"created", "asked", "resumed"}:
            self._step_at = float(event["time"])
        if kind in _HIDDEN:
            return []
        if kind in _STEPS:
            # Later attempts send the same code and run the same command. Print them once.
            if repeated and kind != "slice":
                return []
            duration = ""
            if since is not None and kind != "run":
                duration = format_duration(event["time"] - since)
            line = f"  ✓ {_STEPS[kind]:7} {text}"
            return [_with_duration(line, duration, self._duration_column)]
        if kind in _ERROR_MARKS:
            return [f"  {_ERROR_MARKS[kind]} {_PREFIXES.get(kind, '')}{text}"]
        mark = "!" if kind == "warning" else "·"
        return [] if repeated else [f"  {mark} {_PREFIXES.get(kind, '')}{text}"]


def _with_duration(line: str, duration: str, column: int) -> str:
    return line + " " * max(column - display_width(line), 2) + duration if duration else line


def opening_line(job: Job) -> str:
    """Return a line such as `● 000001 digits · v4-16 · local`."""
    spec_zones = (job.get("spec") or {}).get("zones") or []
    zones = [spec_zones] if isinstance(spec_zones, str) else [str(zone) for zone in spec_zones]
    local = job.get("cloud") == "emulator" and zones == ["any"]
    if local or (zones and all(zone.startswith("local-") for zone in zones)):
        zones = ["local"]
    accelerator = job.get("accelerator") or ""
    parts = [f"{job['id']} {sanitize(job['name'])}", sanitize(accelerator), ", ".join(zones)]
    return "● " + " · ".join(part for part in parts if part)


def progress_line(job: Job, columns: int | None = None) -> str:
    """Return a line such as `  ▸ step  140/300 ━━━━━━━━╸━━━━  loss 0.412  MFU 41.2 %`, or nothing.

    `columns` is the width of the terminal. A pipe (None) gets no bar.
    """
    progress = job.get("progress") or {}
    step = format_progress(progress)
    if not step or job["status"] not in {"RUNNING", *FINAL_STATUSES}:
        return ""
    parts = [f"step {step}"]
    if columns is not None:
        # As wide as the last step, so that the line does not move while the step grows.
        last_step = format_progress(progress | {"step": progress.get("total", 0)})
        parts = [f"step {step:>{max(len(last_step), MIN_STEP_WIDTH)}}"]
    if "loss" in progress:
        parts.append(f"loss {format_number(progress['loss'])}")
    parts += format_rates(progress, brief=True)
    if "mfu" in progress:
        parts.append(f"MFU {format_percent(progress['mfu'])}")
    if columns is not None:
        while len(parts) > 1 and display_width("  ▸ " + "  ".join(parts)) >= columns:
            parts.pop()
        free = columns - 2 - display_width("  ▸ " + "  ".join(parts))
        parts[0] += _bar(progress, min(free, MAX_BAR_WIDTH))
    return "  ▸ " + "  ".join(parts)


def packing_line(done: int, total: int, columns: int | None = None) -> str:
    """Return a line such as `  ▸ packing 120 of 200 MB ━━━━━╸━━━`, or nothing for small code."""
    if total < MIN_PACKING_BYTES:
        return ""
    text = f"  ▸ packing {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return text if columns is None else text + _bar({"step": done, "total": total}, MAX_BAR_WIDTH)


def _bar(progress: Mapping[str, Any], width: int) -> str:
    """Return a bar such as ` ━━━━━━━━╸━━━━` if the total is known and the bar fits."""
    total = progress.get("total")
    if not is_number(total) or total <= 0 or width < MIN_BAR_WIDTH:
        return ""
    done = min(max(int(width * progress["step"] / total), 0), width)
    return " " + ("━" * done + "╸" + "━" * width)[:width]


def waiting_line(job: Job, now: float) -> str:
    """Return the line for a job without progress: its status, reason and age."""
    text = f"  ▸ {str(job['status']).lower()}"
    if job.get("reason"):
        text += f" · {sanitize(job['reason'])}"
    return text + f" · created {format_duration(now - job['created'])} ago"


def closing_lines(job: Job) -> list[str]:
    """Return the result of the job, the cause of its failure, and the next commands."""
    job_id, status = job["id"], job["status"]
    duration = (job.get("ended") or 0.0) - (job.get("created") or 0.0)
    if status == "SUCCEEDED":
        result, *more_lines = render_result(job) or [""]
        facts = [
            f"✓ {job_id} succeeded" + outcome_suffix(job),
            result,
            ", ".join(interruptions_and_reruns(job)),
        ]
        lines = [" · ".join(fact for fact in facts if fact)]
        lines += [f"  {line}" for line in more_lines]
    elif status == "FAILED":
        lines = [f"✗ {job_id} failed" + outcome_suffix(job)]
        lines += [f"  {line}" for line in render_cause(job)]
        if job.get("chips_held"):
            lines += [f"  its slice: {line}" for line in render_slice(job, time.time())]
    else:
        lines = [
            f"! {job_id} was cancelled"
            + (f" after {format_duration(duration)}" if duration > 0 else "")
        ]
    return [*lines, runnable(f"  next: {closing_steps(job)}")]


def closing_steps(job: Job) -> str:
    """Return the next commands. After a success, they show its results."""
    if job["status"] == "SUCCEEDED":
        has_steps = format_progress(job.get("progress"))
        verbs = ("show", "plot", "logs") if has_steps else ("show", "logs")
        return " · ".join(f"drumline {verb} {job['id']}" for verb in verbs)
    return next_steps(job)


class Screen:
    """Output of permanent lines and, on a terminal, a progress line below them."""

    def __init__(
        self,
        stream: TextIO,
        columns: int | None = None,
        colour: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`columns` is None for a pipe, which gets an occasional line of progress."""
        self._stream = stream
        self._columns = columns
        self._colour = colour
        self._clock = clock
        self._progress = ""
        self._logged = ""
        self._logged_at: float | None = None

    @property
    def columns(self) -> int | None:
        """The width of the terminal, or None for a pipe."""
        return self._columns

    @property
    def redraws(self) -> bool:
        """True if this is a terminal."""
        return self._columns is not None

    def write_line(self, line: str, keep_progress: bool = False) -> None:
        """Write a permanent line. Keep the progress line above it, or erase it."""
        if self._progress:
            self._write("\n" if keep_progress else "\r\x1b[K")
            self._progress = ""
        first, *more = [line] if self._columns is None else wrap(line, self._columns, INDENT)
        self._write("\n".join([self._coloured(first), *more]) + "\n")

    def progress(self, line: str, last: bool = False) -> None:
        """Redraw the progress line. In a pipe, write it occasionally, and always the last one."""
        if not line or line in (self._progress, self._logged):
            return
        if self._columns is not None:
            self._write("\r\x1b[K" + self._coloured(truncate(line, self._columns - 1)))
            self._progress = line
            return
        now = self._clock()
        if last or self._logged_at is None or now - self._logged_at >= PIPE_PROGRESS_SECONDS:
            self._logged, self._logged_at = line, now
            self._write(line + "\n")

    def clear_progress(self) -> None:
        """Erase the progress line."""
        if self._progress:
            self._write("\r\x1b[K")
            self._progress = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _coloured(self, line: str) -> str:
        mark = line.lstrip()[:1]
        if not self._colour or mark not in _COLOURS:
            return line
        return line.replace(mark, typer.style(mark, fg=_COLOURS[mark]), 1)


def follow(client: "Client", job: Job, screen: Screen) -> Job:
    """Print a job's events until it has ended. Return the job at its end."""
    screen.write_line(opening_line(job))
    formatter, after = EventFormatter(screen.columns), 0
    wait_seconds, progress = 0.0, ""
    while True:
        answer = client.events(job["id"], after, wait_seconds)
        current: Job = answer["job"]
        finished = current["status"] in FINAL_STATUSES
        lines: list[tuple[str, bool]] = []
        for event in answer["events"]:
            after = max(after, int(event["id"]))
            if (
                finished
                and event is answer["events"][-1]
                and event["kind"] == current["status"].lower()
            ):
                continue  # the closing line repeats it
            keep = event["kind"] in _ERROR_MARKS and bool(progress)
            lines += [(line, keep) for line in formatter.lines(event)]
        if len(lines) > MAX_LINES:
            screen.write_line(
                f"  … {len(lines) - MAX_LINES:,} earlier lines: show {job['id']} --json"
            )
        for line, keep in lines[-MAX_LINES:]:
            screen.write_line(line, keep_progress=keep)
        progress = progress_line(current, screen.columns)
        if progress or (not screen.redraws and not current.get("sending")):
            screen.progress(progress, last=finished)
        elif not finished:
            screen.progress(waiting_line(current, time.time()))
        if finished:
            break
        wait_seconds = TERMINAL_POLL_SECONDS if screen.redraws else PIPE_POLL_SECONDS
    # The summary in the events does not contain the cause of a failure.
    final = client.show(job["id"])
    first, *rest = closing_lines(final)
    screen.write_line(first, keep_progress=bool(progress))
    for line in rest:
        screen.write_line(line)
    return final
