"""The end of an attempt or a job: counts and consequences. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.reasons import EndReason, EventType
from drumline.jobs.core.releases import release_or_hold_back
from drumline.jobs.core.state import (
    Attempt,
    Cause,
    Decision,
    Effect,
    EffectType,
    EndedAttempt,
    Event,
    Job,
    Placement,
    Status,
    Timeouts,
)
from drumline.jobs.core.steps import Steps
from drumline.observed import HostReport

BACKOFF_LIMIT = 60.0
RETRY_LIMIT = 120.0
"""The maximum seconds between refused requests. It is short, so that a job notices soon when a
user renews an expired login."""
MAX_DOUBLINGS = 10


# --- The end of an attempt ----------------------------------------------------------------------


def restart_uncounted(job: Job, reason: EndReason, now: float, timeouts: Timeouts) -> Decision:
    """Restart the program after an exit that is no failure; back off if it exited quickly.

    On a slice that is being preempted, `running` waits for the preemption instead.
    """
    attempt = current_attempt(job)
    running_at = attempt.started_at if attempt.running_at is None else attempt.running_at
    departures = 1 if now - running_at > BACKOFF_LIMIT else job.departures + 1
    job = replace(
        job,
        attempt=None,
        cause=None,
        departures=departures,
        not_before=now + _backoff(departures, timeouts),
    )
    return Decision(
        with_reason(job, f"{reason.clause}; restarting", Status.STARTING),
        events=(Event(EventType.LEFT, f"{reason.clause}; restarting"),),
        ended=(EndedAttempt(attempt, reason, reason.clause),),
    )


def leave_for_cheaper_slices(job: Job, placement: Placement, message: str) -> Decision:
    """Release the slices of a program that was stopped to continue on cheaper slices.

    If the cheaper slices were lost meanwhile, the program restarts on the slices that it has.
    """
    ended = EndedAttempt(current_attempt(job), EndReason.MOVED, message)
    if not any(request.ready_at is not None for request in job.requests):
        job = replace(job, attempt=None, cause=None)
        text = "the cheaper slice was lost before the move; restarting"
        event = Event(EventType.LEFT, text)
        return Decision(with_reason(job, text, Status.STARTING), events=(event,), ended=(ended,))
    job = replace(job.drop(placement), attempt=None, cause=None)
    release = (Effect(EffectType.RELEASE, placement, message),)
    return Decision(with_reason(job, message, Status.WAITING), release, ended=(ended,))


def count_failure(
    job: Job, placement: Placement, cause: Cause, now: float, timeouts: Timeouts, *, dead: bool
) -> Decision:
    """Count a failure. Restart the program, or end the job if the allowance is used up.

    `dead` is True if the program has exited on every host. Only then are the slices kept for a
    resume: on the others it would run beside the program that is resumed.
    """
    where = f"on host {cause.host} of {cause.hosts}: {cause.error}"
    text = f"{cause.kind} {where}"
    if cause.kind is EndReason.STUCK:
        where = text = f"stuck: {cause.error}"
    ended = EndedAttempt(current_attempt(job), cause.kind, text, cause)
    failures = job.failures + 1
    job = replace(job, attempt=None, failures=failures)
    if job.allowance.failures is not None and failures > job.allowance.failures:
        count = "1 failure" if failures == 1 else f"{failures} failures, the last"
        part = "set-up" if cause.kind is EndReason.SETUP_FAILED else "program"
        kept = dead and job.keep_failed > 0
        job = replace(job, kept_until=now + job.keep_failed) if kept else job.drop(placement)
        return finish_job(
            job,
            Status.FAILED,
            f"{count} of the {part} {where}",
            now,
            effects=() if kept else (Effect(EffectType.RELEASE, placement, "the job failed"),),
            events=(Event(EventType.FAILED, text),),
            ended=(ended,),
        )
    job = replace(job, not_before=now + _backoff(failures, timeouts))
    reason = f"{text}; restarting"
    stuck = cause.kind is EndReason.STUCK
    event = Event(EventType.STUCK, reason) if stuck else Event(EventType.FAILED, text)
    job = with_reason(job, reason, Status.STARTING)
    return Decision(job, events=(event,), ended=(ended,))


def _backoff(failures: int, timeouts: Timeouts) -> float:
    return min(BACKOFF_LIMIT, timeouts.rest * 2.0 ** min(failures - 1, MAX_DOUBLINGS))


def with_backoff(job: Job, now: float, timeouts: Timeouts) -> Job:
    """Return the job after a loss of slices that were not ready, with a longer backoff."""
    refusals = job.refusals + 1
    return replace(job, refusals=refusals, not_before=now + retry_pause(refusals, timeouts.retry))


def retry_pause(repetition: int, first: float) -> float:
    """Return the pause before a repetition, which doubles per repetition up to `RETRY_LIMIT`."""
    return min(RETRY_LIMIT, first * 2.0 ** min(repetition - 1, MAX_DOUBLINGS))


def reject_placement(
    job: Job, placement: Placement, reason: str, now: float, first_pause: float
) -> Decision:
    """Reject slices with an excluded host. The attempt continues on other slices.

    The pause before the next request is `first_pause` seconds, doubled per rejection: if all
    machines of a zone are excluded, the cloud can only regrant these machines.
    """
    rejections = job.turned_down + 1
    job = replace(job, turned_down=rejections)
    # No host starts the program before all hosts are admitted, so the slices are idle.
    job, effects, events = release_or_hold_back(job, placement, reason, idle=True)
    attempt = current_attempt(job)
    job = replace(
        job,
        next_choice=(job.next_choice + 1) % len(job.choices),
        not_before=now + retry_pause(rejections, first_pause),
        attempt=Attempt(attempt.number, attempt.started_at),
    )
    in_a_row = "" if rejections == 1 else f" ({rejections} in a row)"
    job = with_reason(job, f"rejected slice: {reason}{in_a_row}", Status.WAITING)
    return Decision(job, effects, (Event(EventType.REFUSED, reason), *events))


def replace_bad_host(
    job: Job,
    placement: Placement,
    cause: Cause,
    mass_failure: str,
    now: float,
    *,
    idle: bool,
) -> Decision:
    """Release or hold back the slices with a bad host, and request new slices.

    Consecutive bad hosts use up an allowance if the program may be the cause: if a program failed
    to start, or if a training step was not reproducible on chips that had just passed a burn-in. A
    chip that was measured to be wrong does not count. If many hosts fail at once, `mass_failure`
    says so and every one counts, because other slices would be no better.

    `idle` is True if the program has exited on every host.
    """
    measured = cause.proof == EvidenceType.BURN_IN or (
        cause.proof == EvidenceType.REPLAY and not placement.proved
    )
    in_a_row = job.bad_in_a_row + (bool(mass_failure) or not measured)
    text = f"host {cause.host} of {cause.hosts}: {cause.error}"
    ended = (EndedAttempt(current_attempt(job), EndReason.BAD_HOST, text, cause),)
    events = (Event(EventType.BADHOST, text, _host_fields(cause, placement)),)
    job = replace(
        job, bad_hosts=job.bad_hosts + 1, bad_in_a_row=in_a_row, attempt=None, cause=cause
    )
    if job.allowance.bad_hosts is not None and in_a_row > job.allowance.bad_hosts:
        reason = f"{in_a_row} bad hosts, the last: {text}"
        reason += f"; {mass_failure}" if mass_failure else ""
        release = (Effect(EffectType.RELEASE, placement, text),)
        job = job.drop(placement)
        return finish_job(job, Status.FAILED, reason, now, release, events, ended)
    job, effects, held_back = release_or_hold_back(job, placement, text, idle=idle)
    job = with_reason(job, f"{text}; slice being replaced", Status.WAITING)
    return Decision(job, effects, (*events, *held_back), ended)


def _host_fields(cause: Cause, placement: Placement) -> dict[str, str | float | None]:
    """Return the fields of an event about one host."""
    return {"host": cause.host, "hosts": cause.hosts, "error": cause.error, "zone": placement.zone}


# --- Starts that failed because of the host or of the program -----------------------------------

OTHER_SLICES = 2
"""Slices that a job tries after a start that failed because of the host or of the program."""


def record_ambiguous_start(job: Job, cause: Cause, machine: str) -> Job:
    """Return the job with an added machine on which it failed to start with this error."""
    machines = job.unclear_on if cause.words == job.unclear_words else ()
    if machine not in machines:
        machines = (*machines, machine)
    return replace(job, unclear_words=cause.words, unclear_on=machines)


def is_fault_of_program(job: Job) -> bool:
    """Return True if the program is the cause of its ambiguous starts.

    The program is the cause if two machines have the same error, or if every tried slice has a
    different error.
    """
    return len(job.unclear_on) > 1 or job.unclear_starts >= OTHER_SLICES


def replace_after_ambiguous_start(
    job: Job, placement: Placement, cause: Cause, *, idle: bool
) -> Decision:
    """Try a new slice after a start that failed because of the host or of the program.

    This counts as no failure, and against no host.
    """
    text = f"host {cause.host} of {cause.hosts}: {cause.error}"
    ended = (EndedAttempt(current_attempt(job), EndReason.AMBIGUOUS_START, text, cause),)
    fields = _host_fields(cause, placement)
    events = (Event(EventType.UNCLEAR, f"{text}; trying another slice", fields),)
    job = replace(job, unclear_starts=job.unclear_starts + 1, attempt=None, cause=cause)
    job, effects, held_back = release_or_hold_back(job, placement, text, idle=idle)
    job = with_reason(job, f"{text}; trying another slice", Status.WAITING)
    return Decision(job, effects, (*events, *held_back), ended)


# --- Slices out of reach ------------------------------------------------------------------------


UNREACHED_AFTER_CONTACT = 3
"""Consecutive slices without any contact after which a job ends that has reached hosts before."""


def replace_unreachable(
    job: Job, placement: Placement, reports: Sequence[HostReport], now: float
) -> Decision:
    """Try a new slice after a slice without a reachable host, or end the job with the reason.

    No host is blamed, because the cause is the network or the login.
    """
    failures = [report.contact for report in reports if report.contact is not None]
    failure = max(failures, key=failures.count)
    cause = failure.reason
    if failure.from_command:
        cause = next((r.detail for r in reports if r.contact == failure and r.detail), cause)
    unreached = job.unreached + 1
    job = replace(job, unreached=unreached)
    reason = f"no host of the slice could be reached: {cause}"
    # A job of an older version has run without `reached`.
    slices = UNREACHED_AFTER_CONTACT if job.reached or job.has_run else failure.slices
    if unreached >= slices:
        return end_unreachable(job, placement, f"{reason}; {failure.change}", now)
    ended = EndedAttempt(current_attempt(job), EndReason.UNREACHABLE, reason)
    job = replace(job.drop(placement), attempt=None, cause=None)
    return Decision(
        with_reason(job, f"{reason}; trying another slice", Status.WAITING),
        effects=(Effect(EffectType.RELEASE, placement, reason),),
        events=(Event(EventType.UNREACHABLE, reason),),
        ended=(ended,),
    )


def end_unreachable(job: Job, placement: Placement, reason: str, now: float) -> Decision:
    """End a job whose hosts cannot be reached without a change by the user."""
    return finish_job(
        replace(job.drop(placement), cause=None),
        Status.FAILED,
        reason,
        now,
        effects=(Effect(EffectType.RELEASE, placement, "its hosts cannot be reached"),),
        ended=(EndedAttempt(current_attempt(job), EndReason.UNREACHABLE, reason),),
    )


# --- Preemptions and cancellations --------------------------------------------------------------


def after_preemption(
    job: Job, placement: Placement, reason: str, now: float, steps: Steps | None = None
) -> Decision:
    """Release slices that were lost through no fault of the program, and request new slices."""
    preemptions = job.preemptions + 1
    ended = (EndedAttempt(job.attempt, EndReason.PREEMPTED, reason),) if job.attempt else ()
    job = replace(job.drop(placement), preemptions=preemptions, attempt=None, cause=None)
    release = (Effect(EffectType.RELEASE, placement, reason),)
    position = f"in {placement.zone}: {reason}" if steps is None else _format_position(steps)
    fields: dict[str, str | float | None] = {"zone": placement.zone, "reason": reason}
    if steps is not None:
        fields |= {"step": steps.step, "checkpoint": steps.checkpoint}
    events = (Event(EventType.PREEMPTED, f"slice preempted {position}", fields),)
    if job.allowance.preemptions is not None and preemptions > job.allowance.preemptions:
        count = "1 preemption" if preemptions == 1 else f"{preemptions} preemptions, the last"
        job_reason = f"{count} in {placement.zone}: {reason}"
        return finish_job(job, Status.FAILED, job_reason, now, release, events, ended)
    job = with_reason(job, f"slice preempted in {placement.zone}", Status.WAITING)
    return Decision(job, release, events, ended)


def _format_position(steps: Steps) -> str:
    """Format the newest step and checkpoint: `at step 151 (checkpoint: step 150)`."""
    saved = "" if steps.checkpoint is None else f" (checkpoint: step {steps.checkpoint:,.0f})"
    if not saved and steps.tells_checkpoints:
        saved = " (no checkpoint yet)"
    return f"at step {steps.step:,.0f}{saved}"


def cancelled_attempt(job: Job) -> tuple[EndedAttempt, ...]:
    """Return the current attempt as cancelled by the user; empty if there is none."""
    return (EndedAttempt(job.attempt, EndReason.CANCELLED, ""),) if job.attempt else ()


def unconfirmed_since(attempt: Attempt, listening_since: float | None, now: float) -> float:
    """Return the start of the period in which a host did not confirm the stop of an attempt.

    Time in which this server did not listen does not count.
    """
    since = now if attempt.unconfirmed_at is None else attempt.unconfirmed_at
    return max(since, since if listening_since is None else listening_since)


def with_unconfirmed(job: Job, since: float | None) -> Job:
    """Return the job with the start of the period without confirmation of its attempt's stop."""
    return replace(job, attempt=replace(current_attempt(job), unconfirmed_at=since))


# --- The end of a job ---------------------------------------------------------------------------


def finish_job(
    job: Job,
    status: Status,
    reason: str,
    now: float,
    effects: tuple[Effect, ...] = (),
    events: tuple[Event, ...] = (),
    ended: tuple[EndedAttempt, ...] = (),
) -> Decision:
    """End a job with this status."""
    job = replace(job, status=status, reason=reason, attempt=None, ended_at=now, refusals=0)
    return Decision(job, effects, (*events, Event(EventType(status.value.lower()), reason)), ended)


def after_internal_error(job: Job, message: str, now: float) -> Decision:
    """End a job that Drumline itself cannot handle. Its checkpoints and logs stay for a resume."""
    release = tuple(Effect(EffectType.RELEASE, placement, message) for placement in job.placements)
    attempt = job.attempt
    ended = (EndedAttempt(attempt, EndReason.INTERNAL_ERROR, message),) if attempt else ()
    job = replace(job, placements=(), kept_until=None)
    if job.status.ended:
        return Decision(job, release, (Event(EventType.RELEASED, message),))
    return finish_job(job, Status.FAILED, message, now, effects=release, ended=ended)


# --- Helpers ------------------------------------------------------------------------------------


def with_reason(job: Job, reason: str, status: Status | None = None) -> Job:
    """Return the job with this reason and status. A job that ran before recovers, not starts."""
    if status in {Status.WAITING, Status.STARTING} and job.has_run:
        status = Status.RECOVERING
    status = status or job.status
    # Usually there is no change, and every round calls this for a thousand waiting jobs.
    if (reason, status) == (job.reason, job.status):
        return job
    return replace(job, reason=reason, status=status)


def current_attempt(job: Job) -> Attempt:
    """Return the current attempt, or an empty one if none has started."""
    return job.attempt or Attempt(max(job.attempts, 1), started_at=job.created_at)


def format_duration(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
