"""The output of `show`: pure functions from the server's answer about a job to lines."""

import re
from collections.abc import Sequence
from itertools import pairwise

import typer

from drumline.cli.rendering.text import (
    DASH,
    format_dollars,
    format_duration,
    format_size,
    format_time,
    plural,
    sanitize,
)
from drumline.cli.rendering.views import (
    COLOURS,
    FINAL_STATUSES,
    Job,
    format_number,
    format_percent,
    format_progress,
    format_rates,
    interruptions_and_reruns,
    is_number,
    status_note,
)

LABEL_WIDTH = 9
MAX_ATTEMPTS = 12
_FAILURES = ("program failed", "set-up failed")
MAX_TAIL_LINES = 10
MAX_OUTPUT_PROBLEMS = 5
# A shorter pause between two attempts is the normal duration of a new request.
MIN_PAUSE_SECONDS = 60.0
MIN_AHEAD_SECONDS = 0.05
MIN_LOSSES = 3
"""The number of lost slices from which their median lifetime says something."""
# Lines that JAX and its library Gloo print in every program, and that explain no failure.
_LIBRARY_LINES = re.compile(
    r"\[Gloo\] Rank \d+ is connected to |-{20}$|For simplicity, JAX has removed its internal frames"
)


def render_job(job: Job, now: float, colour: bool = False) -> list[str]:
    """Return everything about a job, the most important facts first."""
    sections = (
        ("cause", render_cause(job)),
        ("progress", _render_progress(job, now)),
        ("result", render_result(job)),
        ("hosts", _render_hosts(job)),
        ("attempts", _render_attempts(job, now)),
        ("lately", _render_events(job, now)),
        ("outputs", render_outputs(job, now)),
        ("cost", _render_cost(job)),
        ("slice", render_slice(job, now)),
        ("held", _render_held_back(job)),
        ("next", [next_steps(job)]),
    )
    lines = [headline(job, colour)]
    for label, content in sections:
        for index, line in enumerate(content):
            lines.append(("" if index else label).ljust(LABEL_WIDTH) + line)
    return lines


def headline(job: Job, colour: bool = False) -> str:
    """Return a line such as `000007 moe-small · FAILED after 3 failures of the program`."""
    status = str(job["status"])
    styled = typer.style(status, fg=COLOURS.get(status)) if colour else status
    parts = [f"{job['id']} {sanitize(job['name'])}", styled + outcome_suffix(job)]
    if status not in FINAL_STATUSES:
        at = format_progress(job.get("progress"))
        parts += [f"step {at}" if at else "", status_note(job).replace(_cause_suffix(job), "")]
    elif status == "SUCCEEDED":
        parts += interruptions_and_reruns(job)
    return " · ".join(part for part in parts if part)


def outcome_suffix(job: Job) -> str:
    """Return the text after FAILED or SUCCEEDED: the failures, or the duration."""
    if job["status"] == "SUCCEEDED" and job.get("ended") and job.get("created"):
        return f" in {format_duration(job['ended'] - job['created'])}"
    if job["status"] != "FAILED":
        return ""
    outcomes = [attempt.get("outcome") for attempt in job.get("attempts") or []]
    stages = {"program failed": "program", "stuck": "program", "set-up failed": "set-up"}
    last = stages.get(outcomes[-1] or "") if outcomes else "program"
    if job.get("failures") and last:
        same = all(stages.get(outcome or "", last) == last for outcome in outcomes)
        suffix = f" of the {last}" if same else f", the last of the {last}"
        return f" after {plural(job['failures'], 'failure')}{suffix}"
    reason = sanitize(job.get("reason") or "").removesuffix(_cause_suffix(job))
    return f": {reason}" if reason else ""


def render_cause(job: Job) -> list[str]:
    """Return the host that failed first, its error, and its last lines if they add to it."""
    cause = job.get("cause")
    if not cause:
        return []
    host = f"host {cause['host']}" if cause.get("host") is not None else ""
    if cause.get("kind") == "stuck":
        host = ""  # all hosts wait for each other, and none of them was first
    if host and (cause.get("hosts") or 1) > 1:
        host += f" of {cause['hosts']}, first to fail"
        if (cause.get("ahead_seconds") or 0.0) >= MIN_AHEAD_SECONDS:
            host += f", {format_duration(cause['ahead_seconds'])} before the others"
    error = [sanitize(line) for line in str(cause.get("error") or "").splitlines()]
    tail = [sanitize(line) for line in cause.get("tail") or [] if not _LIBRARY_LINES.match(line)]
    tail = tail[-MAX_TAIL_LINES:]
    if tail and error and error[-1].endswith(tail[-1].strip()):
        tail.pop()  # the error has this line already
    lines = [f"{host}:"] if host else []
    lines += error
    if tail:
        lines += ["its last lines:", *(f"  {line}" for line in tail)]
    return lines


def _cause_suffix(job: Job) -> str:
    """Return the end of a text that repeats the error under `cause`. No text ends in NUL."""
    error = sanitize((job.get("cause") or {}).get("error") or "")
    return f": {error}" if error else "\0"


def _render_hosts(job: Job) -> list[str]:
    """Return the phase of most hosts of the current attempt, and the hosts in other phases."""
    attempts = job.get("attempts") or []
    hosts = attempts[-1].get("hosts") if attempts and not attempts[-1].get("outcome") else None
    if not hosts:
        return []
    phases = [str(host["phase"]).lower() for host in hosts]
    common = max(phases, key=phases.count)
    lines = [f"{phases.count(common)} of {len(hosts)} {common}"]
    for host, phase in zip(hosts, phases, strict=True):
        if phase != common:
            detail = host.get("error") or host.get("detail")
            reason = f": {sanitize(detail)}" if detail else ""
            lines.append(f"host {host['index']} {phase}{reason}")
    return lines


def _render_progress(job: Job, now: float) -> list[str]:
    """Return the step of the job and its well-known metrics."""
    progress = job.get("progress") or {}
    step = format_progress(progress)
    facts = [f"step {step}"] if step else []
    if "loss" in progress:
        facts.append(f"loss {format_number(progress['loss'])}")
    facts += format_rates(progress)
    if "mfu" in progress:
        facts.append(f"MFU {format_percent(progress['mfu'])}")
    if is_number(progress.get("goodput")):
        facts.append(f"goodput {format_percent(progress['goodput'], digits=0)}")
    lines = [" · ".join(facts)] if facts else []
    if "checkpoint" in progress:
        checkpoint = format_progress({"step": progress["checkpoint"]})
        lines.append(f"last checkpoint: step {checkpoint}" if checkpoint else "no checkpoint yet")
        attempts = job.get("attempts") or [{}]
        saved_at = (attempts[-1].get("course") or {}).get("saved_at")
        if checkpoint and saved_at and job["status"] not in FINAL_STATUSES:
            lines[-1] += f", {format_duration(now - saved_at)} ago"
    return lines


def render_result(job: Job) -> list[str]:
    """Return the result that the program reported, if any."""
    result = (job.get("progress") or {}).get("result")
    return [sanitize(line) for line in str(result).splitlines()] if result else []


def _render_attempts(job: Job, now: float) -> list[str]:
    attempts = list(job.get("attempts") or [])
    lines = []
    skipped = range(0)
    if len(attempts) > MAX_ATTEMPTS:
        skipped = range(3, len(attempts) - (MAX_ATTEMPTS - 3))
    digits = len(str(len(attempts)))
    cause, same_errors = _cause_suffix(job), 0
    printed_errors: set[str] = set()
    zones = max((len(sanitize(attempt.get("zone") or DASH)) for attempt in attempts), default=0)
    for index, attempt in enumerate(attempts):
        if index in skipped:
            if index == skipped[0]:
                lines.append(f"… {plural(len(skipped), 'attempt')} more: show {job['id']} --json")
            continue
        begin, end = attempt.get("started"), attempt.get("ended")
        times = format_time(begin, now) if begin else DASH
        times += f" → {format_time(end, now)}" if end else " →"
        zone = sanitize(attempt.get("zone") or DASH).ljust(zones)
        outcome = sanitize(attempt.get("outcome") or "in progress")
        detail = sanitize(attempt.get("detail") or "")
        text = detail if detail.startswith(outcome) else _join_detail(outcome, detail)
        if text.endswith(cause):
            # The section `cause` has this error, so it is not repeated for every attempt.
            text = text.removesuffix(cause) + (" (same error)" if same_errors else "")
            same_errors += 1
        elif outcome in _FAILURES:
            where, _, error = text.partition(": ")
            text = f"{where} (same error)" if error in printed_errors else text
            printed_errors |= {error} - {""}
        if outcome == "stuck":
            is_last = index == len(attempts) - 1 and job["status"] in FINAL_STATUSES
            text = f"{_last_step(attempt, now)}: stuck, {'ended' if is_last else 'restarted'}"
        lines.append(f"{attempt['number']:>{digits}}  {zone}  {times:13}  {text}")
    return lines + _pauses(job, attempts)


def _last_step(attempt: Job, now: float) -> str:
    """Return a clause such as `no step since 14:02 (step 151)`."""
    steps = attempt.get("course")
    if not steps:
        return "no step since its start"
    step = format_progress({"step": steps["step"]})
    return f"no step since {format_time(steps['stepped_at'], now)} (step {step})"


def _join_detail(outcome: str, detail: str) -> str:
    """Join as `program failed on host 1`, or as `bad host: no report from host 2 for 8 s`."""
    if not detail:
        return outcome
    return f"{outcome} {detail}" if detail.startswith("on ") else f"{outcome}: {detail}"


def _pauses(job: Job, attempts: Sequence[Job]) -> list[str]:
    """Return the pauses between attempts, each with its reason from the events."""
    lines = []
    for before, after in pairwise(attempts):
        begin, end = before.get("ended"), after.get("started")
        if not begin or not end or end - begin < MIN_PAUSE_SECONDS:
            continue
        reasons = [
            sanitize(event["text"])
            for event in job.get("events") or []
            if event["kind"] == "waiting" and begin <= event["time"] <= end
        ]
        reason = reasons[-1] if reasons else "waiting"
        numbers = f"{before['number']} and {after['number']}"
        lines.append(f"between {numbers}: {reason}, {format_duration(end - begin)}")
    return lines[-3:]


def _render_events(job: Job, now: float) -> list[str]:
    if job["status"] in FINAL_STATUSES:
        return []
    return [
        f"{format_time(event['time'], now, seconds=True)}  "
        f"{event['kind']}: {sanitize(event['text'])}"
        for event in list(job.get("events") or [])[-3:]
    ]


def render_outputs(job: Job, now: float) -> list[str]:
    """Return where the outputs are, how many, from when, and what could not be copied."""
    outputs = job.get("outputs")
    if not outputs:
        return []
    if not outputs["copied_at"]:
        return [f"{sanitize(', '.join(outputs['paths']))}: not copied yet"]
    copied_at = format_time(outputs["copied_at"], now, seconds=True)
    if outputs["files"]:
        count, size = plural(outputs["files"], "file"), format_size(outputs["bytes"])
        line = f"{count}, {size}, in {sanitize(outputs['folder'])}, copied at {copied_at}"
    elif outputs["problems"]:
        line = f"no file was copied, checked at {copied_at}"
    else:
        paths = sanitize(", ".join(outputs["paths"]))
        line = f"no file of the job matches {paths}, checked at {copied_at}"
    lines = [line]
    problems = [sanitize(problem) for problem in outputs["problems"]]
    lines += problems[:MAX_OUTPUT_PROBLEMS]
    if len(problems) > MAX_OUTPUT_PROBLEMS:
        lines.append(f"… and {len(problems) - MAX_OUTPUT_PROBLEMS} more: show --json")
    return lines


def _render_cost(job: Job) -> list[str]:
    """Return the cost of real slices, and what the emulated ones would cost."""
    lines = []
    if job.get("cost") is not None:
        lines.append(_cost_text(job, "cost"))
    if job.get("would_cost") is not None:
        zones = ", ".join(job["would_cost_zones"])
        lines.append(f"would be {_cost_text(job, 'would_cost')}, on Google at prices of {zones}")
    return lines


def _cost_text(job: Job, key: str) -> str:
    """Return the cost so far, its lost part, and the current price. `key` is the JSON field."""
    text = format_dollars(job[key])
    ended = [attempt for attempt in job.get("attempts") or [] if attempt.get("ended")]
    if ended and job.get(f"{key}_lost", 0.0) is None:
        text += ", an unknown part of it lost"
    elif job.get(f"{key}_lost"):
        text += f", of it {format_dollars(job[f'{key}_lost'])} lost"
    if job.get(f"{key}_per_hour"):
        text += f" so far, {format_dollars(job[f'{key}_per_hour'])} an hour now"
    if job.get(f"{key}_unused"):
        text += f"; {format_dollars(job[f'{key}_unused'])} for slices that were granted too late"
    return text


def render_slice(job: Job, now: float) -> list[str]:
    """Return the slice of a job, with its cost."""
    tpu_slice, requests = job.get("slice"), job.get("requests") or []
    if any(tpu_slice and request["name"] == tpu_slice["name"] for request in requests):
        return [_request_line(request, now) for request in requests]
    if not tpu_slice:
        waits = job["status"] in {"QUEUED", "WAITING"}
        return ["released" if job.get("attempts") and not waits else "none yet"]
    facts = [f"{tpu_slice['name']} in {tpu_slice['zone']}", sanitize(tpu_slice.get("state") or "")]
    if tpu_slice.get("held_since"):
        facts.append(f"held for {format_duration(now - tpu_slice['held_since'])}")
    if tpu_slice.get("kept_for") is not None:
        until = format_time(now + tpu_slice["kept_for"], now)
        facts.append(f"kept until {until} for a resume")
    if tpu_slice.get("per_hour"):
        facts.append(f"about {format_dollars(tpu_slice['per_hour'])} an hour")
    elif job.get("would_cost_per_hour"):
        rate = format_dollars(job["would_cost_per_hour"])
        facts.append(f"would be about {rate} an hour on Google")
    return [", ".join(fact for fact in facts if fact)]


def _request_line(request: Job, now: float) -> str:
    """Return what became of a request so far."""
    state = {"requested": "no capacity yet", "starting": "granted, its hosts boot"}
    text = sanitize(request["refusal"]) or state.get(request["role"], request["role"])
    asked = format_duration(max(0.0, now - request["asked"]))
    line = f"{request['accelerator']} in {request['zone']}, requested {asked} ago: {text}"
    history = request.get("history") or {}
    facts = []
    if history.get("wait") is not None:
        facts.append(f"usually ready after {format_duration(history['wait'])}")
    if history.get("lifetime") is not None and history.get("lost", 0) >= MIN_LOSSES:
        facts.append(f"half are lost within {format_duration(history['lifetime'])}")
    return f"{line} ({', '.join(facts)})" if facts else line


def _render_held_back(job: Job) -> list[str]:
    """Return the slices with a bad host that are held back, with their cost."""
    lines = []
    for bad_slice in job.get("parked") or ():
        rate = bad_slice["per_hour"]
        cost = f", about {format_dollars(rate)} an hour" if rate else ""
        name = f"{bad_slice['name']} in {bad_slice['zone']}"
        lines.append(f"{name}, has a bad host, held back until another slice runs{cost}")
    return lines


def next_steps(job: Job) -> str:
    """Return the commands that the user is likely to need next."""
    job_id, status = job["id"], job["status"]
    delete = f"drumline delete {job_id}"
    if status == "FAILED":
        cause = job.get("cause") or {}
        attempts = job.get("attempts") or []
        logs = f"drumline logs {job_id}"
        if cause.get("host") is not None:
            logs += f" --host {cause['host']}"
        if attempts:
            logs += f" --attempt {attempts[-1]['number']}"
        hint = f" · {delete} releases its slice" if job.get("chips_held") else ""
        return f"fix the job, then: drumline resume {job_id}        its logs: {logs}{hint}"
    if status == "CANCELLED":
        hint = f" · {delete} releases its slice" if job.get("chips_held") else ""
        return f"drumline resume {job_id} restarts it{hint}"
    if status == "SUCCEEDED":
        hint = f" · {delete} releases its slice" if job.get("chips_held") else ""
        return f"drumline logs {job_id} · drumline clean {job_id} removes its logs{hint}"
    if status in {"QUEUED", "WAITING"} or (status == "STARTING" and not job.get("chips_held")):
        return f"drumline follow {job_id} · drumline delete {job_id} stops waiting"
    return (
        f"drumline logs {job_id} --follow · drumline cancel {job_id} stops it and keeps the slice"
    )
