"""Failures of a program on its slices: a silent host, a failed host, or no new steps. Pure.

Each diagnosis waits for a poll of the cloud that is newer than the first symptom, because the first
symptom of a preemption is often a program that fails or hangs.
"""

from dataclasses import replace

from drumline.jobs.core.causes import (
    find_cause,
    has_failed,
    killed_by_signal,
    requested_restart,
)
from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.outcomes import (
    FIRST_CONTACT_ADVICE,
    after_preemption,
    current_attempt,
    end_unreachable,
    format_duration,
    is_fault_of_program,
    record_ambiguous_start,
    replace_after_ambiguous_start,
    replace_bad_host,
    replace_unreachable,
    with_reason,
)
from drumline.jobs.core.reasons import END_RULES, EndReason
from drumline.jobs.core.state import (
    Cause,
    Decision,
    Effect,
    EffectType,
    Job,
    Observations,
    Placement,
    Timeouts,
)
from drumline.jobs.core.steps import Steps
from drumline.observed import ContactFailure, FaultType, HostPhase, HostReport, PlacementState

FIRST_AND_LAST_STEP_FACTOR = 3.0
"""Factor on the time limit of an attempt's first and last step. Programs compile and restore at the
start, and evaluate and export at the end, which takes longer than any pause in between."""


# --- Hosts that cannot be called --------------------------------------------------------------


_PERMANENT = frozenset({FaultType.DENIED, FaultType.INVALID, FaultType.UNKNOWN})
"""Faults of the cloud that do not pass by themselves, like a missing permission."""


def check_addresses(
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


# --- Silent hosts -----------------------------------------------------------------------------


def check_silence(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision | None:
    """Check whether a host was silent for too long: its slice is lost, or the host is bad.

    If no host of a slice was ever reached, the cause is the network or the login, not a host.
    """
    observation, reports = observations.placements.get(placement.name), observations.reports
    may_run = current_attempt(job).running_at is not None
    never_reached = not may_run and all(
        r.heard_at is None and r.contact in FIRST_CONTACT_ADVICE for r in reports
    )
    for report in reports:
        since = _silent_since(report, observations)
        finished = report.phase is HostPhase.EXITED and not has_failed(report)
        if finished or since is None:
            continue
        silence = now - since
        never_heard = report.heard_at is None
        if report.contact is ContactFailure.MISSING_FILE and not may_run:
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
        # The maintenance may have ended before the newest poll, and the host answers soon.
        maintenance = observation.maintenance_after(since) if observation else ""
        if polled_since and maintenance:
            reason = f"host {report.index} is silent, and the slice is in maintenance"
            reason += f" ({maintenance})"
            return after_preemption(job, placement, reason, now, observations.steps)
        message = f"no report from host {report.index} for {format_duration(silence)}"
        if report.contact is ContactFailure.PROXY and report.detail:
            message += f": {report.detail}"
        key_refused = report.contact is ContactFailure.KEY_REFUSED
        if report.contact in _CAUSES_HERE or (key_refused and may_run):
            # The host answers, or was not asked. The program continues there.
            side = "" if key_refused else "this machine cannot connect to it, "
            message += f": {side}{report.detail}"
        elif polled_since and silence > limit:
            if never_reached:
                return replace_unreachable(job, placement, reports, now)
            cause = Cause(
                EndReason.BAD_HOST,
                report.index,
                len(reports),
                message,
                report.tail,
                proof="" if report.contact in _NO_EVIDENCE else EvidenceType.START,
            )
            return replace_bad_host(job, placement, cause, observations, now, idle=False)
        return _wait_for_reports_and_poll(with_reason(job, message), placement)
    return None


_CAUSES_HERE = frozenset({ContactFailure.LOCAL, ContactFailure.MISSING_FILE})
"""Failures of this machine, which say nothing about a host."""
_NO_EVIDENCE = frozenset({ContactFailure.KEY_REFUSED, ContactFailure.PROXY})
"""Failures whose cause may be the host or this side. The slice is replaced, and no host blamed."""


def _silent_since(report: HostReport, observations: Observations) -> float | None:
    """Return when a host last reported, or when this server began to listen if that was later.

    A server that was stopped, or whose machine was asleep, received no reports in the meantime.
    """
    times = [t for t in (report.heard_at, observations.listening_since) if t is not None]
    return max(times, default=None)


# --- Failed hosts -----------------------------------------------------------------------------


def check_failures(
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
        # The host will be gone in a moment, whatever the cloud lists until then.
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
        return replace_bad_host(job, placement, cause, observations, now, idle=idle)
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


# --- No new steps -----------------------------------------------------------------------------


def check_steps(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision | None:
    """Stop a program that makes no more steps, so that it is started again."""
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
    # After a lost connection, a host reports again just before its newest heartbeat arrives.
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


# --- Helpers ----------------------------------------------------------------------------------


def _reported_and_polled_since(
    time: float, placement: Placement, observations: Observations
) -> bool:
    """Return True if every host has reported and the zone was polled after that time.

    A host whose program ended by itself has nothing to add.
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

    A host that rebooted sends messages before it reports that its program is gone. Until then the
    other hosts, which lost their connection to it, look like the cause.
    """
    if report.phase is HostPhase.CONNECTING or report.reported_at is not None:
        return report.reported_at
    return report.heard_at


def _wait_for_reports_and_poll(job: Job, placement: Placement) -> Decision:
    effects = (Effect(EffectType.RUN, placement), Effect(EffectType.POLL, placement))
    return Decision(job, effects=effects)


def _stop(job: Job, placement: Placement, cause: Cause, reason: str) -> Decision:
    attempt = replace(current_attempt(job), stopping=True)
    job = with_reason(replace(job, attempt=attempt, cause=cause), reason)
    return Decision(job, effects=(Effect(EffectType.STOP, placement),))
