"""What the server shows of a job: plain dictionaries for the command line and for programs."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from drumline import __version__
from drumline.chips import slice_of
from drumline.jobs.billing import cost_of_lost_steps, cost_of_slices, price_per_hour
from drumline.jobs.core.outcomes import format_duration
from drumline.jobs.core.state import Candidate, Job
from drumline.jobs.core.steps import count_repeated_steps
from drumline.jobs.store.records import UNREADABLE, Record, UnreadableJob
from drumline.jobs.store.specs import StoredSpec

if TYPE_CHECKING:
    from drumline.jobs.controller.supervisor import Supervisor
    from drumline.jobs.spec import JobSpec


def summary(supervisor: "Supervisor", record: Record) -> dict[str, Any]:
    """One line of `drumline list`."""
    job = record.job
    held = job.placement if job.placement and job.placement.ready_at is not None else None
    listed = supervisor.polls.listed(held) if held else None
    rate = price_per_hour(held.accelerator, held.zone, record.spec.capacity) if held else None
    return {
        "id": job.id,
        "user": record.user,
        "name": record.name,
        "accelerator": job.placement.accelerator if job.placement else job.choices[0].accelerator,
        "zone": job.placement.zone if job.placement else None,
        "host0_ip": listed.endpoints[0].ssh_ip if listed and listed.endpoints else None,
        "status": job.status.value,
        "reason": _reason(supervisor, job, record.spec),
        "progress": supervisor.heartbeats.progress(job.id),
        "created": job.created_at,
        "ended": job.ended_at,
        "attempts_made": job.attempts,
        "preemptions": job.preemptions,
        "failures": job.failures,
        "bad_hosts": job.bad_hosts,
        "parked": [
            {
                "name": each.name,
                "zone": each.zone,
                "accelerator": each.accelerator,
                "per_hour": price_per_hour(each.accelerator, each.zone, record.spec.capacity),
            }
            for each in job.parked
        ],
        "chips_held": held.chips if held else 0,
        "cost_per_hour": rate,
    }


def unreadable(aside: UnreadableJob) -> dict[str, Any]:
    """The line of a job whose row cannot be read."""
    known = {"id": aside.id, "user": aside.user, "name": aside.name, "status": UNREADABLE}
    nothing = dict.fromkeys(
        ("accelerator", "zone", "host0_ip", "progress", "created", "ended", "cost_per_hour")
    )
    counts = dict.fromkeys(
        ("attempts_made", "preemptions", "failures", "bad_hosts", "chips_held"), 0
    )
    why = {"reason": f"its row cannot be read: {aside.reason}", "parked": []}
    return known | why | nothing | counts


def _reason(supervisor: "Supervisor", job: Job, spec: StoredSpec) -> str:
    """Why a job waits. What blocks every job comes first: the disk, the cloud, our own errors."""
    trouble = supervisor.tasks.disk_error
    if job.placement and not trouble:
        trouble = supervisor.polls.errors.get(job.placement.zone, "")
    trouble = trouble or supervisor.tasks.error_of(job.id)
    unreleased = supervisor.releases.error_of(job.id)
    if job.status.ended and unreleased:
        return f"{job.reason}; {unreleased}" if job.reason else unreleased
    if trouble and not job.status.ended:
        seen = job.reason not in {"", trouble}
        return f"{trouble}; last seen: {job.reason}" if seen else trouble
    left = supervisor.kept_for(job)
    if left is not None and job.placement is not None:
        rate = price_per_hour(job.placement.accelerator, job.placement.zone, spec.capacity)
        cost = f", about ${rate:,.2f} an hour" if rate else ""
        return f"{job.reason}, {format_duration(left)} left{cost}"
    return job.reason or supervisor.heartbeats.warnings.get(job.id, "")


def history(supervisor: "Supervisor", record: Record) -> dict[str, Any]:
    """Everything `drumline plot` draws."""
    job_id = record.job.id
    points = supervisor.heartbeats.history(job_id)
    keys = ("number", "started", "running", "ended", "outcome", "course")
    return {
        "job": summary(supervisor, record),
        "attempts": [
            {key: attempt[key] for key in keys} for attempt in supervisor.store.attempts(job_id)
        ],
        "points": [asdict(point) for point in points],
        "steps_again": count_repeated_steps(
            supervisor.store.metrics.steps_by_attempt(job_id).values()
        ),
    }


def full(supervisor: "Supervisor", record: Record) -> dict[str, Any]:
    """Everything that `drumline show` prints."""
    job, store = record.job, supervisor.store
    attempts = store.attempts(job.id)
    steps = store.metrics.steps_by_attempt(job.id)
    if job.attempt is not None and attempts:
        live = supervisor.heartbeats.steps(job.id, job.attempt.number)
        if live is not None:
            steps[job.attempt.number] = live
            attempts[-1]["course"] = asdict(live)
        listed = supervisor.polls.listed(job.placement) if job.placement else None
        ends = listed.endpoints if listed else ()
        attempts[-1]["hosts"] = [
            {
                "index": r.index,
                "ip": ends[r.index].ssh_ip if r.index < len(ends) else None,
                "phase": r.phase.value,
                "detail": r.detail,
                "exit_code": r.exit_code,
                "error": r.error,
                "tail": list(r.tail),
            }
            for r in supervisor.sessions.reports(job)
        ]
    held, slices = job.placement, store.slices(job.id)
    return summary(supervisor, record) | {
        "spec": record.spec.file,
        "code": record.spec.document.get("archive"),
        "origin": record.spec.document.get("origin"),
        "checkpoint": record.spec.checkpoints_of(job.id),
        "cloud": supervisor.config.cloud,
        "cause": asdict(job.cause) if job.cause else None,
        "attempts": attempts,
        "events": store.events(job.id),
        "slice": {
            "name": held.name,
            "zone": held.zone,
            "accelerator": held.accelerator,
            "state": held.phase.value,
            "held_since": held.ready_at,
            "kept_for": supervisor.kept_for(job),
            "per_hour": price_per_hour(held.accelerator, held.zone, record.spec.capacity),
        }
        if held
        else None,
        "steps_again": count_repeated_steps(steps.values()),
        "cost": cost_of_slices(slices, record.spec, time.time()),
        "cost_lost": cost_of_lost_steps(attempts, steps, slices, record.spec),
    }


def plan_lines(
    spec: "JobSpec", choices: tuple[Candidate, ...], archive: Mapping[str, Any] | None
) -> list[str]:
    """What `create --dry-run` prints."""
    first = choices[0]
    wanted = slice_of(first.accelerator)
    rate = price_per_hour(first.accelerator, first.zone, spec.capacity)
    money = f", about ${rate:,.0f} an hour" if rate else ""
    zones = list(dict.fromkeys(c.zone for c in choices if c.accelerator == first.accelerator))
    others = list(dict.fromkeys(c.accelerator for c in choices[1:]))
    others = [name for name in others if name != first.accelerator]
    hosts = f"{wanted.hosts} host" + ("" if wanted.hosts == 1 else "s")
    lines = [
        f"would ask for {first.accelerator} ({spec.capacity}, {wanted.chips} chips, {hosts}{money})"
        f" in {', then '.join(zones)}" + (f"; then for {', '.join(others)}" if others else "")
    ]
    steps = []
    if archive:
        files = "1 file" if archive["files"] == 1 else f"{archive['files']} files"
        steps.append(f"send {files} ({archive['bytes'] / 1e6:.1f} MB)")
        if archive.get("drumline", "none") != "none":
            steps.append(f"Drumline {__version__} with them")
    if spec.python.kind != "system":
        steps.append(f"set up {spec.python.kind}")
    steps += [f"mount {url} at {path}" for path, url in spec.mounts.items()]
    if spec.setup:
        steps.append("run the set-up")
    if steps:
        lines.append("would " + ", ".join(steps))
    run = spec.run.strip().splitlines()
    lines.append(f"would run: {run[0]}" + (f" … ({len(run)} lines)" if len(run) > 1 else ""))
    return lines
