"""What `list` prints, and the facts that other views share: from the server's answers to lines.

Pure functions. Every text that comes from a job passes through `harmless`. Colour is added last and
never carries meaning alone: the words are the same without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import typer

from drumline.cli.rendering.table import table_lines
from drumline.cli.rendering.text import NOTHING, count, cut, dollars, harmless, short, width

Job = Mapping[str, Any]

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})

HEADINGS: tuple[str, ...] = (
    "JOB ID",
    "USER",
    "NAME",
    "ACCELERATOR",
    "ZONE",
    "HOST0 IP",
    "STATUS",
    "PROGRESS",
    "NOTE",
)
_LARGEST = 2.0**63
_NARROWEST = {"NAME": 12, "NOTE": 20}
# Columns that a narrow terminal leaves out, the least important first; `show` has them all.
_LEFT_OUT = ("HOST0 IP", "USER", "ZONE", "ACCELERATOR", "PROGRESS")

_BRIEF = {"images": "img", "tokens": "tok", "examples": "ex", "samples": "samp"}

COLOURS = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "QUEUED": "yellow",
    "WAITING": "yellow",
    "STARTING": "cyan",
    "RECOVERING": "magenta",
    "FAILED": "red",
    "CANCELLED": "bright_black",
}


def list_lines(
    jobs: Sequence[Job], columns: int | None = None, colour: bool = False, rows: int | None = None
) -> list[str]:
    """The table and its summary; cut to `columns` and `rows` where a terminal sets them."""
    if not jobs:
        return ["no jobs · start one: drumline create job.yaml · ended ones: drumline list --all"]
    shown = jobs if rows is None else jobs[: max(rows - 3, 1)]
    headings, cells = HEADINGS, [_row(job) for job in shown]
    if columns is not None:
        headings, cells = _fit(cells, columns)

    def paint(column: int, cell: str) -> str:
        known = COLOURS.get(cell.rstrip()) if headings[column] == "STATUS" else None
        return typer.style(cell, fg=known) if known else cell

    heading, *lines = table_lines(headings, cells, paint=paint if colour else None)
    left_out = len(jobs) - len(shown)
    total = summary(jobs)
    return [
        typer.style(heading, bold=True) if colour else heading,
        *lines,
        *([f"… and {left_out:,} more"] if left_out else []),
        total if columns is None else cut(total, columns),
    ]


def _row(job: Job) -> list[str]:
    plain = (job["id"], job["user"], job["name"], job["accelerator"], job["zone"], job["host0_ip"])
    return [
        *(NOTHING if cell is None or cell == "" else harmless(cell) for cell in plain),
        harmless(job["status"]),
        progress_count(job.get("progress")) or NOTHING,
        note(job),
    ]


def _fit(rows: list[list[str]], columns: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Leave out columns until names and notes have room, then cut names first, then notes."""
    widths = {
        heading: max(map(width, column))
        for heading, column in zip(HEADINGS, zip(HEADINGS, *rows, strict=True), strict=True)
    }

    def excess(narrowest: Mapping[str, int]) -> int:
        least = [min(size, narrowest.get(heading, size)) for heading, size in widths.items()]
        return sum(least) + 2 * (len(widths) - 1) - columns

    for heading in _LEFT_OUT:
        if excess(_NARROWEST) <= 0:
            break
        del widths[heading]
    for heading, narrowest in (*_NARROWEST.items(), ("NOTE", 4), ("NAME", 4)):
        widths[heading] -= max(min(excess({}), widths[heading] - narrowest), 0)
    kept = [(heading, HEADINGS.index(heading), size) for heading, size in widths.items()]
    cells = [[cut(row[number], size) for _, number, size in kept] for row in rows]
    return tuple(heading for heading, _, _ in kept), cells


def summary(jobs: Sequence[Job]) -> str:
    """`2 slices held, 80 chips, about $212 an hour · 1 waiting`."""
    held = [job for job in jobs if job.get("chips_held")]
    waiting = sum(job["status"] in {"QUEUED", "WAITING"} for job in jobs)
    facts = [count(len(held), "slice") + " held"]
    if held:
        facts.append(count(sum(job["chips_held"] for job in held), "chip"))
    an_hour = sum(job.get("cost_per_hour") or 0.0 for job in held)
    if an_hour:
        facts.append(f"about {dollars(an_hour)} an hour")
    return ", ".join(facts) + (f" · {waiting:,} waiting" if waiting else "")


def progress_count(progress: Mapping[str, Any] | None) -> str:
    """`18,400/50,000`, `18,400` where the end is not known, or nothing."""
    step, total = (progress or {}).get("step"), (progress or {}).get("total")
    if not is_number(step):
        return ""
    return f"{step:,.0f}/{total:,.0f}" if is_number(total) else f"{step:,.0f}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value the program reported is a finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_LARGEST < value < _LARGEST  # an int may be too large for a float; nan is in no range


def rates(progress: Mapping[str, Any] | None, brief: bool = False) -> list[str]:
    """`9.8k images/s`; `brief` abbreviates common words: `9.8k img/s`."""
    reported = progress or {}
    found = [
        (value, key.removesuffix("_per_second"))
        for key, value in reported.items()
        if key.endswith("_per_second") and is_number(value)
    ]
    if is_number(reported.get("rate")):
        item = str(reported.get("item") or "steps")
        found.insert(0, (reported["rate"], _BRIEF.get(item, item) if brief else item))
    return [f"{short(value)} {harmless(item)}/s" for value, item in found]


def figure(value: object) -> str:
    """`0.4123`; what is not a finite number, such as nan, as the program wrote it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}"
    return NOTHING if value is None else harmless(value)


def percent(fraction: object, digits: int = 1) -> str:
    """`41.2 %`, or a dash for what is not a number."""
    return f"{100 * fraction:.{digits}f} %" if is_number(fraction) else NOTHING


def share(progress: Mapping[str, Any] | None) -> str:
    """`41.2 % MFU`, where the program reports it."""
    mfu = (progress or {}).get("mfu")
    return f"{percent(mfu)} MFU" if is_number(mfu) else ""


def note(job: Job) -> str:
    """Why a job waits or how it goes, and its preemptions and failures."""
    running = job["status"] == "RUNNING"
    parts = [harmless(job.get("reason") or ""), share(job.get("progress")) if running else ""]
    return " · ".join(part for part in [*parts, *troubles(job)] if part)


def troubles(job: Job) -> list[str]:
    """`3 preemptions`, `1 failure`, `1 bad host`: those that occurred."""
    kinds = (("preemptions", "preemption"), ("failures", "failure"), ("bad_hosts", "bad host"))
    return [count(job[key], noun) for key, noun in kinds if job.get(key)]


def setbacks(job: Job) -> list[str]:
    """Troubles and the steps they cost: `1 preemption`, `1 step run again`."""
    again = job.get("steps_again")
    found = troubles(job)
    if is_number(again) and (again or found):
        found.append(f"{count(int(again), 'step')} run again")
    return found
