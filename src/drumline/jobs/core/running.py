"""A job whose slices are ready: from the upload of the code to the end of its program. Pure.

A host may be silent, may fail, or may make no more steps. Each diagnosis waits for a poll of the
cloud that is newer than the first symptom, because the first symptom of a preemption is often a
program that fails or hangs. `causes` finds the host that failed first.
"""

from dataclasses import replace

from drumline.jobs.core.causes import find_cause, has_failed, killed_by_signal, requested_restart
from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.outcomes import (
    after_preemption,
    count_failure,
    current_attempt,
    end_unreachable,
    finish_job,
    format_duration,
    is_fault_of_program,
    leave_for_cheaper_slices,
    record_ambiguous_start,
    reject_placement,
    replace_after_ambiguous_start,
    replace_bad_host,
    replace_unreachable,
    restart_uncounted,
    unconfirmed_since,
    with_reason,
    with_unconfirmed,
)
from drumline.jobs.core.reasons import END_RULES, EndReason, EventType
from drumline.jobs.core.state import (
    Attempt,
    Cause,
    Decision,
    Effect,
    EffectType,
    EndedAttempt,
    Event,
    Job,
    Observations,
    Placement,
    Status,
    Timeouts,
)
from drumline.jobs.core.steps import Steps
from drumline.observed import ContactFault, FaultType, HostPhase, HostReport, PlacementState

FIRST_AND_LAST_STEP_FACTOR = 3.0
"""Factor on the time limit of an attempt's first and last step. Programs compile and restore at the
start, and evaluate and export at the end, which takes longer than any pause in between."""
RUN_SECONDS = 600.0
"""Seconds after which a program without steps counts as started."""


def follow_program(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Follow the program of a job on its slices: start it, find failures, notice its success."""
    if job.attempt is not None and job.attempt.succeeded:
        return _finish_succeeded(job, placement, job.attempt, now)
    lost_reason = observations.lost_reason(placement)
    if lost_reason is not None:
        return after_preemption(job, placement, lost_reason, now, observations.steps)
    attempt, reports = job.attempt, observations.reports
    if attempt is None:
        return _restart(job, placement, now)
    if not reports:
        decision = _check_addresses(job, placement, observations, now, timeouts)
        return decision or Decision(job, effects=(Effect(EffectType.RUN, placement),))
    if (not job.reached or job.unreached) and any(r.heard_at is not None for r in reports):
        job = replace(job, reached=True, unreached=0)
    if attempt.stopping and observations.unreachable:
        return _unconfirmed_stop(job, placement, observations, now, timeouts)
    if attempt.stopping:
        return _after_stop(job, placement, observations, now, timeouts)
    succeeded = all(r.phase is HostPhase.EXITED and r.exit_code == 0 for r in reports)
    # A program that was never observed to run is first recorded as running, then as succeeded.
    if succeeded and attempt.running_at is not None:
        return _finish_succeeded(job, placement, attempt, now)
    if succeeded:
        return _start_or_continue(job, placement, observations, now, timeouts)
    decision = _check_silence(job, placement, observations, now, timeouts)
    if decision is not None:
        return decision
    excluded_host = next((report for report in reports if report.refused), None)
    if excluded_host is not None:
        reason = f"host {excluded_host.index}, {excluded_host.refused}"
        return reject_placement(job, placement, reason, now, timeouts.retry)
    failed_hosts = [report for report in reports if has_failed(report)]
    if failed_hosts:
        return _check_failures(job, placement, observations, failed_hosts, now, timeouts)
    return _start_or_continue(job, placement, observations, now, timeouts)


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


def _finish_succeeded(job: Job, placement: Placement, attempt: Attempt, now: float) -> Decision:
    return finish_job(
        replace(job.drop(placement), cause=None),
        Status.SUCCEEDED,
        "",
        now,
        effects=(Effect(EffectType.RELEASE, placement, "the job is done"),),
        ended=(EndedAttempt(attempt, EndReason.SUCCEEDED, ""),),
    )


# --- From the upload of the code to the running program -----------------------------------------


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
        decision = _check_steps(job, placement, observations, now, timeouts)
        return decision or Decision(_mark_running(job, observations, now), effects=run)
    if any(report.burn_in == "running" for report in reports):
        return Decision(with_reason(job, "running the burn-in", Status.STARTING), effects=run)
    attempt = replace(attempt, running_at=now)
    job = replace(job, attempt=attempt, has_run=True, turned_down=0)
    decision = Decision(
        with_reason(job, "", Status.RUNNING),
        effects=run,
        events=(Event(EventType.RUN, f"attempt {attempt.number}"),),
    )
    return _record_burn_in(decision, placement, reports)


def _has_code(report: HostReport) -> bool:
    """Return True if a host has received the code, maybe before this server was started."""
    return report.has_code or report.phase in {
        HostPhase.READY,
        HostPhase.RUNNING,
        HostPhase.EXITED,
    }


_PHASE_ORDER = {phase: index for index, phase in enumerate(HostPhase)}


def _record_burn_in(
    decision: Decision, placement: Placement, reports: tuple[HostReport, ...]
) -> Decision:
    """Add to the start of a program that its hosts passed a burn-in, if they ran one."""
    tested = [report for report in reports if report.burn_in]
    if placement.proved or not tested:
        return decision
    slowest = max(report.burn_in_seconds for report in tested)
    warnings = [f"host {r.index}: {r.burn_in_message}" for r in tested if r.burn_in == "warn"]
    text = f"passed in {slowest:.0f} s" + (f", but {'; '.join(warnings)}" if warnings else "")
    job = decision.job.put(replace(placement, proved=True))
    return replace(decision, job=job, events=(Event(EventType.BURNIN, text), *decision.events))


def _mark_running(job: Job, observations: Observations, now: float) -> Job:
    """Return the job while its program runs on every host."""
    steps = observations.steps
    running_at = current_attempt(job).running_at
    if job.unclear_on and (steps or (running_at is not None and now - running_at > RUN_SECONDS)):
        job = replace(job, unclear_starts=0, unclear_words="", unclear_on=())
    if steps is not None and not job.has_stepped:
        job = replace(job, has_stepped=True)
    if steps is not None and steps.fenced and not job.fences:
        job = replace(job, fences=True)
    if job.bad_in_a_row and _made_progress(job, steps):
        job = replace(job, bad_in_a_row=0)
    stopping = next((r for r in observations.reports if r.shutdown_reason), None)
    reason = f"host {stopping.index} is going down: {stopping.shutdown_reason}" if stopping else ""
    return with_reason(job, reason, Status.RUNNING)


def _made_progress(job: Job, steps: Steps | None) -> bool:
    """Return True if the program has made progress since the last bad host.

    A program whose host was found bad in the middle of a training may make steps and fail in every
    attempt. Then only a new checkpoint counts.
    """
    failed_in_training = job.cause is not None and job.cause.proof == EvidenceType.REPLAY
    return steps is not None and (steps.saved_at is not None or not failed_in_training)


# --- Hosts that cannot be called ----------------------------------------------------------------

_PERMANENT = frozenset({FaultType.DENIED, FaultType.INVALID, FaultType.UNKNOWN})
"""Faults of the cloud that do not pass by themselves, like a missing permission."""


def _check_addresses(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision | None:
    """End a job if the cloud refuses for too long to show the host keys of its slices.

    The keys are never trusted at first sight instead, because the job's secrets would be sent to
    whoever answers. A program that runs already is left alone.
    """
    error = observations.address_error
    if error is None or current_attempt(job).running_at is not None:
        return None
    if error.refusal.fault.kind not in _PERMANENT:
        return None
    if error.at - error.since <= timeouts.first_contact:
        return None
    return end_unreachable(job, placement, error.refusal.text, now)


# --- Silent hosts -------------------------------------------------------------------------------


def _check_silence(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision | None:
    """Check for hosts that are silent for too long: the slice is lost, or the host is bad.

    If no host of a slice was ever reached, the cause is the network or the login, not a host.
    """
    observation, reports = observations.placements.get(placement.name), observations.reports
    may_run = current_attempt(job).running_at is not None
    never_reached = not may_run and all(
        r.heard_at is None and r.contact is not None and r.contact.slices for r in reports
    )
    for report in reports:
        since = _silent_since(report, observations)
        finished = report.phase is HostPhase.EXITED and not has_failed(report)
        if finished or since is None:
            continue
        silence = now - since
        contact, never_heard = report.contact, report.heard_at is None
        if contact is not None and not contact.passes and not may_run:
            if not never_heard or silence > timeouts.silence:
                return end_unreachable(job, placement, report.detail, now)
            continue
        limit = timeouts.first_contact if never_heard else timeouts.bad_silence
        if silence <= min(timeouts.silence, limit):
            continue
        polled_since = observation is not None and observation.at > since + timeouts.silence
        listed = observation.listed if observation else None
        if polled_since and (listed is None or listed.state is not PlacementState.READY):
            state = listed.cloud_state if listed and listed.slices else "gone"
            reason = f"host {report.index} is silent, and the slice is {state}"
            return after_preemption(job, placement, reason, now, observations.steps)
        # The maintenance may have finished before the newest poll, and the host answers soon.
        maintenance = observation.maintenance_after(since) if observation else ""
        if polled_since and maintenance:
            reason = f"host {report.index} is silent, and the slice is in maintenance"
            reason += f" ({maintenance})"
            return after_preemption(job, placement, reason, now, observations.steps)
        message = f"no report from host {report.index} for {format_duration(silence)}"
        if contact is not None and contact.from_command and report.detail:
            message += f": {report.detail}"
        if contact is not None and contact.fault is ContactFault.LOCAL:
            message += f": this machine cannot connect to it, {report.detail}"
        elif contact is not None and contact.answered and may_run:
            message += f": {report.detail}"  # the program continues there
        elif polled_since and silence > limit:
            if never_reached:
                return replace_unreachable(job, placement, reports, now)
            blamed = contact is None or contact.fault is ContactFault.HOST
            cause = Cause(
                EndReason.BAD_HOST,
                report.index,
                len(reports),
                message,
                report.tail,
                proof=EvidenceType.START if blamed else "",
            )
            return replace_bad_host(
                job, placement, cause, observations.mass_failure, now, idle=False
            )
        return _wait_for_reports_and_poll(with_reason(job, message), placement)
    return None


def _silent_since(report: HostReport, observations: Observations) -> float | None:
    """Return when a host last reported, or when this server started to listen if that was later.

    A server that was stopped, or whose machine was asleep, received no reports in the meantime.
    """
    times = [t for t in (report.heard_at, observations.listening_since) if t is not None]
    return max(times, default=None)


# --- Failed hosts -------------------------------------------------------------------------------


def _check_failures(
    job: Job,
    placement: Placement,
    observations: Observations,
    failed: list[HostReport],
    now: float,
    timeouts: Timeouts,
) -> Decision:
    """Wait for the other hosts and the cloud after a failure, then find the cause and act on it."""
    attempt, reports = current_attempt(job), observations.reports
    if attempt.failed_at is None:
        job = replace(job, attempt=replace(attempt, failed_at=now))
        return Decision(job, effects=(Effect(EffectType.POLL, placement),))
    idle = all(r.phase is HostPhase.EXITED or has_failed(r) for r in reports)
    settled = idle or now - attempt.failed_at >= timeouts.settle
    stopping = next((report for report in reports if report.shutdown_reason), None)
    if stopping is not None and settled:
        # The host is about to be deleted, whatever the cloud lists until then.
        reason = f"host {stopping.index} is going down: {stopping.shutdown_reason}"
        return after_preemption(job, placement, reason, now, observations.steps)
    # A host that shuts down first ends its programs by a signal, and some save their work and exit.
    # A host without a report since then may be the lost one that made the others fail.
    host_may_shut_down = any(killed_by_signal(r) or requested_restart(r) for r in failed)
    since = attempt.failed_at + (timeouts.shutdown if host_may_shut_down else 0.0)
    if not (settled and _reported_and_polled_since(since, placement, observations)):
        return _wait_for_reports_and_poll(job, placement)
    cause = find_cause(failed, reports, starting=observations.steps is None)
    if cause.kind == EndReason.BAD_HOST:
        return replace_bad_host(job, placement, cause, observations.mass_failure, now, idle=idle)
    if cause.kind == EndReason.AMBIGUOUS_START:
        identity = next(r.identity for r in reports if r.index == cause.host)
        machine = identity.get("physical_host") or f"{placement.name}/{cause.host}"
        job = record_ambiguous_start(job, cause, machine)
        if not is_fault_of_program(job):
            return replace_after_ambiguous_start(job, placement, cause, idle=idle)
        machines = len(job.unclear_on)
        same = f"the same on {machines} machines" if machines > 1 else "on other slices too"
        cause = replace(cause, kind=EndReason.PROGRAM_FAILED, error=f"{cause.error} ({same})")
    message = f"{cause.kind} on host {cause.host}: {cause.error}"
    if END_RULES[cause.kind].counts is None:
        message = cause.kind.clause
    return _stop(job, placement, cause, message)


def _reported_and_polled_since(
    time: float, placement: Placement, observations: Observations
) -> bool:
    """Return True if every host has reported and the zone was polled after `time`.

    A host whose program exited by itself has no further information.
    """
    observation = observations.placements.get(placement.name)
    if observation is None or observation.at <= time:
        return False
    for report in observations.reports:
        reported_at = _reported_at(report)
        if not _ended_by_itself(report) and (reported_at is None or reported_at <= time):
            return False
    return True


def _ended_by_itself(report: HostReport) -> bool:
    exited = report.phase is HostPhase.EXITED
    return exited and not (killed_by_signal(report) or requested_restart(report))


def _reported_at(report: HostReport) -> float | None:
    """Return when a host last reported the state of its program; None if it never has.

    A host that rebooted sends messages before it reports that its program is missing. Until then
    the other hosts, which were disconnected from it, look like the cause.
    """
    if report.phase is HostPhase.CONNECTING or report.reported_at is not None:
        return report.reported_at
    return report.heard_at


# --- No new steps -------------------------------------------------------------------------------


def _check_steps(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision | None:
    """Stop a program that makes no more steps, so that it restarts."""
    attempt, steps, reports = current_attempt(job), observations.steps, observations.reports
    since = steps.stepped_at if steps else attempt.running_at
    if since is not None and observations.listening_since is not None:
        # A server sees no steps while it is down, and the clock of the previous one may differ.
        since = max(since, observations.listening_since)
    limit = _longest_pause(job, steps)
    if limit is None or since is None or now - since <= limit:
        if attempt.stuck_at is None:
            return None
        return Decision(replace(job, attempt=replace(attempt, stuck_at=None)))
    if attempt.stuck_at is None:
        job = replace(job, attempt=replace(attempt, stuck_at=now))
        return Decision(job, effects=(Effect(EffectType.POLL, placement),))
    # After a reconnection, a host reports just before its newest heartbeat arrives.
    settled = now - attempt.stuck_at >= timeouts.settle
    if not (settled and _reported_and_polled_since(attempt.stuck_at, placement, observations)):
        return _wait_for_reports_and_poll(job, placement)
    last_step = f"the last was step {steps.step:,.0f}" if steps else "none since it started"
    error = f"no step for {format_duration(now - since)}, {last_step}"
    cause = Cause(EndReason.STUCK, reports[0].index, len(reports), error, reports[0].tail)
    return _stop(job, placement, cause, error)


def _longest_pause(job: Job, steps: Steps | None) -> float | None:
    """Return the seconds without a step that are still normal; None if no step is expected."""
    if job.stuck_after is None or not (steps or job.has_stepped):
        return None
    between_steps = steps is not None and steps.moving and not steps.last_step
    return job.stuck_after * (1.0 if between_steps else FIRST_AND_LAST_STEP_FACTOR)


# --- The stop of a failed program ---------------------------------------------------------------


def _stop(job: Job, placement: Placement, cause: Cause, reason: str) -> Decision:
    attempt = replace(current_attempt(job), stopping=True)
    job = with_reason(replace(job, attempt=attempt, cause=cause), reason)
    return Decision(job, effects=(Effect(EffectType.STOP, placement),))


def _after_stop(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Decide what follows once the program was stopped on all hosts because of `job.cause`."""
    if not observations.stopped:
        return Decision(job, effects=(Effect(EffectType.STOP, placement),))
    cause = job.cause
    assert cause is not None
    if cause.kind is EndReason.MOVED:
        return leave_for_cheaper_slices(job, placement, cause.error)
    if END_RULES[cause.kind].counts is None:
        return restart_uncounted(job, cause.kind, now, timeouts)
    dead = all(r.phase in {HostPhase.EXITED, HostPhase.FAILED} for r in observations.reports)
    return count_failure(job, placement, cause, now, timeouts, dead=dead)


def _unconfirmed_stop(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Repeat the stop of a failed program on the hosts that did not confirm it.

    The next attempt starts when no host runs this one, or on other slices.
    """
    answering = [
        host for host in observations.unreachable if _answers(host, observations, now, timeouts)
    ]
    since = unconfirmed_since(current_attempt(job), observations.listening_since, now)
    # Silence has deadlines of its own. A host that is back is told to stop once more.
    job = with_unconfirmed(job, since if answering else None)
    silence = _check_silence(job, placement, observations, now, timeouts)
    if silence is not None:
        return silence
    if answering and now - since > timeouts.bad_silence:
        message = f"no stop confirmed for {format_duration(timeouts.bad_silence)}"
        hosts = len(observations.reports)
        cause = Cause(EndReason.BAD_HOST, answering[0], hosts, message, proof=EvidenceType.START)
        return replace_bad_host(job, placement, cause, observations.mass_failure, now, idle=False)
    return Decision(job, effects=(Effect(EffectType.STOP, placement),))


def _answers(host: int, observations: Observations, now: float, timeouts: Timeouts) -> bool:
    """Return True if a host reports, so that its silence is no reason for a stop without effect."""
    heard_at = observations.reports[host].heard_at
    return heard_at is not None and now - heard_at <= timeouts.silence


# --- Helpers ------------------------------------------------------------------------------------


def _wait_for_reports_and_poll(job: Job, placement: Placement) -> Decision:
    effects = (Effect(EffectType.RUN, placement), Effect(EffectType.POLL, placement))
    return Decision(job, effects=effects)
