"""The life of a job: `decide(job, observations, now)` returns its next state and the effects.

The functions here are pure: no I/O, no clock. The supervisor observes, calls `decide`, saves the
decision, and only then acts. After a crash, the saved state therefore shows what was in progress.
Each effect is idempotent, and `decide` repeats it until its result is observed.

Decisions depend on observations only. Without a fresh poll of the zone, no slice counts as lost and
no host counts as bad. Each job is in one of three states, with a file of its own: it seeks slices
(`requests`), it runs its program on them (`running`), or it stops at the user's command
(`stopping`). All three call `outcomes` when an attempt or the job is over, and `releases` for
slices that are no longer needed. There are no calls in the opposite direction.
"""

from dataclasses import replace

from drumline.jobs.core.outcomes import RETRY_LIMIT
from drumline.jobs.core.outputs import copy_outputs
from drumline.jobs.core.releases import release_unneeded
from drumline.jobs.core.requests import follow_other_requests, seek_cheaper_slices, seek_slices
from drumline.jobs.core.running import follow_program
from drumline.jobs.core.state import (
    Decision,
    DesiredState,
    Job,
    Observations,
    PlacementRole,
    Timeouts,
)
from drumline.jobs.core.stopping import (
    cancel_without_slices,
    keep_for_resume,
    keep_seconds,
    resume_job,
    stop_for_user,
)


def decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    """Return the next state of a job, its effects and events; the same job if its state stays."""
    decision = _decide(job, observations, now, timeouts)
    decision = copy_outputs(job, decision, observations, now, timeouts)
    decision = release_unneeded(decision, observations.reports)
    if decision.job.active is not None:
        decision = follow_other_requests(decision, observations, now, timeouts)
        decision = seek_cheaper_slices(decision, observations, now, timeouts)
    return decision


def _decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    placement = job.active
    if placement is None and job.wish is DesiredState.RESTART:
        return resume_job(job)
    if job.status.ended:
        return keep_for_resume(job, placement, observations, now) if placement else Decision(job)
    if placement is None and job.wish is DesiredState.RUN:
        return seek_slices(job, observations, now, timeouts)
    if placement is None:
        return cancel_without_slices(job, observations, now, timeouts)
    # A program that has succeeded while its user cancels the job has still succeeded.
    if job.wish is DesiredState.RUN or (job.attempt is not None and job.attempt.succeeded):
        return follow_program(job, placement, observations, now, timeouts)
    return stop_for_user(job, placement, observations, now, timeouts)


# --- Clocks -------------------------------------------------------------------------------------


_OLD_RESERVED_PATIENCE = 36.0
"""The patience of reserved jobs of earlier versions, in which `waiting` was twice as long."""


def adapt_times(job: Job, now: float) -> Job:
    """Adapt the times of a saved job to a new server, because the wall clock may have been set.

    Past events are limited to `now`, and deadlines to their longest delay: otherwise a backoff of
    seconds could last hours. Waits restart: otherwise they could be over at once, and a request
    would count as preempted, or a host as bad.
    """
    if job.patience == _OLD_RESERVED_PATIENCE:
        job = replace(job, patience=2 * _OLD_RESERVED_PATIENCE)
    attempt = job.attempt
    placements = tuple(
        replace(
            placement,
            asked_at=min(placement.asked_at, now),
            first_asked_at=_at_most(placement.first_asked_at, now),
            accepted_at=_restarted(placement.accepted_at, now)
            if placement.role is PlacementRole.REQUESTED
            else _at_most(placement.accepted_at, now),
            booting_at=_restarted(placement.booting_at, now),
            ready_at=_at_most(placement.ready_at, now),
            retry_at=min(placement.retry_at, now + RETRY_LIMIT),
        )
        for placement in job.placements
    )
    if attempt is not None:
        attempt = replace(
            attempt,
            started_at=min(attempt.started_at, now),
            running_at=_at_most(attempt.running_at, now),
            failed_at=_restarted(attempt.failed_at, now),
            stuck_at=_restarted(attempt.stuck_at, now),
            unconfirmed_at=_restarted(attempt.unconfirmed_at, now),
            outputs_since=_restarted(attempt.outputs_since, now),
        )
    times = (job.not_before, job.kept_until)
    in_past = all(time is None or time <= now for time in times)
    if in_past and (placements, attempt) == (job.placements, job.attempt):
        return job  # the usual case; a server may start with thousands of jobs
    return replace(
        job,
        placements=placements,
        attempt=attempt,
        not_before=min(job.not_before, now + RETRY_LIMIT),
        kept_until=_at_most(job.kept_until, now + keep_seconds(job)),
    )


def _restarted(time: float | None, now: float) -> float | None:
    """Return `now` as the start of a wait; None if there was no wait."""
    return None if time is None else now


def _at_most(time: float | None, limit: float) -> float | None:
    return None if time is None else min(time, limit)
