"""The life of a job: `decide(job, observations, now)` returns its next state and the effects.

The functions here are pure: no I/O, no clock. The supervisor observes, calls `decide`, saves the
decision, and only then acts. After a crash, the saved state therefore shows what was in progress.
Each effect is idempotent, and `decide` returns it again until its result is observed.

Decisions rest on observations only. Without a fresh poll of the zone, no slice counts as lost and
no host counts as bad. `diagnosis` finds out what went wrong on a slice. `outcomes` decides what
follows when an attempt or a job is over.
"""

from dataclasses import replace

from drumline.jobs.core.causes import has_failed
from drumline.jobs.core.diagnosis import (
    check_addresses,
    check_failures,
    check_silence,
    check_steps,
)
from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.outcomes import (
    RETRY_LIMIT,
    after_preemption,
    after_stop,
    cancelled_attempt,
    current_attempt,
    finish_job,
    format_duration,
    mark_running,
    record_burn_in,
    reject_placement,
    release_for_user,
    release_requests,
    release_unneeded,
    release_while_waiting,
    replace_bad_host,
    with_reason,
)
from drumline.jobs.core.outputs import copy_outputs
from drumline.jobs.core.reasons import EndReason, EventType
from drumline.jobs.core.requests import follow_other_requests, seek_cheaper_slices, seek_slices
from drumline.jobs.core.state import (
    Attempt,
    Cause,
    Decision,
    DesiredState,
    Effect,
    EffectType,
    EndedAttempt,
    Event,
    Job,
    Observations,
    Placement,
    PlacementRole,
    Status,
    Timeouts,
)
from drumline.observed import (
    HostPhase,
    HostReport,
)


def decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    """Return the next state of a job, its effects and events; the same job if nothing changes."""
    decision = _decide(job, observations, now, timeouts)
    decision = copy_outputs(job, decision, observations, now, timeouts)
    decision = release_unneeded(decision, observations)
    if decision.job.active is not None:
        decision = follow_other_requests(decision, observations, now, timeouts)
        decision = seek_cheaper_slices(decision, observations, now, timeouts)
    return decision


def _decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    active = job.active
    if active is None and job.wish is DesiredState.RESTART:
        return resume_job(job)
    if active is None:
        return _decide_without_slices(job, observations, now, timeouts)
    if job.status.ended:
        return _keep_for_resume(job, active, observations, now)
    return _decide_on_slices(job, active, observations, now, timeouts)


# --- Without slices ---------------------------------------------------------------------------


def _decide_without_slices(
    job: Job, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    if job.status.ended:
        return Decision(job)
    if job.wish is DesiredState.RUN:
        return seek_slices(job, observations, now, timeouts)
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


# --- On slices that are ready -----------------------------------------------------------------


def _decide_on_slices(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    if job.attempt is not None and job.attempt.succeeded:
        return _finish_succeeded(job, placement, job.attempt, now)
    lost_reason = observations.lost_reason(placement)
    if lost_reason is not None:
        if job.wish in {DesiredState.CANCEL, DesiredState.DELETE}:
            return release_for_user(job, placement, observations, now)
        return after_preemption(job, placement, lost_reason, now, observations.steps)
    if job.wish is not DesiredState.RUN:
        return _stop_for_user(job, placement, observations, now, timeouts)
    attempt, reports = job.attempt, observations.reports
    if attempt is None:
        return _restart(job, placement, now)
    if not reports:
        decision = check_addresses(job, placement, observations, now, timeouts)
        return decision or Decision(job, effects=(Effect(EffectType.RUN, placement),))
    if (not job.reached or job.unreached) and any(r.heard_at is not None for r in reports):
        job = replace(job, reached=True, unreached=0)
    if attempt.stopping and observations.unreachable:
        return _unconfirmed_stop(job, placement, observations, now, timeouts)
    if attempt.stopping:
        return after_stop(job, placement, observations, now, timeouts)
    succeeded = all(r.phase is HostPhase.EXITED and r.exit_code == 0 for r in reports)
    # A program that was never observed to run is first recorded as running, then as succeeded.
    if succeeded and attempt.running_at is not None:
        return _finish_succeeded(job, placement, attempt, now)
    if succeeded:
        return _start_or_continue(job, placement, observations, now, timeouts)
    decision = check_silence(job, placement, observations, now, timeouts)
    if decision is not None:
        return decision
    excluded_host = next((report for report in reports if report.refused), None)
    if excluded_host is not None:
        reason = f"host {excluded_host.index}, {excluded_host.refused}"
        return reject_placement(job, placement, reason, now, timeouts.retry)
    failed_hosts = [report for report in reports if has_failed(report)]
    if failed_hosts:
        return check_failures(job, placement, observations, failed_hosts, now, timeouts)
    return _start_or_continue(job, placement, observations, now, timeouts)


def _unconfirmed_stop(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Repeat the stop of a failed program on the hosts that did not confirm it.

    The next attempt starts when no host runs this one, or on other slices.
    """
    answering = [
        host for host in observations.unreachable if _answers(host, observations, now, timeouts)
    ]
    since, too_long = _unconfirmed(current_attempt(job), observations, now, timeouts)
    # Silence has deadlines of its own. A host that is back is told to stop once more.
    job = _with_unconfirmed(job, since if answering else None)
    silence = check_silence(job, placement, observations, now, timeouts)
    if silence is not None:
        return silence
    if answering and too_long:
        message = f"no stop confirmed for {format_duration(timeouts.bad_silence)}"
        hosts = len(observations.reports)
        cause = Cause(EndReason.BAD_HOST, answering[0], hosts, message, proof=EvidenceType.START)
        return replace_bad_host(job, placement, cause, observations, now, idle=False)
    return Decision(job, effects=(Effect(EffectType.STOP, placement),))


def _answers(host: int, observations: Observations, now: float, timeouts: Timeouts) -> bool:
    """Return True if a host reports, so that its silence is no reason for a stop without effect."""
    heard_at = observations.reports[host].heard_at
    return heard_at is not None and now - heard_at <= timeouts.silence


def _start_or_continue(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Follow the hosts from the upload of the code to the running program."""
    attempt, reports = current_attempt(job), observations.reports
    run = (Effect(EffectType.RUN, placement),)
    if attempt.sent_at is None and all(_has_code(report) for report in reports):
        job = replace(job, attempt=replace(attempt, sent_at=now))
        return Decision(job, effects=run, events=(Event(EventType.CODE, ""),))
    if not all(r.phase in {HostPhase.RUNNING, HostPhase.EXITED} for r in reports):
        slowest = min(reports, key=lambda r: (_PHASE_ORDER[r.phase], r.index))
        reason = f"host {slowest.index}: {slowest.detail or slowest.phase.value}"
        return Decision(with_reason(job, reason, Status.STARTING), effects=run)
    if attempt.failed_at is not None:
        # The failure passed, like a full disk. A later one waits for reports that are newer.
        attempt = replace(attempt, failed_at=None)
        job = replace(job, attempt=attempt)
    if attempt.running_at is not None:
        decision = check_steps(job, placement, observations, now, timeouts)
        return decision or Decision(mark_running(job, observations, now), effects=run)
    if any(report.burn_in == "running" for report in reports):
        return Decision(with_reason(job, "running the burn-in", Status.STARTING), effects=run)
    attempt = replace(attempt, running_at=now)
    job = replace(job, attempt=attempt, has_run=True, turned_down=0)
    decision = Decision(
        with_reason(job, "", Status.RUNNING),
        effects=run,
        events=(Event(EventType.RUN, f"attempt {attempt.number}"),),
    )
    return record_burn_in(decision, placement, reports)


def _has_code(report: HostReport) -> bool:
    """Return True if a host has received the code, maybe before this server was started."""
    return report.has_code or report.phase in {
        HostPhase.READY,
        HostPhase.RUNNING,
        HostPhase.EXITED,
    }


_PHASE_ORDER = {phase: index for index, phase in enumerate(HostPhase)}


def _finish_succeeded(job: Job, placement: Placement, attempt: Attempt, now: float) -> Decision:
    return finish_job(
        replace(job.drop(placement), cause=None),
        Status.SUCCEEDED,
        "",
        now,
        effects=(Effect(EffectType.RELEASE, placement, "the job is done"),),
        ended=(EndedAttempt(attempt, EndReason.SUCCEEDED, ""),),
    )


def _restart(job: Job, placement: Placement, now: float) -> Decision:
    """Begin a new attempt on the slices that the job still holds."""
    if now < job.not_before:
        return Decision(job)
    number = job.attempts + 1
    job = replace(job, attempts=number, attempt=Attempt(number, started_at=now))
    return Decision(
        with_reason(job, "restarting on the same slice", Status.STARTING),
        effects=(Effect(EffectType.RUN, placement),),
    )


# --- Cancel, delete and resume ----------------------------------------------------------------


def _stop_for_user(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Stop the program, then release the slices or keep them for a resume."""
    releases = job.wish is DesiredState.DELETE or job.keep <= 0
    if job.attempt is not None and not observations.stopped:
        if not observations.unreachable:
            return _repeat_stop(job, placement, job.attempt, "stopping")
        since, too_long = _unconfirmed(job.attempt, observations, now, timeouts)
        job = _with_unconfirmed(job, since)
        stopping = f"stopping: {_list_hosts(observations.unreachable)} cannot be reached"
        if releases or too_long:
            # A slice with such a host is of no use for a resume.
            job = with_reason(job, stopping)
            return release_for_user(job, placement, observations, now)
        return _repeat_stop(job, placement, current_attempt(job), stopping)
    if job.wish is DesiredState.RESTART:
        return resume_job(job)
    if releases or observations.old_program_may_run:
        return release_for_user(job, placement, observations, now)
    reason = f"slice {placement.accelerator} in {placement.zone} kept for a resume"
    ended = cancelled_attempt(job)
    job = replace(job, kept_until=now + job.keep)
    return finish_job(job, Status.CANCELLED, reason, now, ended=ended)


def _unconfirmed(
    attempt: Attempt, observations: Observations, now: float, timeouts: Timeouts
) -> tuple[float, bool]:
    """Return since when a host did not confirm the stop, and True if that lasts too long.

    Time in which this server did not listen does not count.
    """
    since = now if attempt.unconfirmed_at is None else attempt.unconfirmed_at
    since = max(since, observations.listening_since or since)
    return since, now - since > timeouts.bad_silence


def _with_unconfirmed(job: Job, since: float | None) -> Job:
    return replace(job, attempt=replace(current_attempt(job), unconfirmed_at=since))


def _repeat_stop(job: Job, placement: Placement, attempt: Attempt, reason: str) -> Decision:
    job = replace(job, attempt=replace(attempt, stopping=True))
    return Decision(with_reason(job, reason), effects=(Effect(EffectType.STOP, placement),))


def _list_hosts(hosts: tuple[int, ...]) -> str:
    """Format hosts: `host 1`, `hosts 1, 3`."""
    return f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"


def _keep_for_resume(
    job: Job, placement: Placement, observations: Observations, now: float
) -> Decision:
    """Keep the slices of an ended job until its `keep` is over, it is deleted, or they are lost."""
    if job.kept_until is None:
        # The job was saved by an earlier version, which had no `kept_until`.
        job = replace(job, kept_until=now + _keep_seconds(job))
    lost_reason = observations.lost_reason(placement)
    time_left = now < (job.kept_until or 0.0)
    if lost_reason is None and job.wish is not DesiredState.DELETE and time_left:
        return Decision(job)
    failed = job.status is Status.FAILED
    release_reason, job_reason = "no longer wanted", ""
    if lost_reason is not None:
        release_reason, job_reason = lost_reason, f"the kept slice was lost: {lost_reason}"
    elif job.wish is not DesiredState.DELETE:
        duration = format_duration(_keep_seconds(job))
        release_reason = job_reason = f"not resumed within {duration}"
    if failed:
        job_reason = job.reason  # the failure matters more than the slice
    return Decision(
        replace(job.drop(placement), reason=job_reason, kept_until=None),
        effects=(Effect(EffectType.RELEASE, placement, release_reason),),
        events=(Event(EventType.RELEASED, f"slice in {placement.zone}: {release_reason}"),),
    )


def _keep_seconds(job: Job) -> float:
    return job.keep_failed if job.status is Status.FAILED else job.keep


def reset_for_resume(job: Job) -> Job:
    """Return an ended job as a resume queues it: with all failure counts at zero."""
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
    """Resume a job. The current attempt ends, and the next one uses the slices if they still fit.

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
    """Return True if a placement is one of those that the job file requests."""
    return placement.slices == job.slices and placement.candidate in job.choices


# --- Clocks -----------------------------------------------------------------------------------


def adapt_times(job: Job, now: float) -> Job:
    """Adapt the times of a saved job to a new server, because the wall clock may have been set.

    Past events are limited to `now`, and deadlines to their longest delay: otherwise a backoff of
    seconds could last hours. Waits begin again: otherwise they could be over at once, and a request
    would count as preempted, or a host as bad.
    """
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
        kept_until=_at_most(job.kept_until, now + _keep_seconds(job)),
    )


def _restarted(time: float | None, now: float) -> float | None:
    """Return the beginning of a wait that begins again now; None if there was none."""
    return None if time is None else now


def _at_most(time: float | None, limit: float) -> float | None:
    return None if time is None else min(time, limit)
