"""Decide how `cancel`, `delete`, `resume` and `clean` change a job. Pure functions.

`Supervisor.change` applies each function to the job's current record after all slow work is done,
so that no command overwrites the changes of a different command. A command that comes too late
raises RequestError and has no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from drumline.errors import UserError
from drumline.jobs.billing import Prices, price_per_hour
from drumline.jobs.controller.slices import Orphan
from drumline.jobs.core import stopping
from drumline.jobs.core.outcomes import format_duration
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import (
    Allowance,
    Candidate,
    Decision,
    DesiredState,
    Event,
    Job,
    Placement,
    PlacementRole,
    Status,
)
from drumline.jobs.store.records import Record, SliceRow

if TYPE_CHECKING:
    from drumline.jobs.spec import JobSpec

KEEP_CANCELLED_SECONDS, KEEP_FAILED_SECONDS = 3600.0, 300.0
"""The default of `keep`. A user who cancels chooses when; a job may fail while nobody looks."""
RESERVED_PATIENCE = 72.0
"""Factor on the wait for reserved capacity in a zone: six hours instead of five minutes."""


class RequestError(UserError):
    """A request of a caller that cannot be fulfilled."""

    def __init__(self, message: str, http_status: int = 400) -> None:
        """The server sends `message` to the caller with this HTTP status."""
        super().__init__(message)
        self.http_status = http_status


@dataclass(frozen=True)
class VerbResult:
    """The message for the user, and the decision on the job, or None if the job stays as it is."""

    text: str
    decision: Decision | None = None


def apply_job_file(job: Job, spec: "JobSpec", choices: tuple[Candidate, ...]) -> Job:
    """Return the job with the keys of its job file that `decide` depends on.

    `choices` are the slices that it can run on.
    """
    retry = spec.retry
    counts = (retry.failures, retry.bad_hosts, retry.preemptions)
    return replace(
        job,
        choices=choices,
        next_choice=job.next_choice if choices == job.choices else 0,
        allowance=Allowance(*(None if count == "unlimited" else count for count in counts)),
        grace=spec.stop_grace,
        keep=KEEP_CANCELLED_SECONDS if spec.keep is None else spec.keep,
        keep_failed=KEEP_FAILED_SECONDS if spec.keep is None else spec.keep,
        stuck_after=None if spec.stuck_after == "never" else spec.stuck_after,
        parking=spec.parking,
        outputs=bool(spec.outputs),
        ask=spec.ask,
        patience=RESERVED_PATIENCE if spec.capacity == "reserved" else 1.0,
        rates=tuple(price_per_hour(*choice, spec.capacity) for choice in choices),
        stays=spec.migrate != "cheaper",
    )


def cancel(record: Record, prices: Prices, releasing: Sequence[SliceRow] = ()) -> VerbResult:
    """Stop the program and keep the slice, unless the job is being deleted already.

    `releasing` are the earlier slices of the job that still exist.
    """
    job = record.job
    if job.status.ended:
        return VerbResult(f"{job.id} is already {job.status}")
    if job.attempt is not None and job.attempt.succeeded:
        return VerbResult(f"{job.id} has succeeded; it ends when its outputs are copied")
    if job.wish is DesiredState.DELETE:
        return VerbResult(f"{job.id} is already being deleted; its slice is not kept")
    decision = Decision(
        replace(job, wish=DesiredState.CANCEL), events=(Event(EventType.NOTE, "cancel requested"),)
    )
    if job.active is None:
        rest = _withdrawn(job) or no_slice(releasing)
        return VerbResult(f"{job.id} is cancelled; {rest}", decision)
    chips = job.active.chips
    rate = prices.text(job.active.accelerator, job.active.zone, record.spec.capacity)
    cost = f", {rate}" if rate else ""
    tpu_slice = f"its slice ({chips} chips in {job.active.zone})"
    outcome = f"{tpu_slice} is released"
    if job.keep > 0:
        outcome = (
            f"{tpu_slice} is kept for {format_duration(job.keep)} for a resume{cost};"
            f" drumline delete {job.id} releases it now"
        )
    return VerbResult(f"{job.id} is being stopped; {outcome}", decision)


def delete(record: Record, releasing: Sequence[SliceRow] = ()) -> VerbResult:
    """Stop the program and release the slice.

    `releasing` are the earlier slices of the job that still exist.
    """
    job = record.job
    new = job.wish is not DesiredState.DELETE
    events = (Event(EventType.NOTE, "delete requested"),) if new else ()
    decision = Decision(
        replace(job, wish=DesiredState.DELETE, deletes=job.deletes + 1), events=events
    )
    placement = job.active
    if placement is None and not job.requests:
        status = job.status if job.status.ended else "cancelled"
        return VerbResult(f"{job.id} is {status}; {no_slice(releasing)}", decision)
    if placement is None:
        return VerbResult(f"{job.id} is cancelled; {_withdrawn(job)}", decision)
    stopped = "" if job.status.ended else f"{job.id} is being stopped; "
    chips = f"{placement.chips} chips in {placement.zone}"
    owner = f" of {job.id}" if job.status.ended else ""
    return VerbResult(f"{stopped}{chips}{owner} are being released", decision)


def _withdrawn(job: Job) -> str:
    """Describe the requests of a job that are withdrawn; empty if there are none."""
    requests = job.requests
    if not requests:
        return ""
    zones = ", ".join(request.zone for request in requests)
    subject, verb = ("request", "is") if len(requests) == 1 else ("requests", "are")
    return f"its {subject} for {requests[0].accelerator} in {zones} {verb} withdrawn"


def no_slice(releasing: Sequence[SliceRow]) -> str:
    """Describe a job without a placement: its previous slices may still be in the cloud."""
    parts = [
        f"its request {row.name} in {row.zone} is being withdrawn"
        if row.ready is None
        else f"its slice {row.name} in {row.zone} is being deleted"
        for row in releasing
    ]
    return ", and ".join(parts) or "it holds no slice"


def reason_not_to_resume(job: Job) -> str | None:
    """Return None if a job can be resumed, or a message if it runs anyway."""
    if job.status is Status.SUCCEEDED:
        raise RequestError(f"{job.id} has succeeded; create a new job to run it again", 409)
    if job.status.ended or job.wish is DesiredState.CANCEL:
        return None
    if job.wish is DesiredState.DELETE:
        raise RequestError(
            f"{job.id} is being deleted; resume it after drumline wait {job.id} returns",
            409,
        )
    if job.wish is DesiredState.RESTART:
        return f"{job.id} is already resumed; it restarts after its program has stopped"
    return f"{job.id} is already {job.status}"


def resume(
    record: Record,
    requested: Job,
    spec: "JobSpec",
    choices: tuple[Candidate, ...],
    changes: Sequence[str] = (),
) -> VerbResult:
    """Rerun a job by its current job file. `requested` is the job as of the request.

    If a `cancel` is still stopping the program, the job restarts afterwards on the same slice.
    `changes` are the lines of the job file that changed.
    """
    job = record.job
    if job.deletes != requested.deletes:
        raise RequestError(f"{job.id} was deleted in the meantime; it is not resumed", 409)
    reason = reason_not_to_resume(job)
    if reason is not None:
        raise RequestError(f"{job.id} was resumed in the meantime: {reason}", 409)
    job = apply_job_file(job, spec, choices)
    keys = ", ".join(line.partition(":")[0] for line in changes)
    notes = (Event(EventType.NOTE, f"changed in the job file: {keys}"),) if keys else ()
    if not job.status.ended and job.active is not None:
        where = _slice_of(job)
        event = Event(EventType.NOTE, "resume requested; it restarts after its program has stopped")
        later = Decision(replace(job, wish=DesiredState.RESTART), events=(*notes, event))
        return VerbResult(
            f"{job.id} restarts {where}, with the current code, after its program has stopped",
            later,
        )
    decision = stopping.resume_job(job)
    decision = replace(decision, events=(*notes, *decision.events))
    return VerbResult(f"{job.id} restarts {_slice_of(job)}, with the current code", decision)


def _slice_of(job: Job) -> str:
    if job.active is not None and not stopping.fits(job, job.active):
        return f"on a new slice (the one in {job.active.zone} does not fit the job file)"
    return stopping.describe_slices(job)


def adopting_job(spec: "JobSpec", orphan: Orphan, owner: str, now: float) -> Job:
    """Return a job that keeps a slice of a lost database, like a cancelled job."""
    placement = Placement(
        orphan.name, orphan.zone, orphan.accelerator, orphan.hosts,
        asked_at=now, role=PlacementRole.ACTIVE, ready_at=now, accepted_at=now,
    )  # fmt: skip
    choices = (placement.candidate,)
    job = apply_job_file(Job("", owner, choices, created_at=now), spec, choices)
    reason = f"slice {orphan.accelerator} in {orphan.zone} adopted, kept for a resume"
    return replace(
        job,
        wish=DesiredState.CANCEL,
        status=Status.CANCELLED,
        reason=reason,
        placements=(placement,),
        ended_at=now,
    )


def removable(job: Job) -> bool:
    """Return True if a job that `clean` deletes has finished and holds no slice."""
    if job.wish is not DesiredState.DELETE:
        raise RequestError(f"{job.id} was resumed in the meantime; nothing was removed", 409)
    return job.status.ended and not job.placements
