"""What a user's command changes in a job: `cancel`, `delete`, `resume` and `clean`. Pure.

Each function is applied to the job's current record (`Supervisor.change`), after everything slow
is done, so none of them can overwrite what another command did meanwhile. A command that comes too
late is a `Mistake`, and nothing is changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from drumline.jobs.billing import price_per_hour
from drumline.jobs.controller.slices import Orphan
from drumline.jobs.core import lifecycle
from drumline.jobs.core.outcomes import format_duration
from drumline.jobs.core.state import (
    Allowance,
    Candidate,
    Decision,
    DesiredState,
    Event,
    Job,
    Placement,
    PlacementPhase,
    Status,
)
from drumline.jobs.store.records import Record

if TYPE_CHECKING:
    from drumline.jobs.spec import JobSpec


class Mistake(Exception):
    """The caller asked for something that cannot be done; the text is the sentence to show."""

    def __init__(self, sentence: str, code: int = 400) -> None:
        """Keep the HTTP status beside the sentence."""
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class VerbResult:
    """The text for the user, and the decision on the job, None where it stays as it is."""

    text: str
    decision: Decision | None = None


@dataclass(frozen=True)
class JobTerms:
    """The keys of a job file that `decide` depends on."""

    choices: tuple[Candidate, ...]
    allowance: Allowance
    grace: float
    keep: float
    stuck_after: float | None
    parking: int = 0

    @classmethod
    def of(cls, spec: "JobSpec", choices: tuple[Candidate, ...]) -> "JobTerms":
        """The terms of a job file, with the slices that it can run on."""
        retry = spec.retry
        counts = (retry.failures, retry.bad_hosts, retry.preemptions)
        return cls(
            choices,
            Allowance(*(None if count == "unlimited" else count for count in counts)),
            spec.stop_grace,
            spec.keep,
            None if spec.stuck_after == "never" else spec.stuck_after,
            spec.parking,
        )

    def applied(self, job: Job) -> Job:
        """The job with these terms."""
        return replace(
            job,
            choices=self.choices,
            next_choice=job.next_choice if self.choices == job.choices else 0,
            allowance=self.allowance,
            grace=self.grace,
            keep=self.keep,
            stuck_after=self.stuck_after,
            parking=self.parking,
        )


def cancel(record: Record) -> VerbResult:
    """End the program and keep the slice, unless a delete was asked for before."""
    job = record.job
    if job.status.ended:
        return VerbResult(f"{job.id} is {job.status} already")
    if job.wish is DesiredState.DELETE:
        return VerbResult(f"{job.id} is being deleted already; its slice is not kept")
    decision = Decision(
        replace(job, wish=DesiredState.CANCEL), events=(Event("note", "cancel asked for"),)
    )
    if job.placement is None or job.placement.ready_at is None:
        return VerbResult(f"{job.id} is cancelled; it held no slice", decision)
    chips = job.placement.chips
    rate = price_per_hour(job.placement.accelerator, job.placement.zone, record.spec.capacity)
    cost = f", which costs about ${rate:,.2f} an hour" if rate else ""
    of_it = f"its slice ({chips} chips in {job.placement.zone})"
    becomes = f"{of_it} is released"
    if job.keep > 0:
        becomes = (
            f"{of_it} is kept {format_duration(job.keep)} for a resume{cost};"
            f" drumline delete {job.id} releases it now"
        )
    return VerbResult(f"{job.id} is being stopped; {becomes}", decision)


def delete(record: Record) -> VerbResult:
    """End the program and release the slice."""
    job = record.job
    decision = None
    if job.wish is not DesiredState.DELETE:
        event = Event("note", "delete asked for")
        decision = Decision(replace(job, wish=DesiredState.DELETE), events=(event,))
    if job.placement is None:
        return VerbResult(f"{job.id} holds no slice", decision)
    chips = job.placement.chips
    return VerbResult(
        f"{job.id} ends; {chips} chips in {job.placement.zone} are being released", decision
    )


def resumable(job: Job) -> str | None:
    """None where a job can be resumed, else a sentence that says that it goes on anyway."""
    if job.status is Status.SUCCEEDED:
        raise Mistake(f"{job.id} has succeeded; create it again to run it again", 409)
    if job.status.ended or job.wish is DesiredState.CANCEL:
        return None
    if job.wish is DesiredState.DELETE:
        raise Mistake(
            f"{job.id} is being deleted; once drumline wait {job.id} returns, it can be resumed",
            409,
        )
    if job.wish is DesiredState.RESTART:
        return f"{job.id} is resumed already; it goes on once its program has stopped"
    return f"{job.id} is {job.status} already"


def resume(
    record: Record, asked: Job, settings: JobTerms, changed: Sequence[str] = ()
) -> VerbResult:
    """Run a job again with these terms; `asked` is the job as it was when the user asked for it.

    If its program is being stopped for a `cancel`, it goes on when that is done, on its slice.
    `changed` are the lines of the job file that are different.
    """
    job = record.job
    if job.wish is DesiredState.DELETE and asked.wish is not DesiredState.DELETE:
        raise Mistake(f"{job.id} was deleted meanwhile; it is not resumed", 409)
    goes_on = resumable(job)
    if goes_on is not None:
        raise Mistake(f"{job.id} was resumed meanwhile: {goes_on}", 409)
    job = settings.applied(job)
    keys = ", ".join(line.partition(":")[0] for line in changed)
    notes = (Event("note", f"changed in the job file: {keys}"),) if keys else ()
    stopping = not job.status.ended and job.placement is not None
    if stopping and job.placement and job.placement.phase is PlacementPhase.READY:
        where = _where(job)
        event = Event("note", "resume asked for; it goes on once its program has stopped")
        later = Decision(replace(job, wish=DesiredState.RESTART), events=(*notes, event))
        return VerbResult(
            f"{job.id} goes on {where}, with the code as it is now, once its program has stopped",
            later,
        )
    decision = lifecycle.resume_job(job)
    noted = replace(decision, events=(*notes, *decision.events))
    return VerbResult(f"{job.id} goes on {_where(job)}, with the code as it is now", noted)


def _where(job: Job) -> str:
    if job.placement is None:
        return "on a new slice"
    if not lifecycle.placement_fits(job):
        return f"on a new slice (that in {job.placement.zone} is not what the job file asks for)"
    kept = "kept" if job.placement.phase is PlacementPhase.READY else "asked for"
    return f"on the slice {kept} in {job.placement.zone}"


def adopted(settings: JobTerms, stray: Orphan, owner: str, now: float) -> Job:
    """A job that holds a slice of a lost database, as a cancelled job does."""
    held = Placement(
        stray.name, stray.zone, stray.accelerator, stray.hosts,
        asked_at=now, phase=PlacementPhase.READY, ready_at=now,
    )  # fmt: skip
    begun = settings.applied(Job(id="", owner=owner, choices=settings.choices, created_at=now))
    reason = f"slice {stray.accelerator} in {stray.zone} adopted, kept for a resume"
    return replace(
        begun,
        wish=DesiredState.CANCEL,
        status=Status.CANCELLED,
        reason=reason,
        placement=held,
        ended_at=now,
    )


def removable(job: Job) -> bool:
    """Whether a job that `clean` deletes has ended and holds nothing."""
    if job.wish is not DesiredState.DELETE:
        raise Mistake(f"{job.id} was resumed meanwhile; nothing was removed", 409)
    return job.status.ended and job.placement is None
