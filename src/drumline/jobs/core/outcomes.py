"""How an attempt ends, and with it sometimes the job: what is counted, kept and released. Pure.

`lifecycle` and `diagnosis` find out what happened; this module says what follows from it.
"""

from dataclasses import replace

from drumline.jobs.core.host_history import Proof
from drumline.jobs.core.state import (
    Attempt,
    Cause,
    Decision,
    Effect,
    EffectKind,
    Ended,
    Event,
    Job,
    Outcome,
    Placement,
    Seen,
    Status,
    Thresholds,
)
from drumline.jobs.core.steps import Steps
from drumline.observed import Fault, FaultKind, HostPhase, HostReport

DEPARTURES = {
    "go on later": "the program saved its work and left",
    "told to end": "the program was ended by a SIGTERM that Drumline did not send",
}
"""Causes that are not failures: the program is started again and nothing is counted."""
_BACKOFF_LIMIT = 60.0
RETRY_LIMIT = 120.0
"""The most seconds between two refused requests: a user who renews an expired login should not
wait long until that is noticed."""


def after_stop(job: Job, held: Placement, seen: Seen, now: float, patience: Thresholds) -> Decision:
    """The program was stopped on all hosts because of `job.cause`: start it again, or give up."""
    if not seen.stopped:
        return Decision(job, effects=(Effect(EffectKind.STOP, held),))
    assert job.cause is not None
    if job.cause.kind in DEPARTURES:
        return _left(job, DEPARTURES[job.cause.kind], now, patience)
    return _failed(job, held, job.cause, now, patience)


def _left(job: Job, how: str, now: float, patience: Thresholds) -> Decision:
    """The program exited to be started again. That is no failure, but quick exits are backed off.

    On a slice that is being preempted this is never reached: `diagnosis` waits for the host to go.
    """
    attempt = attempt_of(job)
    began = attempt.started_at if attempt.running_at is None else attempt.running_at
    departures = 1 if now - began > _BACKOFF_LIMIT else job.departures + 1
    again = replace(
        job,
        attempt=None,
        cause=None,
        departures=departures,
        not_before=now + _backoff(departures, patience),
    )
    return Decision(
        note(again, f"{how}; starting again", Status.RECOVERING),
        events=(Event("left", f"{how}; starting it again"),),
        ended=(Ended(attempt, Outcome.LEFT, how),),
    )


def _failed(job: Job, held: Placement, cause: Cause, now: float, patience: Thresholds) -> Decision:
    where = f"{cause.kind} on host {cause.host} of {cause.hosts}: {cause.error}"
    outcome = Outcome.PROGRAM_FAILED
    if cause.kind == "set-up failed":
        outcome = Outcome.SETUP_FAILED
    if cause.kind == "stuck":
        where, outcome = f"stuck: {cause.error}", Outcome.STUCK
    ended = Ended(attempt_of(job), outcome, where, cause)
    failures = job.failures + 1
    counted = replace(job, attempt=None, failures=failures)
    if job.allowance.failures is not None and failures > job.allowance.failures:
        times = "1 failure" if failures == 1 else f"{failures} failures"
        whose = "set-up" if outcome is Outcome.SETUP_FAILED else "program"
        return finish(
            replace(counted, placement=None),
            Status.FAILED,
            f"{times}{'' if failures == 1 else ', the last'} of the {whose}; {where}",
            now,
            effects=(Effect(EffectKind.RELEASE, held, "the job failed"),),
            events=(Event("failed", where),),
            ended=(ended,),
        )
    backing_off = replace(counted, not_before=now + _backoff(failures, patience))
    again = f"{where}; starting again"
    event = Event("stuck", again) if outcome is Outcome.STUCK else Event("failed", where)
    return Decision(note(backing_off, again, Status.RECOVERING), events=(event,), ended=(ended,))


def _backoff(times: int, patience: Thresholds) -> float:
    return min(_BACKOFF_LIMIT, patience.rest * 2.0 ** min(times - 1, 10))


def backed_off(job: Job, now: float, patience: Thresholds) -> Job:
    """The job after one more refused request in a row: the next is made after a longer backoff."""
    refusals = job.refusals + 1
    pause = min(RETRY_LIMIT, patience.retry * 2.0 ** min(refusals - 1, 10))
    return replace(job, refusals=refusals, not_before=now + pause)


def turn_down(job: Job, held: Placement, why: str, now: float, first: float) -> Decision:
    """A host of the slice is known to be bad: the same attempt goes on with another slice.

    The pause before that is `first` seconds, doubled each time: where all machines are excluded,
    the cloud can only give them again.
    """
    times = job.turned_down + 1
    # No host starts before all of them are admitted.
    left, effects, events = let_go(job, held, why, idle=True)
    again = replace(
        left,
        next_choice=(job.next_choice + 1) % len(job.choices),
        turned_down=times,
        not_before=now + min(RETRY_LIMIT, first * 2.0 ** min(times - 1, 10)),
        attempt=Attempt(attempt_of(job).number, attempt_of(job).started_at),
    )
    turned = "" if times == 1 else f"; {times} slices in a row were refused"
    said = note(again, f"refused: {why}{turned}", Status.WAITING)
    return Decision(said, effects, (Event("refused", why), *events))


def bad_host(
    job: Job, held: Placement, cause: Cause, seen: Seen, now: float, *, idle: bool
) -> Decision:
    """A host is unusable: let go of the slice and ask for another.

    A chip that was measured to be wrong costs the job nothing. A start that failed may have been
    the program's fault, so in a row they use up an allowance, and so do steps that were not the
    same twice on chips that a burn-in has just found sound. Where many hosts fail at once
    (`mass_event`) every one counts: then another slice is no better. `idle` is a slice where the
    program has ended on every host.
    """
    mass_event = seen.mass_event
    measured = cause.proof == Proof.BURN_IN or (cause.proof == Proof.REPLAY and not held.proved)
    counts = bool(mass_event) or not measured
    in_a_row = job.bad_in_a_row + counts
    text = f"host {cause.host} of {cause.hosts}: {cause.error}"
    ended = (Ended(attempt_of(job), Outcome.BAD_HOST, text, cause),)
    counted = replace(
        job, bad_hosts=job.bad_hosts + 1, bad_in_a_row=in_a_row, attempt=None, cause=cause
    )
    events = (Event("badhost", text),)
    if job.allowance.bad_hosts is not None and in_a_row > job.allowance.bad_hosts:
        why = f"{in_a_row} bad hosts, the last: {text}"
        why += f"; {mass_event}" if mass_event else ""
        released = (Effect(EffectKind.RELEASE, held, text),)
        done = replace(counted, placement=None)
        return finish(done, Status.FAILED, why, now, released, events, ended)
    left, effects, parked = let_go(counted, held, text, idle=idle)
    recovering = note(left, f"{text}; slice being replaced", Status.RECOVERING)
    return Decision(recovering, effects, (*events, *parked), ended)


def preempted(
    job: Job, held: Placement, why: str, now: float, steps: Steps | None = None
) -> Decision:
    """The slice was lost, not by the program's fault: release it always, and ask for another."""
    preemptions = job.preemptions + 1
    ended = (Ended(attempt_of(job), Outcome.PREEMPTED, why),) if job.attempt else ()
    counted = replace(job, preemptions=preemptions, attempt=None, placement=None, cause=None)
    released = (Effect(EffectKind.RELEASE, held, why),)
    at = f"in {held.zone}: {why}" if steps is None else _place(steps)
    events = (Event("preempted", f"slice taken by the cloud {at}"),)
    if job.allowance.preemptions is not None and preemptions > job.allowance.preemptions:
        said = f"slice taken {preemptions} times"
        return finish(counted, Status.FAILED, said, now, released, events, ended)
    return Decision(
        note(counted, f"slice taken in {held.zone}", Status.RECOVERING), released, events, ended
    )


def _place(steps: Steps) -> str:
    """`at step 151 (checkpoint: step 150)`."""
    saved = "" if steps.checkpoint is None else f" (checkpoint: step {steps.checkpoint:,.0f})"
    if not saved and steps.tells_checkpoints:
        saved = " (no checkpoint yet)"
    return f"at step {steps.step:,.0f}{saved}"


def proved(started: Decision, held: Placement, reports: tuple[HostReport, ...]) -> Decision:
    """The start of a program, and where its hosts passed a burn-in before it, that too."""
    tested = [report for report in reports if report.examined]
    if held.proved or not tested:
        return started
    slowest = max(report.examined_seconds for report in tested)
    warned = [f"host {r.index}: {r.examined_said}" for r in tested if r.examined == "warn"]
    text = f"passed in {slowest:.0f} s" + (f", but {'; '.join(warned)}" if warned else "")
    sound = replace(started.job, placement=replace(held, proved=True))
    return replace(started, job=sound, events=(Event("burnin", text), *started.events))


def at_work(job: Job, seen: Seen) -> Job:
    """The job while its program runs on every host."""
    known = job
    if seen.steps is not None and not job.has_stepped:
        known = replace(known, has_stepped=True)
    if job.bad_in_a_row and _got_on(job, seen.steps):
        known = replace(known, bad_in_a_row=0)
    going = next((r for r in seen.hosts if r.going_down), None)
    reason = f"host {going.index} is going down: {going.going_down}" if going else ""
    return note(known, reason, Status.RUNNING)


def _got_on(job: Job, steps: Steps | None) -> bool:
    """Whether the program has got on since the last bad host, which is then no longer in a row.

    One that was accused in the middle of a training makes steps each time and may be accused each
    time: then only what it saved counts.
    """
    accused = job.cause is not None and job.cause.proof == Proof.REPLAY
    return steps is not None and (steps.saved_at is not None or not accused)


def give_up_slice(job: Job, wanted: Placement, now: float) -> Decision:
    """The user no longer wants a slice."""
    released = (Effect(EffectKind.RELEASE, wanted, "no longer wanted"),)
    gone = replace(job, placement=None)
    return finish(gone, Status.CANCELLED, "cancelled", now, effects=released, ended=cut_short(job))


def cut_short(job: Job) -> tuple[Ended, ...]:
    """The attempt under way, ended by the user."""
    return (Ended(job.attempt, Outcome.CANCELLED, ""),) if job.attempt else ()


def finish(
    job: Job,
    status: Status,
    reason: str,
    now: float,
    effects: tuple[Effect, ...] = (),
    events: tuple[Event, ...] = (),
    ended: tuple[Ended, ...] = (),
) -> Decision:
    """The job is over."""
    done = replace(job, status=status, reason=reason, attempt=None, ended_at=now, refusals=0)
    last = Event(status.value.lower(), reason)
    return Decision(done, effects, (*events, last), ended)


def note(job: Job, reason: str, status: Status | None = None) -> Job:
    """The job with a new status and reason; a job that ran before is recovering, not starting."""
    if status in {Status.WAITING, Status.STARTING} and job.has_run:
        status = Status.RECOVERING
    status = status or job.status
    # Mostly nothing is new, and this is called for a thousand waiting jobs in every round.
    if (reason, status) == (job.reason, job.status):
        return job
    return replace(job, reason=reason, status=status)


def attempt_of(job: Job) -> Attempt:
    """The attempt under way, or a stand-in for one that never began."""
    return job.attempt or Attempt(max(job.attempts, 1), started_at=job.created_at)


def in_minutes(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def let_go(
    job: Job, held: Placement, why: str, *, idle: bool
) -> tuple[Job, tuple[Effect, ...], tuple[Event, ...]]:
    """The job without the slice it holds: parked if there is room, else released.

    One where the program may still run is not `idle` and never parked: the next attempt waits until
    a released slice is gone, but not for a parked one, and two programs would write to the same
    checkpoints.
    """
    without = replace(job, placement=None)
    if not idle or len(job.parked) >= job.parking:
        return without, (Effect(EffectKind.RELEASE, held, why),), ()
    kept = replace(without, parked=(*job.parked, held))
    event = Event("parked", f"{held.name} ({held.chips} chips in {held.zone}) until another runs")
    return kept, (), (event,)


def release_parked(decision: Decision, seen: Seen) -> Decision:
    """The decision, and the release of what is parked if it serves nothing any longer."""
    job = decision.job
    begun = job.attempt is not None and job.attempt.running_at is not None
    # A server that has just started has heard of no host: then nothing is known to run.
    runs = begun and bool(seen.hosts) and all(_at_work(report) for report in seen.hosts)
    if job.status.ended:
        return _released(decision, "the job is over")
    return _released(decision, "the program runs elsewhere") if runs else decision


def release_if_none_is_left(decision: Decision, fault: Fault) -> Decision:
    """The decision after a refused request, and the release of what is parked if it is in the way.

    Parked slices use up quota, perhaps all of it. And where every choice is out of capacity, they
    would be paid for as long as that lasts.
    """
    job = decision.job
    tried_all = job.next_choice == 0 and fault.kind is FaultKind.STOCKOUT
    if fault.kind is FaultKind.QUOTA or tried_all:
        return _released(decision, "no other slice is to be had")
    return decision


def release_after_waiting(decision: Decision) -> Decision:
    """The decision, and the release of what is parked: the queue does not move."""
    return _released(decision, "no other slice is to be had")


def _at_work(report: HostReport) -> bool:
    """Whether a host runs the program, or has done its part, and passed what came before it."""
    done = report.phase is HostPhase.EXITED and report.exit_code == 0
    at_work = done or report.phase is HostPhase.RUNNING
    return at_work and report.examined in {"", "pass", "warn"}


def _released(decision: Decision, why: str) -> Decision:
    job = decision.job
    if not job.parked:
        return decision
    released = tuple(Effect(EffectKind.RELEASE, each, f"parked; {why}") for each in job.parked)
    slices = "1 parked slice" if len(job.parked) == 1 else f"{len(job.parked)} parked slices"
    event = Event("released", f"{slices} released: {why}")
    return replace(
        decision,
        job=replace(job, parked=()),
        effects=(*decision.effects, *released),
        events=(*decision.events, event),
    )
