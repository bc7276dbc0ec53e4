"""What `show` prints: pure functions from the server's answer about one job to lines."""

from collections.abc import Sequence
from itertools import pairwise

import typer

from drumline.cli.rendering.text import NOTHING, clock, count, dollars, duration, harmless
from drumline.cli.rendering.views import (
    COLOURS,
    ENDED,
    Job,
    figure,
    is_number,
    note,
    percent,
    progress_count,
    rates,
    setbacks,
)

LABEL = 9
MOST_ATTEMPTS = 12
MOST_TAIL = 10
# A shorter pause between two attempts is the ordinary time of a new request.
WAIT_WORTH_SAYING = 60.0


def show_lines(job: Job, now: float, colour: bool = False) -> list[str]:
    """Everything about a job, the most important first."""
    sections = (
        ("cause", cause_lines(job)),
        ("progress", _progress_lines(job, now)),
        ("result", result_lines(job)),
        ("hosts", _host_lines(job)),
        ("attempts", _attempt_lines(job, now)),
        ("lately", _event_lines(job, now)),
        ("cost", _cost_lines(job)),
        ("slice", _slice_lines(job, now)),
        ("parked", _parked_lines(job)),
        ("next", [next_steps(job)]),
    )
    lines = [headline(job, colour)]
    for label, content in sections:
        for number, line in enumerate(content):
            lines.append(("" if number else label).ljust(LABEL) + line)
    return lines


def headline(job: Job, colour: bool = False) -> str:
    """`000007 moe-small · FAILED after 3 failures of the program`."""
    status = str(job["status"])
    shown = typer.style(status, fg=COLOURS.get(status)) if colour else status
    parts = [f"{job['id']} {harmless(job['name'])}", shown + after_what(job)]
    if status not in ENDED:
        at = progress_count(job.get("progress"))
        parts += [f"step {at}" if at else "", note(job)]
    elif status == "SUCCEEDED":
        parts += setbacks(job)
    return " · ".join(part for part in parts if part)


def after_what(job: Job) -> str:
    """The text after FAILED or SUCCEEDED: the failures that used up the allowance, or the time."""
    if job["status"] == "SUCCEEDED" and job.get("ended") and job.get("created"):
        return f" in {duration(job['ended'] - job['created'])}"
    if job["status"] != "FAILED":
        return ""
    outcomes = [attempt.get("outcome") for attempt in job.get("attempts") or []]
    parts = {"program failed": "program", "stuck": "program", "set-up failed": "set-up"}
    last = parts.get(outcomes[-1] or "") if outcomes else "program"
    if job.get("failures") and last:
        of_all = all(parts.get(outcome or "", last) == last for outcome in outcomes)
        whose = f" of the {last}" if of_all else f", the last of the {last}"
        return f" after {count(job['failures'], 'failure')}{whose}"
    return f": {harmless(job['reason'])}" if job.get("reason") else ""


def cause_lines(job: Job) -> list[str]:
    """Which host failed first, its error, and its last lines where they say more than the error."""
    cause = job.get("cause")
    if not cause:
        return []
    where = f"host {cause['host']}" if cause.get("host") is not None else ""
    if cause.get("kind") == "stuck":
        where = ""  # all hosts wait for each other, and none of them was first
    if where and (cause.get("hosts") or 1) > 1:
        where += f" of {cause['hosts']}, first to fail"
        if cause.get("ahead_seconds"):
            where += f", {duration(cause['ahead_seconds'])} before the others"
    error = [harmless(line) for line in str(cause.get("error") or "").splitlines()]
    tail = [harmless(line) for line in cause.get("tail") or []][-MOST_TAIL:]
    if len(tail) == 1 and tail == error:
        tail = []
    lines = [f"{where}:"] if where else []
    lines += error
    if tail:
        lines += ["its last lines:", *(f"  {line}" for line in tail)]
    return lines


def _host_lines(job: Job) -> list[str]:
    """The progress of the hosts of the attempt under way: a count, and which are behind."""
    attempts = job.get("attempts") or []
    hosts = attempts[-1].get("hosts") if attempts and not attempts[-1].get("outcome") else None
    if not hosts:
        return []
    phases = [str(host["phase"]).lower() for host in hosts]
    most = max(phases, key=phases.count)
    lines = [f"{phases.count(most)} of {len(hosts)} {most}"]
    for host, phase in zip(hosts, phases, strict=True):
        if phase != most:
            detail = host.get("error") or host.get("detail")
            why = f": {harmless(detail)}" if detail else ""
            lines.append(f"host {host['index']} {phase}{why}")
    return lines


def _progress_lines(job: Job, now: float) -> list[str]:
    """The progress of the job: its step, and the metrics with a well-known name."""
    progress = job.get("progress") or {}
    at = progress_count(progress)
    facts = [f"step {at}"] if at else []
    if "loss" in progress:
        facts.append(f"loss {figure(progress['loss'])}")
    facts += rates(progress)
    if "mfu" in progress:
        facts.append(f"MFU {percent(progress['mfu'])}")
    if is_number(progress.get("goodput")):
        facts.append(f"goodput {percent(progress['goodput'], digits=0)}")
    lines = [" · ".join(facts)] if facts else []
    if "checkpoint" in progress:
        saved = progress_count({"step": progress["checkpoint"]})
        lines.append(f"last checkpoint: step {saved}" if saved else "no checkpoint yet")
        attempts = job.get("attempts") or [{}]
        when = (attempts[-1].get("course") or {}).get("saved_at")
        if saved and when and job["status"] not in ENDED:
            lines[-1] += f", {duration(now - when)} ago"
    return lines


def result_lines(job: Job) -> list[str]:
    """The results that the program reported, if any."""
    said = (job.get("progress") or {}).get("result")
    return [harmless(line) for line in str(said).splitlines()] if said else []


def _attempt_lines(job: Job, now: float) -> list[str]:
    attempts = list(job.get("attempts") or [])
    lines = []
    many = len(attempts) > MOST_ATTEMPTS
    skipped = range(3, len(attempts) - (MOST_ATTEMPTS - 3)) if many else range(0)
    digits = len(str(len(attempts)))
    zones = max((len(harmless(attempt.get("zone") or NOTHING)) for attempt in attempts), default=0)
    for place, attempt in enumerate(attempts):
        if place in skipped:
            if place == skipped[0]:
                lines.append(f"… {count(len(skipped), 'attempt')} more: show {job['id']} --json")
            continue
        begin, end = attempt.get("started"), attempt.get("ended")
        times = clock(begin, now) if begin else NOTHING
        times += f" → {clock(end, now)}" if end else " →"
        zone = harmless(attempt.get("zone") or NOTHING).ljust(zones)
        outcome = harmless(attempt.get("outcome") or "under way")
        detail = harmless(attempt.get("detail") or "")
        text = detail if detail.startswith(outcome) else _joined(outcome, detail)
        if outcome == "stuck":
            over = place == len(attempts) - 1 and job["status"] in ENDED
            text = f"{_no_step(attempt, now)}: stuck, {'ended' if over else 'restarted'}"
        lines.append(f"{attempt['number']:>{digits}}  {zone}  {times:13}  {text}")
    return lines + _pauses(job, attempts)


def _no_step(attempt: Job, now: float) -> str:
    """`no step since 14:02 (step 151)`."""
    course = attempt.get("course")
    if not course:
        return "no step since it started"
    at = progress_count({"step": course["step"]})
    return f"no step since {clock(course['stepped_at'], now)} (step {at})"


def _joined(outcome: str, detail: str) -> str:
    """`program failed on host 1`, `bad host: host 2 silent for 8 s`."""
    if not detail:
        return outcome
    return f"{outcome} {detail}" if detail.startswith("on ") else f"{outcome}: {detail}"


def _pauses(job: Job, attempts: Sequence[Job]) -> list[str]:
    """The waits between attempts, each with its reason from the events."""
    lines = []
    for before, after in pairwise(attempts):
        begin, end = before.get("ended"), after.get("started")
        if not begin or not end or end - begin < WAIT_WORTH_SAYING:
            continue
        reasons = [
            harmless(event["text"])
            for event in job.get("events") or []
            if event["kind"] == "waiting" and begin <= event["time"] <= end
        ]
        why = reasons[-1] if reasons else "waiting"
        numbers = f"{before['number']} and {after['number']}"
        lines.append(f"between {numbers}: {why}, {duration(end - begin)}")
    return lines[-3:]


def _event_lines(job: Job, now: float) -> list[str]:
    if job["status"] in ENDED:
        return []
    return [
        f"{clock(event['time'], now, seconds=True)}  {event['kind']}: {harmless(event['text'])}"
        for event in list(job.get("events") or [])[-3:]
    ]


def _cost_lines(job: Job) -> list[str]:
    if job.get("cost") is None:
        return []
    text = dollars(job["cost"])
    ended = [attempt for attempt in job.get("attempts") or [] if attempt.get("ended")]
    if ended and job.get("cost_lost", 0.0) is None:
        text += f", of it {NOTHING} lost"
    elif job.get("cost_lost"):
        text += f", of it {dollars(job['cost_lost'])} lost"
    if job.get("cost_per_hour"):
        text += f" so far, {dollars(job['cost_per_hour'])} an hour now"
    return [text]


def _slice_lines(job: Job, now: float) -> list[str]:
    held = job.get("slice")
    if not held:
        return ["released" if job.get("attempts") else "none yet"]
    facts = [f"{held['name']} in {held['zone']}", harmless(held.get("state") or "")]
    if held.get("held_since"):
        facts.append(f"held for {duration(now - held['held_since'])}")
    if held.get("per_hour"):
        facts.append(f"about {dollars(held['per_hour'])} an hour")
    return [", ".join(fact for fact in facts if fact)]


def _parked_lines(job: Job) -> list[str]:
    """Slices with a bad host that are kept for now, and what that costs."""
    lines = []
    for each in job.get("parked") or ():
        cost = f", about {dollars(each['per_hour'])} an hour" if each["per_hour"] else ""
        where = f"{each['name']} in {each['zone']}"
        lines.append(f"{where}, for its bad host, until another runs{cost}")
    return lines


def next_steps(job: Job) -> str:
    """The commands that the user is likely to need now."""
    number, status = job["id"], job["status"]
    release = f"drumline delete {number}"
    if status == "FAILED":
        cause = job.get("cause") or {}
        attempts = job.get("attempts") or []
        logs = f"drumline logs {number}"
        if cause.get("host") is not None:
            logs += f" --host {cause['host']}"
        if attempts:
            logs += f" --attempt {attempts[-1]['number']}"
        return f"fix the job, then: drumline resume {number}        its logs: {logs}"
    if status == "CANCELLED":
        held = f" · {release} releases its slice" if job.get("chips_held") else ""
        return f"drumline resume {number} goes on with it{held}"
    if status == "SUCCEEDED":
        held = f" · {release} releases its slice" if job.get("chips_held") else ""
        return f"drumline logs {number} · drumline clean {number} removes its logs{held}"
    if status in {"QUEUED", "WAITING"}:
        return f"it goes on asking by itself · drumline delete {number} gives up"
    return f"drumline logs {number} --follow · drumline cancel {number} ends it, the slice stays"
