"""Views of a job as JSON, for the command line and for programs."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from drumline import __version__
from drumline.chips import slice_of
from drumline.hosts.packing.selection import format_size
from drumline.jobs.billing import (
    Prices,
    cost_of_lost_steps,
    cost_of_slices,
    unused_slices,
)
from drumline.jobs.controller.outputs import problems
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import Candidate, Job, Placement, Status
from drumline.jobs.core.steps import Steps, count_repeated_steps
from drumline.jobs.slice_settings import SliceSettings
from drumline.jobs.store.records import UNREADABLE, Record, SliceRow, UnreadableJob
from drumline.jobs.store.specs import StoredSpec

if TYPE_CHECKING:
    from drumline.jobs.controller.supervisor import Supervisor
    from drumline.jobs.spec import JobSpec

MIN_SENDING_BYTES = 10**7
"""The size of code from which the progress of sending is shown."""


def summary(supervisor: "Supervisor", record: Record) -> dict[str, Any]:
    """Return the summary of a job: one line of `drumline list`."""
    job, prices = record.job, supervisor.prices
    tier = record.spec.capacity
    ready, leading = job.active, job.leading
    listed = supervisor.polls.listed(ready) if ready else None
    # A slice that is ready costs money, whether or not the program runs there.
    held = [p for p in job.placements if p.ready_at is not None and p not in job.held_back]
    terms = [(placement.accelerator, placement.zone, tier) for placement in held]
    return {
        "id": job.id,
        "user": record.user,
        "name": record.name,
        "accelerator": leading.accelerator if leading else job.choices[0].accelerator,
        "zone": leading.zone if leading else None,
        "requests": [_request(supervisor, request) for request in job.requests],
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
                "name": placement.name,
                "zone": placement.zone,
                "accelerator": placement.accelerator,
                "per_hour": prices.per_hour(placement.accelerator, placement.zone, tier),
            }
            for placement in job.held_back
        ],
        "chips_held": sum(placement.chips for placement in held),
        "sending": _sending(supervisor, job),
        "cost_per_hour": _total(prices.per_hour(*each) for each in terms),
        "would_cost_per_hour": _total(prices.would_per_hour(*each) for each in terms),
    }


def _total(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the prices that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _request(supervisor: "Supervisor", request: Placement) -> dict[str, Any]:
    """Return a request for slices that the job has not got yet, and what is known of its zone."""
    return {
        "name": request.name,
        "zone": request.zone,
        "accelerator": request.accelerator,
        "role": request.role.value,
        "asked": request.waiting_since,
        "refusal": request.refusal,
        "history": asdict(supervisor.zone_summary(request.candidate)),
    }


def unreadable(aside: UnreadableJob) -> dict[str, Any]:
    """Return the summary of a job whose row cannot be read."""
    identity = {"id": aside.id, "user": aside.user, "name": aside.name, "status": UNREADABLE}
    unknown = dict.fromkeys(
        ("accelerator", "zone", "host0_ip", "progress", "created", "ended", "cost_per_hour")
    ) | {"would_cost_per_hour": None, "sending": None}
    counts = dict.fromkeys(
        ("attempts_made", "preemptions", "failures", "bad_hosts", "chips_held"), 0
    )
    reason = {"reason": f"its row cannot be read: {aside.reason}", "parked": [], "requests": []}
    return identity | reason | unknown | counts


def _reason(supervisor: "Supervisor", job: Job, spec: StoredSpec) -> str:
    """Return why a job waits. Errors come first: of the disk, of the cloud, of Drumline."""
    error = supervisor.tasks.disk_error
    if job.leading and not error:
        error = supervisor.polls.errors.get(job.leading.zone, "")
    error = error or supervisor.tasks.error_of(job.id)
    release_error = supervisor.releases.error_of(job.id)
    if job.status.ended and release_error:
        return f"{job.reason}; {release_error}" if job.reason else release_error
    if error and not job.status.ended:
        differs = job.reason not in {"", error}
        return f"{error}; last state: {job.reason}" if differs else error
    remaining = supervisor.kept_for(job)
    if remaining is not None and job.active is not None:
        rate = supervisor.prices.text(job.active.accelerator, job.active.zone, spec.capacity)
        cost = f", {rate}" if rate else ""
        until = f"until {_clock_time(time.time() + remaining)}"
        if job.status is Status.FAILED:
            tpu_slice = f"slice {job.active.accelerator} in {job.active.zone}"
            return f"{job.reason}; {tpu_slice} kept {until} for a resume{cost}"
        return f"{job.reason} {until}{cost}"
    if sending := _sending(supervisor, job):
        sent, total = (sending[key] / 1e6 for key in ("bytes", "total"))
        hosts = "1 host" if sending["hosts"] == 1 else f"{sending['hosts']} hosts"
        return f"sending files to {hosts}: {sent:,.0f} of {total:,.0f} MB"
    return job.reason or supervisor.heartbeats.warnings.get(job.id, "")


def _sending(supervisor: "Supervisor", job: Job) -> dict[str, int] | None:
    """Return the progress of sending the code to the hosts; None if there is little to send."""
    if job.status.ended:
        return None
    hosts = [report for report in supervisor.sessions.reports(job) if report.bytes_to_send]
    total = sum(report.bytes_to_send for report in hosts)
    if total < MIN_SENDING_BYTES:
        return None
    sent = sum(report.sent_bytes for report in hosts)
    return {"hosts": len(hosts), "bytes": sent, "total": total}


def _clock_time(moment: float) -> str:
    """Format as `14:12`, or as `20 Nov 14:12` on another day."""
    local, today = time.localtime(moment), time.localtime()
    same_day = local[:3] == today[:3]
    return time.strftime("%H:%M" if same_day else "%d %b %H:%M", local)


def history(supervisor: "Supervisor", record: Record) -> dict[str, Any]:
    """Return the metrics of a job over its steps, for `drumline plot`."""
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
    """Return everything that `drumline show` prints."""
    job, store = record.job, supervisor.store
    attempts = store.attempts(job.id)
    steps = store.metrics.steps_by_attempt(job.id)
    if job.attempt is not None and attempts:
        live = supervisor.heartbeats.steps(job.id, job.attempt.number)
        if live is not None:
            steps[job.attempt.number] = live
            attempts[-1]["course"] = asdict(live)
        listed = supervisor.polls.listed(job.active) if job.active else None
        endpoints = listed.endpoints if listed else ()
        attempts[-1]["hosts"] = [
            {
                "index": host.index,
                "ip": endpoints[host.index].ssh_ip if host.index < len(endpoints) else None,
                "phase": host.phase.value,
                "detail": host.detail,
                "exit_code": host.exit_code,
                "error": host.error,
                "tail": list(host.tail),
            }
            for host in supervisor.sessions.reports(job)
        ]
    prices = supervisor.prices
    placement, slices = job.leading, store.slices(job.id)
    return summary(supervisor, record) | {
        "spec": record.spec.file,
        "code": record.spec.document.get("archive"),
        "origin": record.spec.document.get("origin"),
        "checkpoint": record.spec.checkpoints_of(job.id),
        "cloud": supervisor.config.cloud,
        # A move has no host to blame.
        "cause": asdict(job.cause) if job.cause and job.cause.kind is not EndReason.MOVED else None,
        "attempts": attempts,
        "events": store.events(job.id),
        "outputs": _outputs(supervisor, record),
        "slice": {
            "name": placement.name,
            "zone": placement.zone,
            "accelerator": placement.accelerator,
            "state": placement.role.value,
            "held_since": placement.ready_at,
            "kept_for": supervisor.kept_for(job),
            "per_hour": prices.per_hour(
                placement.accelerator, placement.zone, record.spec.capacity
            ),
        }
        if placement
        else None,
        "steps_again": count_repeated_steps(steps.values()),
        "cost": cost_of_slices(slices, record.spec, time.time(), prices.per_hour),
        "cost_lost": cost_of_lost_steps(attempts, steps, slices, record.spec, prices.per_hour),
        "cost_unused": cost_of_slices(
            unused_slices(slices), record.spec, time.time(), prices.per_hour
        ),
        **_would_cost(attempts, steps, slices, record.spec, prices),
    }


def _outputs(supervisor: "Supervisor", record: Record) -> dict[str, Any] | None:
    """Return the outputs of a job on this machine; None if it names none and has none."""
    job_id = record.job.id
    copied = supervisor.outputs.record(job_id)
    if copied is None and not record.spec.outputs:
        return None
    return {
        "paths": list(record.spec.outputs),
        "folder": str(supervisor.folders.outputs(job_id)),
        "files": copied.files if copied else 0,
        "bytes": copied.bytes if copied else 0,
        "copied_at": copied.copied_at if copied else None,
        "attempt": copied.attempt if copied else None,
        "hosts": [
            {"index": index, **host.model_dump(mode="json")}
            for index, host in sorted(copied.hosts.items())
        ]
        if copied
        else [],
        "problems": problems(copied) if copied else [],
    }


def _would_cost(
    attempts: Sequence[Mapping[str, Any]],
    steps: Mapping[int, Steps],
    slices: Sequence[SliceRow],
    spec: StoredSpec,
    prices: Prices,
) -> dict[str, Any]:
    """Return what the emulated slices of a job would have cost on Google, and in which zones."""
    rate_of = prices.would_per_hour
    total = cost_of_slices(slices, spec, time.time(), rate_of)
    if total is None:
        unknown = dict.fromkeys(("would_cost", "would_cost_lost", "would_cost_unused"))
        return unknown | {"would_cost_zones": []}
    paid = [row for row in slices if row.ready is not None]
    zones = [prices.reference_zone(row.accelerator, row.zone, spec.capacity) for row in paid]
    return {
        "would_cost": total,
        "would_cost_lost": cost_of_lost_steps(attempts, steps, slices, spec, rate_of),
        "would_cost_unused": cost_of_slices(unused_slices(slices), spec, time.time(), rate_of),
        "would_cost_zones": [*dict.fromkeys(zone for zone in zones if zone)],
    }


def _zones_in_order(zones: Sequence[str], ask: int) -> str:
    """Format zones as `a, b and c at the same time, then d`, or as `a, then b`."""
    first = zones[:ask]
    text = first[0]
    if len(first) > 1:
        text = f"{', '.join(first[:-1])} and {first[-1]} at the same time"
    return ", then ".join([text, *zones[ask:]])


def render_plan(
    spec: "JobSpec",
    choices: tuple[Candidate, ...],
    archive: Mapping[str, Any] | None,
    settings: SliceSettings,
    prices: Prices,
) -> list[str]:
    """Return the lines of `create --dry-run`. `settings` include those of config.yaml."""
    first = choices[0]
    tpu_slice = slice_of(first.accelerator)
    rate = prices.text(first.accelerator, first.zone, spec.capacity)
    cost_per_hour = f", {rate}" if rate else ""
    zones = list(dict.fromkeys(c.zone for c in choices if c.accelerator == first.accelerator))
    others = list(dict.fromkeys(c.accelerator for c in choices[1:]))
    others = [name for name in others if name != first.accelerator]
    hosts = f"{tpu_slice.hosts} host" + ("" if tpu_slice.hosts == 1 else "s")
    moves = spec.migrate == "cheaper"
    lines = [
        f"would request {first.accelerator} ({spec.capacity}, {tpu_slice.chips} chips, {hosts}"
        f"{cost_per_hour})"
        f" in {_zones_in_order(zones, spec.ask)}"
        + (f"; then {', '.join(others)}" if others else "")
        + ("; and would move to a slice that costs a tenth less" if moves else "")
    ]
    lines += [f"  {line}" for line in settings.lines()]
    steps = []
    if archive:
        files = "1 file" if archive["files"] == 1 else f"{archive['files']} files"
        steps.append(f"send {files} ({format_size(archive['bytes'])})")
        if archive.get("drumline", "none") != "none":
            steps.append(f"Drumline {__version__} with them")
    if spec.python.kind != "system":
        steps.append(f"set up {spec.python.kind}")
    steps += [f"mount {url} at {path}" for path, url in spec.mounts.items()]
    if spec.setup:
        steps.append("run setup")
    if steps:
        lines.append("would " + ", ".join(steps))
    commands = spec.run.strip().splitlines()
    more = f" … ({len(commands)} lines)" if len(commands) > 1 else ""
    lines.append(f"would run: {commands[0]}{more}")
    if spec.outputs:
        lines.append(f"would copy {', '.join(spec.outputs)} to this machine")
    return lines
