"""The output of `list` and `--dry-run`, and facts that other views share. Pure functions.

All text from a job passes through `sanitize`. Colour carries no meaning of its own: the words are
the same without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import typer

from drumline.cli.rendering.text import (
    DASH,
    display_width,
    format_dollars,
    format_short,
    plural,
    render_table,
    sanitize,
    truncate,
)

Job = Mapping[str, Any]

FINAL_STATUSES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})

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
_MAX_NUMBER = 2.0**63
_MIN_WIDTHS = {"NAME": 12, "NOTE": 20}
# Columns that a narrow terminal omits, the least important first. `show` prints all of them.
_OPTIONAL = ("HOST0 IP", "USER", "ZONE", "ACCELERATOR", "PROGRESS")

_ABBREVIATIONS = {"images": "img", "tokens": "tok", "examples": "ex", "samples": "samp"}

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


def render_list(
    jobs: Sequence[Job], columns: int | None = None, colour: bool = False, rows: int | None = None
) -> list[str]:
    """Return the table and its summary, limited to the columns and rows of a terminal.

    Active jobs come first, oldest first, and then the ended ones, newest first.
    """
    if not jobs:
        return ["no jobs · create one: drumline create job.yaml · ended jobs: drumline list --all"]
    active = [job for job in jobs if _is_active(job)]
    finished = [job for job in reversed(jobs) if not _is_active(job)]
    visible = [*active, *finished][: None if rows is None else max(rows - 3, 1)]
    headings, cells = HEADINGS, [_row(job) for job in visible]
    if columns is not None:
        headings, cells = _fit(cells, columns)

    def paint(column: int, cell: str) -> str:
        colour = COLOURS.get(cell.rstrip()) if headings[column] == "STATUS" else None
        return typer.style(cell, fg=colour) if colour else cell

    heading, *lines = render_table(headings, cells, paint=paint if colour else None)
    hidden = len(jobs) - len(visible)
    total = summary_line(jobs)
    return [
        typer.style(heading, bold=True) if colour else heading,
        *lines,
        *([f"… and {hidden:,} more"] if hidden else []),
        total if columns is None else truncate(total, columns),
    ]


def _is_active(job: Job) -> bool:
    """Return True if a job has not ended, or has ended and still costs money."""
    return job["status"] not in FINAL_STATUSES or bool(job.get("chips_held") or job.get("parked"))


def _row(job: Job) -> list[str]:
    plain = (job["id"], job["user"], job["name"], job["accelerator"], job["zone"], job["host0_ip"])
    return [
        *(DASH if cell is None or cell == "" else sanitize(cell) for cell in plain),
        sanitize(job["status"]),
        format_progress(job.get("progress")) or DASH,
        status_note(job),
    ]


def _fit(rows: list[list[str]], columns: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Omit columns until names and notes have room. Then truncate names first, then notes."""
    widths = {
        heading: max(map(display_width, column))
        for heading, column in zip(HEADINGS, zip(HEADINGS, *rows, strict=True), strict=True)
    }

    def excess(min_widths: Mapping[str, int]) -> int:
        used = [min(size, min_widths.get(heading, size)) for heading, size in widths.items()]
        return sum(used) + 2 * (len(widths) - 1) - columns

    for heading in _OPTIONAL:
        if excess(_MIN_WIDTHS) <= 0:
            break
        del widths[heading]
    for heading, min_width in (*_MIN_WIDTHS.items(), ("NOTE", 4), ("NAME", 4)):
        widths[heading] -= max(min(excess({}), widths[heading] - min_width), 0)
    visible = [(heading, HEADINGS.index(heading), size) for heading, size in widths.items()]
    cells = [[truncate(row[number], size) for _, number, size in visible] for row in rows]
    return tuple(heading for heading, _, _ in visible), cells


def summary_line(jobs: Sequence[Job]) -> str:
    """Return a line such as `2 slices held, 80 chips, about $212 an hour · 1 waiting`."""
    holders = [job for job in jobs if job.get("chips_held")]
    waiting = sum(job["status"] in {"QUEUED", "WAITING"} for job in jobs)
    facts = [plural(len(holders), "slice") + " held"]
    if holders:
        facts.append(plural(sum(job["chips_held"] for job in holders), "chip"))
    cost_per_hour = sum(job.get("cost_per_hour") or 0.0 for job in holders)
    if cost_per_hour:
        facts.append(f"about {format_dollars(cost_per_hour)} an hour")
    would_cost = sum(job.get("would_cost_per_hour") or 0.0 for job in holders)
    if would_cost:
        subject = "emulated ones " if cost_per_hour else ""
        facts.append(f"{subject}would be about {format_dollars(would_cost)} an hour on Google")
    return ", ".join(facts) + (f" · {waiting:,} waiting" if waiting else "")


def format_progress(progress: Mapping[str, Any] | None) -> str:
    """Format as `18,400/50,000`, as `18,400` if the total is unknown, or as nothing."""
    step, total = (progress or {}).get("step"), (progress or {}).get("total")
    if not is_number(step):
        return ""
    return f"{step:,.0f}/{total:,.0f}" if is_number(total) else f"{step:,.0f}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value that the program reported is a finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (
        -_MAX_NUMBER < value < _MAX_NUMBER
    )  # an int can exceed the range of a float; comparisons with nan are False


def format_rates(progress: Mapping[str, Any] | None, brief: bool = False) -> list[str]:
    """Format rates as `9.8k images/s`, or with `brief` as `9.8k img/s`."""
    reported = progress or {}
    rates = [
        (value, key.removesuffix("_per_second"))
        for key, value in reported.items()
        if key.endswith("_per_second") and is_number(value)
    ]
    if is_number(reported.get("rate")):
        item = str(reported.get("item") or "steps")
        rates.insert(0, (reported["rate"], _ABBREVIATIONS.get(item, item) if brief else item))
    return [f"{format_short(value)} {sanitize(item)}/s" for value, item in rates]


def format_number(value: object) -> str:
    """Format as `0.4123`. Other values, such as nan, keep the program's spelling."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}"
    return DASH if value is None else sanitize(value)


def format_percent(fraction: object, digits: int = 1) -> str:
    """Format as `41.2 %`, or as a dash if the value is not a number."""
    return f"{100 * fraction:.{digits}f} %" if is_number(fraction) else DASH


def _format_mfu(progress: Mapping[str, Any] | None) -> str:
    """Format as `41.2 % MFU`, or as nothing if the program does not report it."""
    mfu = (progress or {}).get("mfu")
    return f"{format_percent(mfu)} MFU" if is_number(mfu) else ""


def status_note(job: Job) -> str:
    """Return the note of a job: its reason, MFU, preemptions and failures."""
    reason = sanitize(job.get("reason") or "")
    facts = [_format_mfu(job.get("progress"))] if job["status"] == "RUNNING" else []
    # The reason of a failed job begins with the count that ended it.
    facts += [count for count in interruptions(job) if not reason.startswith(count)]
    return " · ".join(fact for fact in [reason, *facts] if fact)


def interruptions(job: Job) -> list[str]:
    """Return the non-zero counts, such as `3 preemptions`, `1 failure` and `1 bad host`."""
    kinds = (("preemptions", "preemption"), ("failures", "failure"), ("bad_hosts", "bad host"))
    return [plural(job[key], noun) for key, noun in kinds if job.get(key)]


def interruptions_and_reruns(job: Job) -> list[str]:
    """Return the interruptions and the steps that were repeated because of them."""
    steps_again = job.get("steps_again")
    facts = interruptions(job)
    if is_number(steps_again) and (steps_again or facts):
        facts.append(f"{plural(int(steps_again), 'step')} repeated")
    return facts


# --- dry runs and confirmations


def stops_program(job: Job) -> bool:
    """Return True if the end of a job would stop a program, or its start on a slice."""
    return job["status"] not in FINAL_STATUSES and bool(job.get("chips_held"))


def describe_state(job: Job) -> str:
    """Return the state, step and last checkpoint of a job as a sentence."""
    text = f"{_name(job)} is {job['status']}"
    step = format_progress(_step_only(job))
    if step:
        text += f" at step {step}"
    checkpoint = format_progress({"step": (job.get("progress") or {}).get("checkpoint")})
    if checkpoint:
        text += f"; its last checkpoint is step {checkpoint}"
    elif (
        step
        and job["status"] not in FINAL_STATUSES
        and not (job.get("spec") or {}).get("checkpoint")
    ):
        text += "; it has no checkpoint"
    return text


def describe_effect(verb: str, job: Job, with_outputs: bool = False) -> str:
    """Return the effect of a verb on a job as a sentence."""
    effects = [] if job["status"] in FINAL_STATUSES else ["stops it"]
    if job.get("chips_held"):
        effects.append(f"releases {_chips(job)}")
    if verb == "clean":
        effects.append("removes its logs and its record")
        outputs = job.get("outputs") or {}
        if outputs.get("files"):
            kept = f"{plural(outputs['files'], 'output file')} in {sanitize(outputs['folder'])}"
            effects.append(f"deletes {kept}" if with_outputs else f"keeps {kept}")
    return f"this {_join(effects)}." if effects else "it has ended and holds no slice."


def describe_plan(verb: str, job: Job, with_outputs: bool = False) -> str:
    """Return the dry run of a verb as one line."""
    name, finished = _name(job), job["status"] in FINAL_STATUSES
    holds_slice = bool(job.get("chips_held"))
    step = format_progress(_step_only(job))
    state = f"{name} ({job['status']}{f' at step {step}' if step else ''})"
    if verb == "resume":
        if not finished:
            return f"would change nothing: {name} is {job['status']}"
        slice_text = f"on its {_chips(job)}" if holds_slice else f"on a new {job['accelerator']}"
        return f"would restart {state} {slice_text}"
    if verb == "cancel":
        if finished:
            return f"would change nothing: {name} is {job['status']}"
        if not holds_slice:
            return f"would stop {state}; it holds no slice"
        price = ""
        if job.get("cost_per_hour"):
            price = f", about {format_dollars(job['cost_per_hour'])} an hour"
        elif job.get("would_cost_per_hour"):
            rate = format_dollars(job["would_cost_per_hour"])
            price = f", would be about {rate} an hour on Google"
        return f"would stop the program of {state} and keep {_chips(job)}{price}"
    effects = [] if finished else [f"stop {state}"]
    if holds_slice:
        effects.append(f"release {_chips(job)}")
    if verb == "clean":
        effects.append(f"remove the logs and the record of {name}")
        outputs = job.get("outputs") or {}
        if outputs.get("files") and with_outputs:
            kept = plural(outputs["files"], "output file")
            effects.append(f"delete {kept} in {sanitize(outputs['folder'])}")
    return f"would {_join(effects)}" if effects else f"would change nothing: {state} holds no slice"


def _name(job: Job) -> str:
    return f"{job['id']} {sanitize(job['name'])}"


def _step_only(job: Job) -> dict[str, object]:
    return {"step": (job.get("progress") or {}).get("step")}


def _chips(job: Job) -> str:
    return f"{plural(job['chips_held'], 'chip')} in {sanitize(job['zone'] or 'the cloud')}"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
