"""A job that its user cancels, deletes or resumes, and its slices after its end. Pure."""

from dataclasses import replace

from drumline.jobs.core.outcomes import (
    after_preemption,
    cancelled_attempt,
    current_attempt,
    finish_job,
    format_duration,
    unconfirmed_since,
    with_reason,
    with_unconfirmed,
)
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.releases import release_requests, release_while_waiting
from drumline.jobs.core.state import (
    Attempt,
    Decision,
    DesiredState,
    Effect,
    EffectType,
    Event,
    Job,
    Observations,
    Placement,
    Status,
    Timeouts,
)


def cancel_without_slices(
    job: Job, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Withdraw the requests of a job, and end it once no program of it may run."""
    decision = release_requests(Decision(job), "no longer wanted")
    job = decision.job
    if observations.old_program_may_run:
        attempt, unreached = job.attempt, ""
        if attempt is not None and attempt.unconfirmed_at is not None:
            unreached = "a host cannot be reached, "
        reason = f"stopping: {unreached}waiting for its slice to be deleted"
        decision = replace(decision, job=with_reason(job, reason))
        return release_while_waiting(decision, now, timeouts)
    ended = cancelled_attempt(job)
    return decision.then(finish_job(job, Status.CANCELLED, "cancelled", now, ended=ended))


def stop_for_user(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Stop the program, then release the slices or keep them for a resume."""
    lost_reason = observations.lost_reason(placement)
    if lost_reason is not None and job.wish is DesiredState.RESTART:
        return after_preemption(job, placement, lost_reason, now, observations.steps)
    if lost_reason is not None:
        return _release_for_user(job, placement, observations, now)
    releases = job.wish is DesiredState.DELETE or job.keep <= 0
    if job.attempt is not None and not observations.stopped:
        if not observations.unreachable:
            return _repeat_stop(job, placement, job.attempt, "stopping")
        since = unconfirmed_since(job.attempt, observations.listening_since, now)
        too_long = now - since > timeouts.bad_silence
        job = with_unconfirmed(job, since)
        stopping = f"stopping: {_list_hosts(observations.unreachable)} cannot be reached"
        if releases or too_long:
            # A slice with such a host is of no use for a resume.
            job = with_reason(job, stopping)
            return _release_for_user(job, placement, observations, now)
        return _repeat_stop(job, placement, current_attempt(job), stopping)
    if job.wish is DesiredState.RESTART:
        return resume_job(job)
    if releases or observations.old_program_may_run:
        return _release_for_user(job, placement, observations, now)
    reason = f"slice {placement.accelerator} in {placement.zone} kept for a resume"
    ended = cancelled_attempt(job)
    job = replace(job, kept_until=now + job.keep)
    return finish_job(job, Status.CANCELLED, reason, now, ended=ended)


def _repeat_stop(job: Job, placement: Placement, attempt: Attempt, reason: str) -> Decision:
    job = replace(job, attempt=replace(attempt, stopping=True))
    return Decision(with_reason(job, reason), effects=(Effect(EffectType.STOP, placement),))


def _list_hosts(hosts: tuple[int, ...]) -> str:
    """Format hosts: `host 1`, `hosts 1, 3`."""
    return f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"


def _release_for_user(
    job: Job, placement: Placement, observations: Observations, now: float
) -> Decision:
    """Release the slices of a cancelled or deleted job, and end it.

    If a program may still run on them, or on previous slices, the job ends after the deletion of
    all slices.
    """
    release = (Effect(EffectType.RELEASE, placement, "no longer wanted"),)
    observation = observations.placements.get(placement.name)
    listed = observation.listed if observation else None
    gone = observation is not None and (listed is None or not listed.may_run)
    may_have_run = job.attempt is not None
    job = job.drop(placement)
    may_run = may_have_run and not (gone or observations.stopped)
    if may_run or observations.old_program_may_run:
        return Decision(job, effects=release)
    ended = cancelled_attempt(job)
    return finish_job(job, Status.CANCELLED, "cancelled", now, effects=release, ended=ended)


# --- After the end ------------------------------------------------------------------------------


def keep_for_resume(
    job: Job, placement: Placement, observations: Observations, now: float
) -> Decision:
    """Keep the slices of a finished job until `keep` is over, it is deleted, or they are lost."""
    if job.kept_until is None:
        # The job was saved by an older version, which had no `kept_until`.
        job = replace(job, kept_until=now + keep_seconds(job))
    lost_reason = observations.lost_reason(placement)
    time_left = now < (job.kept_until or 0.0)
    if lost_reason is None and job.wish is not DesiredState.DELETE and time_left:
        return Decision(job)
    failed = job.status is Status.FAILED
    release_reason, job_reason = "no longer wanted", ""
    if lost_reason is not None:
        release_reason, job_reason = lost_reason, f"the kept slice was lost: {lost_reason}"
    elif job.wish is not DesiredState.DELETE:
        duration = format_duration(keep_seconds(job))
        release_reason = job_reason = f"not resumed within {duration}"
    if failed:
        job_reason = job.reason  # the failure matters more than the slice
    return Decision(
        replace(job.drop(placement), reason=job_reason, kept_until=None),
        effects=(Effect(EffectType.RELEASE, placement, release_reason),),
        events=(Event(EventType.RELEASED, f"slice in {placement.zone}: {release_reason}"),),
    )


def keep_seconds(job: Job) -> float:
    """Return the duration for which a finished job keeps its slices."""
    return job.keep_failed if job.status is Status.FAILED else job.keep


# --- Resume -------------------------------------------------------------------------------------


def reset_for_resume(job: Job) -> Job:
    """Return a finished job as a resume queues it: with all failure counts at zero."""
    return replace(
        job,
        wish=DesiredState.RUN,
        status=Status.QUEUED,
        reason="resumed",
        failures=0,
        bad_hosts=0,
        bad_in_a_row=0,
        departures=0,
        refusals=0,
        turned_down=0,
        unreached=0,
        unclear_starts=0,
        unclear_words="",
        unclear_on=(),
        fences=False,  # the code or the job file may have changed
        not_before=0.0,
        kept_until=None,
        cause=None,
        attempt=None,
        ended_at=None,
    )


def resume_job(job: Job) -> Decision:
    """Resume a job. Its current attempt ends, and the next uses the slices if they still fit.

    Slices and requests that do not fit the current job file are released.
    """
    resumed, ended = reset_for_resume(job), cancelled_attempt(job)
    unfit = [p for p in (job.active, *job.requests) if p is not None and not fits(job, p)]
    resumed = resumed.drop(*unfit)
    reason = "the job now requests another slice"
    effects = tuple(Effect(EffectType.RELEASE, placement, reason) for placement in unfit)
    event = Event(EventType.RESUMED, describe_slices(resumed))
    return Decision(resumed, effects, (event,), ended)


def describe_slices(job: Job) -> str:
    """Describe the slices on which a resumed job starts: `on the slice kept in us-central2-b`."""
    if job.active is not None:
        return f"on the slice kept in {job.active.zone}"
    zones = [request.zone for request in job.requests]
    return f"on the slice requested in {', '.join(zones)}" if zones else "on a new slice"


def fits(job: Job, placement: Placement) -> bool:
    """Return True if a placement is among the placements that the job file requests."""
    return placement.slices == job.slices and placement.candidate in job.choices
