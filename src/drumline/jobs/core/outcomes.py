"""The end of an attempt or a job: the counts, and the slices to release or to hold back. Pure.

`lifecycle` and `diagnosis` find out what happened. This module decides what follows.

A slice with a bad host may be held back instead of released, because the cloud often grants a
released slice again within minutes, with the same bad host. Held-back slices cost as much as
others. So their number is limited, and they are released once the program runs elsewhere or no
other slice is available.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.reasons import END_RULES, EndReason, EventType
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
from drumline.jobs.core.steps import Steps
from drumline.observed import ContactFailure, Fault, FaultType, HostPhase, HostReport

BACKOFF_LIMIT = 60.0
RETRY_LIMIT = 120.0
"""The most seconds between two refused requests. It is short, so that a job notices soon when a
user renews an expired login."""
MAX_DOUBLINGS = 10
REJECTIONS_PER_HELD_BACK = 3
"""Rejected slices in a row for each slice that a job holds back without `parking` in its job file.
The cloud often grants a returned slice again at once: such a job was granted the same excluded host
a hundred times."""
MAX_HELD_BACK = 4
"""The most slices that a job holds back without `parking` in its job file."""


# --- The end of an attempt --------------------------------------------------------------------


def after_stop(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Decide what follows once the program was stopped on all hosts because of `job.cause`."""
    if not observations.stopped:
        return Decision(job, effects=(Effect(EffectType.STOP, placement),))
    cause = job.cause
    assert cause is not None
    if cause.kind is EndReason.MOVED:
        return _leave_for_cheaper_slices(job, placement, cause.error)
    if END_RULES[cause.kind].counts is None:
        return _restart_uncounted(job, cause.kind, now, timeouts)
    dead = all(r.phase in {HostPhase.EXITED, HostPhase.FAILED} for r in observations.reports)
    return _after_failure(job, placement, cause, now, timeouts, dead=dead)


def _restart_uncounted(job: Job, reason: EndReason, now: float, timeouts: Timeouts) -> Decision:
    """Start the program again after an exit that is no failure; back off if it exited quickly.

    On a slice that is being preempted, `diagnosis` waits for the preemption instead.
    """
    attempt = current_attempt(job)
    began_at = attempt.started_at if attempt.running_at is None else attempt.running_at
    departures = 1 if now - began_at > BACKOFF_LIMIT else job.departures + 1
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


def _leave_for_cheaper_slices(job: Job, placement: Placement, message: str) -> Decision:
    """Release the slices of a program that was stopped to continue on cheaper ones.

    If those were lost meanwhile, the program starts again on the slices that it has.
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


def _after_failure(
    job: Job, placement: Placement, cause: Cause, now: float, timeouts: Timeouts, *, dead: bool
) -> Decision:
    """Count a failure. Start the program again, or end the job if the allowance is used up.

    `dead` says that the program has ended on every host. Only then are the slices kept for a
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
    """Return the job after one more loss of slices that were not ready, with a longer backoff."""
    refusals = job.refusals + 1
    return replace(job, refusals=refusals, not_before=now + retry_pause(refusals, timeouts.retry))


def retry_pause(repetition: int, first: float) -> float:
    """Return the pause before a repetition, which doubles each time up to `RETRY_LIMIT`."""
    return min(RETRY_LIMIT, first * 2.0 ** min(repetition - 1, MAX_DOUBLINGS))


def reject_placement(
    job: Job, placement: Placement, reason: str, now: float, first_pause: float
) -> Decision:
    """Reject slices with an excluded host. The attempt continues on other slices.

    The pause before the next request is `first_pause` seconds, doubled each time: if all machines
    of a zone are excluded, the cloud can only grant them again.
    """
    rejections = job.turned_down + 1
    job = replace(job, turned_down=rejections)
    # No host starts the program before all hosts are admitted, so the slices are idle.
    job, effects, events = _release_or_hold_back(job, placement, reason, idle=True)
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
    observations: Observations,
    now: float,
    *,
    idle: bool,
) -> Decision:
    """Release or hold back the slices with a bad host, and request others.

    Consecutive bad hosts use up an allowance if the program may be the cause: if a program failed
    to start, or if a training step was not reproducible on chips that had just passed a burn-in. A
    chip that was measured to be wrong does not count. If many hosts fail at once, every one counts,
    because other slices would be no better.

    `idle` says that the program has ended on every host.
    """
    mass_failure = observations.mass_failure
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
    job, effects, held_back = _release_or_hold_back(job, placement, text, idle=idle)
    job = with_reason(job, f"{text}; slice being replaced", Status.WAITING)
    return Decision(job, effects, (*events, *held_back), ended)


def _host_fields(cause: Cause, placement: Placement) -> dict[str, str | float | None]:
    """Return the fields of an event about one host."""
    return {"host": cause.host, "hosts": cause.hosts, "error": cause.error, "zone": placement.zone}


OTHER_SLICES = 2
"""Slices that a job tries after a start that failed because of the host or of the program."""


def record_ambiguous_start(job: Job, cause: Cause, machine: str) -> Job:
    """Return the job with one more machine on which it failed to start with this error."""
    machines = job.unclear_on if cause.words == job.unclear_words else ()
    if machine not in machines:
        machines = (*machines, machine)
    return replace(job, unclear_words=cause.words, unclear_on=machines)


def is_fault_of_program(job: Job) -> bool:
    """Return True if the program is the cause of its ambiguous starts.

    The same error on two machines is the program's. So are different ones on every slice tried.
    """
    return len(job.unclear_on) > 1 or job.unclear_starts >= OTHER_SLICES


def replace_after_ambiguous_start(
    job: Job, placement: Placement, cause: Cause, *, idle: bool
) -> Decision:
    """Try another slice after a start that failed because of the host or of the program.

    Nothing is counted, and no host is blamed.
    """
    text = f"host {cause.host} of {cause.hosts}: {cause.error}"
    ended = (EndedAttempt(current_attempt(job), EndReason.AMBIGUOUS_START, text, cause),)
    fields = _host_fields(cause, placement)
    events = (Event(EventType.UNCLEAR, f"{text}; trying another slice", fields),)
    job = replace(job, unclear_starts=job.unclear_starts + 1, attempt=None, cause=cause)
    job, effects, held_back = _release_or_hold_back(job, placement, text, idle=idle)
    job = with_reason(job, f"{text}; trying another slice", Status.WAITING)
    return Decision(job, effects, (*events, *held_back), ended)


class Advice(NamedTuple):
    """The text for a failure of every first contact, and the slices that a job tries with it."""

    reason: str
    change: str
    slices: int


FIRST_CONTACT_ADVICE = {
    ContactFailure.KEY_REFUSED: Advice(
        "the hosts reject Drumline's SSH key",
        "with OS Login, a host ignores the keys in its metadata: turn it off for these VMs "
        "(enable-oslogin=FALSE), or ask who enforces it by a policy of the organization",
        slices=1,
    ),
    ContactFailure.NO_ADDRESS: Advice(
        "the hosts have no external address, and their internal ones do not answer",
        "give them external addresses, run Drumline inside their network, or connect through IAP "
        "with ssh.proxy_command",
        slices=1,
    ),
    ContactFailure.PROXY: Advice(
        "the proxy command makes no connection",
        "correct ssh.proxy_command",
        slices=1,
    ),
    ContactFailure.TIMEOUT: Advice(
        "connections to port 22 time out",
        "allow TCP port 22 from this machine in the firewall of the hosts' network, or connect "
        "through IAP with ssh.proxy_command",
        slices=2,
    ),
    ContactFailure.UNREACHABLE: Advice(
        "there is no route to the hosts",
        "check the network of this machine and the addresses of the hosts, or connect through IAP "
        "with ssh.proxy_command",
        slices=2,
    ),
    ContactFailure.REFUSED: Advice(
        "the hosts refuse connections to port 22",
        "check that the image and the startup script leave sshd running on port 22",
        slices=2,
    ),
    ContactFailure.CLOSED: Advice(
        "connections to port 22 are closed before the login",
        "check for a firewall or proxy between this machine and the hosts, and that sshd of the "
        "image accepts connections",
        slices=2,
    ),
}
"""The failures of connections that say nothing against a single host if every host has one. A new
slice has the same keys and the same kind of address, but a time-out may also be an outage."""
UNREACHED_AFTER_CONTACT = 3
"""Consecutive slices without any contact after which a job ends that has reached hosts before."""


def replace_unreachable(
    job: Job, placement: Placement, reports: Sequence[HostReport], now: float
) -> Decision:
    """Try another slice after one of which no host was reached, or end the job with the reason.

    No host is blamed, because the cause is the network or the login.
    """
    failures = [report.contact for report in reports if report.contact is not None]
    failure = max(failures, key=failures.count)
    advice, cause = FIRST_CONTACT_ADVICE[failure], FIRST_CONTACT_ADVICE[failure].reason
    if failure is ContactFailure.PROXY:
        # The user's own command has the reason.
        cause = next((r.detail for r in reports if r.contact is failure and r.detail), cause)
    unreached = job.unreached + 1
    job = replace(job, unreached=unreached)
    reason = f"no host of the slice could be reached over SSH: {cause}"
    # A job of an earlier version has run without `reached`.
    slices = UNREACHED_AFTER_CONTACT if job.reached or job.has_run else advice.slices
    if unreached >= slices:
        return end_unreachable(job, placement, f"{reason}; {advice.change}", now)
    ended = EndedAttempt(current_attempt(job), EndReason.UNREACHABLE, reason)
    job = replace(job.drop(placement), attempt=None, cause=None)
    return Decision(
        with_reason(job, f"{reason}; trying another slice", Status.WAITING),
        effects=(Effect(EffectType.RELEASE, placement, reason),),
        events=(Event(EventType.UNREACHABLE, reason),),
        ended=(ended,),
    )


def end_unreachable(job: Job, placement: Placement, reason: str, now: float) -> Decision:
    """End a job whose hosts cannot be reached until the user changes something."""
    return finish_job(
        replace(job.drop(placement), cause=None),
        Status.FAILED,
        reason,
        now,
        effects=(Effect(EffectType.RELEASE, placement, "its hosts cannot be reached"),),
        ended=(EndedAttempt(current_attempt(job), EndReason.UNREACHABLE, reason),),
    )


def after_preemption(
    job: Job, placement: Placement, reason: str, now: float, steps: Steps | None = None
) -> Decision:
    """Release slices that were lost through no fault of the program, and request others."""
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
    """Return the current attempt as ended by the user; empty if there is none."""
    return (EndedAttempt(job.attempt, EndReason.CANCELLED, ""),) if job.attempt else ()


def after_internal_error(job: Job, message: str, now: float) -> Decision:
    """End a job that Drumline itself cannot handle. Its checkpoints and logs stay for a resume."""
    release = tuple(Effect(EffectType.RELEASE, placement, message) for placement in job.placements)
    attempt = job.attempt
    ended = (EndedAttempt(attempt, EndReason.INTERNAL_ERROR, message),) if attempt else ()
    job = replace(job, placements=(), kept_until=None)
    if job.status.ended:
        return Decision(job, release, (Event(EventType.RELEASED, message),))
    return finish_job(job, Status.FAILED, message, now, effects=release, ended=ended)


# --- The running program ----------------------------------------------------------------------


def record_burn_in(
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


RUN_SECONDS = 600.0
"""Seconds after which a program without steps counts as started."""


def mark_running(job: Job, observations: Observations, now: float) -> Job:
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

    A program whose host was found bad in the middle of a training makes steps each time and may
    fail each time. Then only a new checkpoint counts.
    """
    failed_in_training = job.cause is not None and job.cause.proof == EvidenceType.REPLAY
    return steps is not None and (steps.saved_at is not None or not failed_in_training)


# --- The end of a job -------------------------------------------------------------------------


def release_for_user(
    job: Job, placement: Placement, observations: Observations, now: float
) -> Decision:
    """Release the slices of a cancelled or deleted job, and end it.

    If a program may still run on them, or on earlier ones, the job ends once all are gone.
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


# --- Slices held back -------------------------------------------------------------------------


def _release_or_hold_back(
    job: Job, placement: Placement, reason: str, *, idle: bool
) -> tuple[Job, tuple[Effect, ...], tuple[Event, ...]]:
    """Return the job without its slices, which are held back if the limit allows, else released.

    Slices that may still run the program are not `idle` and are always released. The next attempt
    waits until released slices are gone, but not for held-back ones, and two programs would write
    to the same checkpoints.
    """
    limit = job.parking
    if limit is None:
        limit = min(job.turned_down // REJECTIONS_PER_HELD_BACK, MAX_HELD_BACK)
    if not idle or len(job.held_back) >= limit:
        return job.drop(placement), (Effect(EffectType.RELEASE, placement, reason),), ()
    job = job.put(replace(placement, role=PlacementRole.HELD_BACK))
    where = f"{placement.chips} chips in {placement.zone}"
    return job, (), (Event(EventType.PARKED, f"{placement.name} ({where}) until another runs"),)


def release_unneeded(decision: Decision, observations: Observations) -> Decision:
    """Add the release of requests and held-back slices that the job no longer needs.

    Other requests are kept until every host of the active slices has answered, and held-back slices
    until the program runs.
    """
    job = decision.job
    if job.status.ended:
        decision = release_requests(decision, "the job is over")
        return _release_all_held_back(decision, "the job is over")
    # A server that has just started has no reports yet, and all() of none is True.
    reports = observations.reports
    answered = reports and all(report.heard_at is not None for report in reports)
    started = job.attempt is not None and job.attempt.running_at is not None
    # Later requests of a running program are for cheaper slices.
    if job.active and job.wish is not DesiredState.RUN:
        decision = release_requests(decision, "no longer wanted")
    elif job.active and answered and not (started and job.migrates):
        decision = release_requests(decision, f"the slice in {job.active.zone} answered first")
    if started and reports and all(_is_working(report) for report in reports):
        return _release_all_held_back(decision, "the program runs elsewhere")
    return decision


def release_requests(decision: Decision, reason: str) -> Decision:
    """Add the release of all requests whose slices are not active."""
    requests = decision.job.requests
    if not requests:
        return decision
    return decision.then(
        Decision(
            decision.job.drop(*requests),
            effects=tuple(Effect(EffectType.RELEASE, request, reason) for request in requests),
        )
    )


def release_if_blocking(decision: Decision, fault: Fault) -> Decision:
    """Add the release of held-back slices if a refused request suggests that they are in the way.

    Held-back slices use up quota, perhaps all of it. And if every candidate is out of capacity,
    they would cost money for as long as that lasts.
    """
    job = decision.job
    tried_all = job.next_choice == 0 and not job.requests and fault.kind is FaultType.STOCKOUT
    if (fault.kind is FaultType.QUOTA and not job.requests) or tried_all:
        return release_held_back(decision)
    return decision


def release_held_back(decision: Decision) -> Decision:
    """Add the release of held-back slices, because the cloud grants no others."""
    return _release_all_held_back(decision, "no other slice is available")


def release_while_waiting(decision: Decision, now: float, timeouts: Timeouts) -> Decision:
    """Add the release of held-back slices if the job waits for a deletion and one of them is old.

    Some deletions never end, and held-back slices would cost money for as long. Before, they stay,
    so that the next request is not granted the same host again.
    """
    granted_at = [slices.ready_at or slices.asked_at for slices in decision.job.held_back]
    if not any(now - at > timeouts.deleting for at in granted_at):
        return decision
    return _release_all_held_back(decision, "the job waits for another slice to be deleted")


def _is_working(report: HostReport) -> bool:
    """Return True if a host runs the program or has finished it, and passed its burn-in."""
    finished = report.phase is HostPhase.EXITED and report.exit_code == 0
    working = finished or report.phase is HostPhase.RUNNING
    return working and report.burn_in in {"", "pass", "warn"}


def _release_all_held_back(decision: Decision, reason: str) -> Decision:
    job = decision.job
    held_back = job.held_back
    if not held_back:
        return decision
    effects = tuple(
        Effect(EffectType.RELEASE, placement, f"held back; {reason}") for placement in held_back
    )
    slices = "1 held-back slice" if len(held_back) == 1 else f"{len(held_back)} held-back slices"
    event = Event(EventType.RELEASED, f"{slices} released: {reason}")
    return decision.then(Decision(job.drop(*held_back), effects, (event,)))


# --- Helpers ----------------------------------------------------------------------------------


def with_reason(job: Job, reason: str, status: Status | None = None) -> Job:
    """Return the job with this reason and status. A job that ran before recovers, not starts."""
    if status in {Status.WAITING, Status.STARTING} and job.has_run:
        status = Status.RECOVERING
    status = status or job.status
    # Usually nothing changes, and every round calls this for a thousand waiting jobs.
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
