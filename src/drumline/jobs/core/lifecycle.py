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
from drumline.jobs.core.host_history import EvidenceKind
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
    release_held_back,
    release_if_blocking,
    release_when_unneeded,
    release_while_waiting,
    replace_bad_host,
    with_backoff,
    with_reason,
)
from drumline.jobs.core.outputs import copy_outputs
from drumline.jobs.core.refusals import RefusalAction, action_for, leaves_candidate
from drumline.jobs.core.state import (
    Attempt,
    Candidate,
    Cause,
    CauseKind,
    Decision,
    DesiredState,
    Effect,
    EffectKind,
    EndedAttempt,
    Event,
    Job,
    Observations,
    Outcome,
    Placement,
    PlacementObservation,
    PlacementPhase,
    Status,
    Timeouts,
    ZoneStatus,
)
from drumline.observed import (
    Fault,
    FaultKind,
    HostPhase,
    HostReport,
    PlacementState,
    Refusal,
    Scope,
    with_words,
)


def decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    """Return the next state of a job, its effects and events; the same job if nothing changes."""
    decision = _decide(job, observations, now, timeouts)
    decision = copy_outputs(job, decision, observations, now, timeouts)
    return release_when_unneeded(decision, observations)


def _decide(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    placement = job.placement
    ready = placement is not None and placement.phase is PlacementPhase.READY
    if job.wish is DesiredState.RESTART and not ready:
        return resume_job(job)
    if placement is None:
        return _decide_without_placement(job, observations, now, timeouts)
    if job.status.ended:
        return _keep_for_resume(job, placement, observations, now)
    if placement.phase is PlacementPhase.REQUESTING:
        return _repeat_request(job, placement, observations, now)
    if ready:
        return _decide_on_slices(job, placement, observations, now, timeouts)
    return _wait_for_slices(job, placement, observations, now, timeouts)


# --- No placement -----------------------------------------------------------------------------


def _decide_without_placement(
    job: Job, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    if job.status.ended:
        return Decision(job)
    if job.wish is not DesiredState.RUN:
        if observations.old_program_may_run:
            attempt, unreached = job.attempt, ""
            if attempt is not None and attempt.unconfirmed_at is not None:
                unreached = "a host cannot be reached, "
            reason = f"stopping: {unreached}waiting for its slice to be deleted"
            return release_while_waiting(Decision(with_reason(job, reason)), now, timeouts)
        return finish_job(job, Status.CANCELLED, "cancelled", now, ended=cancelled_attempt(job))
    if now < job.not_before:
        return Decision(job)
    if observations.old_program_may_run:
        reason = "waiting for the previous slice to be deleted"
        return release_while_waiting(Decision(with_reason(job, reason)), now, timeouts)
    candidates = [*job.choices[job.next_choice :], *job.choices[: job.next_choice]]
    for candidate in candidates:
        if observations.zones.get(candidate, ZoneStatus()).open:
            return _request(job, candidate, now)
    zones = dict.fromkeys(observations.zones[candidate] for candidate in job.choices)
    reasons = dict.fromkeys(zone.reason for zone in zones)
    reason = "; ".join(filter(None, reasons)) or "no zone is open"
    # The words of several zones would fill the screen. Each refusal is an event with its words.
    words = next(iter(zones)).words if len(zones) == 1 else ""
    return Decision(with_reason(job, with_words(reason, words)))


def _request(job: Job, candidate: Candidate, now: float) -> Decision:
    """Request slices from the cloud, and begin an attempt if none is in progress."""
    request_number = job.asks + 1
    placement = Placement(
        name=f"dl-{job.owner}-{job.id}-{request_number}",
        zone=candidate.zone,
        accelerator=candidate.accelerator,
        hosts=candidate.hosts * job.slices,
        asked_at=now,
        slices=job.slices,
    )
    attempts = job.attempts if job.attempt else job.attempts + 1
    job = replace(
        job,
        asks=request_number,
        attempts=attempts,
        attempt=job.attempt or Attempt(attempts, started_at=now),
        next_choice=job.choices.index(candidate),
        placement=placement,
    )
    text = f"{candidate.accelerator} in {candidate.zone}"
    return Decision(
        with_reason(job, f"requesting {text}", Status.WAITING),
        effects=(Effect(EffectKind.REQUEST, placement),),
        events=(Event("asked", text),),
    )


# --- Requested, not ready ---------------------------------------------------------------------


def _repeat_request(
    job: Job, placement: Placement, observations: Observations, now: float
) -> Decision:
    if job.wish is not DesiredState.RUN:
        return release_for_user(job, placement, observations, now)
    if now < job.not_before:
        return Decision(job)
    return Decision(job, effects=(Effect(EffectKind.REQUEST, placement),))


def request_accepted(job: Job, now: float, operation: str = "") -> Job:
    """Return the job after the cloud accepted its request. Its `operation` may still fail."""
    placement = job.placement
    if placement is None or placement.phase is not PlacementPhase.REQUESTING:
        return job
    placement = replace(
        placement, phase=PlacementPhase.QUEUED, accepted_at=now, operation=operation
    )
    return replace(job, placement=placement)


def request_refused(job: Job, refusal: Refusal, now: float, timeouts: Timeouts) -> Decision:
    """Decide what follows after the cloud refused a request."""
    placement = job.placement
    if placement is None or placement.phase is not PlacementPhase.REQUESTING:
        return Decision(job)
    refused = with_backoff(job, now, timeouts)
    stays = _after_repetitions(refused, refusal.fault).next_choice == job.next_choice
    if action_for(refusal.fault) is RefusalAction.RETRY and stays:
        # Nothing exists in the cloud, so the same request is repeated under the same name.
        events = (Event("waiting", refusal.text),) if refused.refusals == 1 else ()
        decision = Decision(with_reason(refused, refusal.text), events=events)
        return release_if_blocking(decision, refusal.fault)
    decision = _drop_refused_placement(job, placement, refusal, now, timeouts)
    return release_when_unneeded(decision, Observations())


def _drop_refused_placement(
    job: Job, placement: Placement, refusal: Refusal, now: float, timeouts: Timeouts
) -> Decision:
    """Drop a request that yields no slices: delete it in the cloud and decide what follows."""
    fault, text = refusal.fault, refusal.text
    release = Effect(EffectKind.RELEASE, placement, refusal.message)
    match action_for(fault):
        case RefusalAction.NEXT_CANDIDATE:
            decision = _try_next_candidate(job, placement, refusal.message, refusal.words)
            return release_if_blocking(decision, fault)
        case RefusalAction.RETRY:
            job = with_backoff(replace(job, placement=None), now, timeouts)
            decision = Decision(
                with_reason(_after_repetitions(job, fault), text, Status.WAITING),
                effects=(release,),
                events=(Event("waiting", text),),
            )
            return release_if_blocking(decision, fault)
        case RefusalAction.PREEMPTION:
            # Back off, because the cloud may preempt every slice before it is ready.
            job = _after_repetitions(with_backoff(job, now, timeouts), fault)
            return after_preemption(job, placement, text, now)
        case RefusalAction.GIVE_UP:
            return finish_job(
                replace(job, placement=None),
                Status.FAILED,
                text,
                now,
                effects=(release,),
                ended=(EndedAttempt(current_attempt(job), Outcome.REFUSED, text),),
            )


def _after_repetitions(job: Job, fault: Fault) -> Job:
    """Return the job with its next candidate if repeating the request did not help."""
    if not leaves_candidate(fault, job.refusals):
        return job
    return replace(job, next_choice=(job.next_choice + 1) % len(job.choices))


def _wait_for_slices(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    if job.wish is not DesiredState.RUN:
        return release_for_user(job, placement, observations, now)
    observation = observations.placement
    if observation is None:
        return Decision(job)
    listed, lost_reason = observation.listed, observation.lost_reason
    if listed is None or lost_reason is not None:
        refusal = observation.refusal or (listed.refusal if listed else None)
        if listed is None and refusal is None and _may_appear(placement, observation, timeouts):
            return Decision(job)
        if listed is None and refusal is None and observation.creating:
            # Nothing shows that there ever was a slice that the cloud could preempt.
            accepted_for = format_duration(now - _accepted_at(placement))
            reason = f"slice in {placement.zone} is still not created after {accepted_for}"
            return _try_next_candidate(job, placement, reason)
        preemption = Refusal(Fault(FaultKind.PREEMPTED, Scope.ZONE), lost_reason or "")
        return _drop_refused_placement(job, placement, refusal or preemption, now, timeouts)
    if listed.state is PlacementState.READY and len(listed.endpoints) == placement.hosts:
        return _run_on_ready_slices(job, placement, now)
    if listed.state is not PlacementState.QUEUED:
        since = observation.at if placement.booting_at is None else placement.booting_at
        if observation.at - since > timeouts.booting:
            # Such a slice may stay so for days, and uses quota.
            ready = listed.state is PlacementState.READY
            state = f"{listed.cloud_state} without all addresses" if ready else listed.cloud_state
            boot_time = format_duration(observation.at - since)
            reason = f"slice in {placement.zone} is still {state} after {boot_time}"
            return _try_next_candidate(job, placement, reason)
        placement = replace(placement, phase=PlacementPhase.BOOTING, booting_at=since)
        job = replace(job, placement=placement)
        return Decision(with_reason(job, f"slice is booting in {placement.zone}", Status.STARTING))
    waited = now - placement.asked_at
    requested = Candidate(placement.accelerator, placement.zone)
    other_candidate_open = any(
        status.open for candidate, status in observations.zones.items() if candidate != requested
    )
    reason = f"no capacity in {placement.zone} for {format_duration(waited)}"
    if waited > timeouts.waiting and other_candidate_open:
        return _try_next_candidate(job, placement, reason)
    position = f"zone {job.next_choice + 1} of {len(job.choices)} · " if job.next_choice else ""
    decision = Decision(with_reason(job, position + reason, Status.WAITING))
    return release_held_back(decision) if waited > timeouts.waiting else decision


def _may_appear(
    placement: Placement, observation: PlacementObservation, timeouts: Timeouts
) -> bool:
    """Return True if a request that the cloud does not have may still appear there."""
    limit = timeouts.booting if observation.creating else timeouts.visible
    return observation.at - _accepted_at(placement) <= limit


def _accepted_at(placement: Placement) -> float:
    return placement.asked_at if placement.accepted_at is None else placement.accepted_at


def _run_on_ready_slices(job: Job, placement: Placement, now: float) -> Decision:
    placement = replace(placement, phase=PlacementPhase.READY, ready_at=now)
    job = replace(job, placement=placement, refusals=0)
    hosts = "1 host" if placement.hosts == 1 else f"{placement.hosts} hosts"
    text = f"{hosts}, {placement.chips} chips in {placement.zone}"
    return Decision(
        with_reason(job, "connecting to the hosts", Status.STARTING),
        effects=(Effect(EffectKind.RUN, placement),),
        events=(Event("slice", text),),
    )


def _try_next_candidate(job: Job, placement: Placement, reason: str, words: str = "") -> Decision:
    """Request the next candidate within the same attempt."""
    next_choice = (job.next_choice + 1) % len(job.choices)
    job, text = replace(job, placement=None, next_choice=next_choice), with_words(reason, words)
    return Decision(
        with_reason(job, text, Status.WAITING),
        effects=(
            Effect(EffectKind.NO_CAPACITY, placement, reason, words),
            Effect(EffectKind.RELEASE, placement, reason),
        ),
        events=(Event("waiting", text),),
    )


# --- On slices that are ready -----------------------------------------------------------------


def _decide_on_slices(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    if job.attempt is not None and job.attempt.succeeded:
        return _finish_succeeded(job, placement, job.attempt, now)
    lost_reason = observations.placement.lost_reason if observations.placement else None
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
        return decision or Decision(job, effects=(Effect(EffectKind.RUN, placement),))
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
        cause = Cause(CauseKind.BAD_HOST, answering[0], hosts, message, proof=EvidenceKind.START)
        return replace_bad_host(job, placement, cause, observations, now, idle=False)
    return Decision(job, effects=(Effect(EffectKind.STOP, placement),))


def _answers(host: int, observations: Observations, now: float, timeouts: Timeouts) -> bool:
    """Return True if a host reports, so that its silence is no reason for a stop without effect."""
    heard_at = observations.reports[host].heard_at
    return heard_at is not None and now - heard_at <= timeouts.silence


def _start_or_continue(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Follow the hosts from the upload of the code to the running program."""
    attempt, reports = current_attempt(job), observations.reports
    run = (Effect(EffectKind.RUN, placement),)
    if attempt.sent_at is None and all(_has_code(report) for report in reports):
        job = replace(job, attempt=replace(attempt, sent_at=now))
        return Decision(job, effects=run, events=(Event("code", ""),))
    if not all(r.phase in {HostPhase.RUNNING, HostPhase.EXITED} for r in reports):
        slowest = min(reports, key=lambda r: (_PHASE_ORDER[r.phase], r.index))
        reason = f"host {slowest.index}: {slowest.detail or slowest.phase.value}"
        return Decision(with_reason(job, reason, Status.STARTING), effects=run)
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
        events=(Event("run", f"attempt {attempt.number}"),),
    )
    return record_burn_in(decision, placement, reports)


def _has_code(report: HostReport) -> bool:
    """Return True if a host has received the code."""
    if report.phase in {HostPhase.READY, HostPhase.RUNNING, HostPhase.EXITED}:
        return True
    return report.phase is HostPhase.PREPARING and report.detail.startswith("setup")


_PHASE_ORDER = {phase: index for index, phase in enumerate(HostPhase)}


def _finish_succeeded(job: Job, placement: Placement, attempt: Attempt, now: float) -> Decision:
    return finish_job(
        replace(job, placement=None, cause=None),
        Status.SUCCEEDED,
        "",
        now,
        effects=(Effect(EffectKind.RELEASE, placement, "the job is done"),),
        ended=(EndedAttempt(attempt, Outcome.SUCCEEDED, ""),),
    )


def _restart(job: Job, placement: Placement, now: float) -> Decision:
    """Begin a new attempt on the slices that the job still holds."""
    if now < job.not_before:
        return Decision(job)
    number = job.attempts + 1
    status = Status.RECOVERING if job.has_run else Status.STARTING
    job = replace(job, attempts=number, attempt=Attempt(number, started_at=now))
    return Decision(
        with_reason(job, "restarting on the same slice", status),
        effects=(Effect(EffectKind.RUN, placement),),
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
    return Decision(with_reason(job, reason), effects=(Effect(EffectKind.STOP, placement),))


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
    lost_reason = observations.placement.lost_reason if observations.placement else None
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
        replace(job, placement=None, reason=job_reason, kept_until=None),
        effects=(Effect(EffectKind.RELEASE, placement, release_reason),),
        events=(Event("released", f"slice in {placement.zone}: {release_reason}"),),
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

    Slices that do not fit the current job file are released.
    """
    placement, resumed = job.placement, reset_for_resume(job)
    ended = cancelled_attempt(job)
    if placement is None:
        return Decision(resumed, events=(Event("resumed", "on a new slice"),), ended=ended)
    if not placement_fits(job):
        return Decision(
            replace(resumed, placement=None),
            effects=(Effect(EffectKind.RELEASE, placement, "the job now requests another slice"),),
            events=(Event("resumed", "on a new slice"),),
            ended=ended,
        )
    state = "kept" if placement.phase is PlacementPhase.READY else "requested"
    event = Event("resumed", f"on the slice {state} in {placement.zone}")
    return Decision(resumed, events=(event,), ended=ended)


def placement_fits(job: Job) -> bool:
    """Return True if the placement of a job is one of those that its job file requests."""
    placement = job.placement
    if placement is None or placement.slices != job.slices:
        return False
    return Candidate(placement.accelerator, placement.zone) in job.choices


# --- Clocks -----------------------------------------------------------------------------------


def adapt_times(job: Job, now: float) -> Job:
    """Adapt the times of a saved job to a new server, because the wall clock may have been set.

    Past events are limited to `now`, and deadlines to their longest delay: otherwise a backoff of
    seconds could last hours. Waits begin again: otherwise they could be over at once, and a request
    would count as preempted, or a host as bad.
    """
    placement, attempt = job.placement, job.attempt
    if placement is not None:
        queued = placement.phase is PlacementPhase.QUEUED
        placement = replace(
            placement,
            asked_at=min(placement.asked_at, now),
            accepted_at=now if queued else _at_most(placement.accepted_at, now),
            booting_at=None if placement.booting_at is None else now,
            ready_at=_at_most(placement.ready_at, now),
        )
    if attempt is not None:
        attempt = replace(
            attempt,
            started_at=min(attempt.started_at, now),
            running_at=_at_most(attempt.running_at, now),
            failed_at=None if attempt.failed_at is None else now,
            stuck_at=None if attempt.stuck_at is None else now,
            unconfirmed_at=None if attempt.unconfirmed_at is None else now,
            outputs_since=None if attempt.outputs_since is None else now,
        )
    times = (job.not_before, job.kept_until)
    in_past = all(time is None or time <= now for time in times)
    if in_past and (placement, attempt) == (job.placement, job.attempt):
        return job  # the usual case; a server may start with thousands of jobs
    return replace(
        job,
        placement=placement,
        attempt=attempt,
        not_before=min(job.not_before, now + RETRY_LIMIT),
        kept_until=_at_most(job.kept_until, now + _keep_seconds(job)),
    )


def _at_most(time: float | None, limit: float) -> float | None:
    return None if time is None else min(time, limit)
