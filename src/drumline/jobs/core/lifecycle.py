"""The life of a job: `decide(job, seen, now)` gives its next state and what to do about it.

Pure: no I/O and no clock. The supervisor observes, calls this module, saves the decision, and only
then acts, so after a crash the saved state alone says what was under way. Each effect is
idempotent, and `decide` keeps returning it until its result has been observed.

What was not observed is not guessed: without a fresh poll of the zone nothing is lost, released
or blamed. `diagnosis` judges what goes wrong on a slice, `outcomes` says what follows when an
attempt or a job is over.
"""

from dataclasses import replace

from drumline.jobs.core.causes import failing
from drumline.jobs.core.diagnosis import failure, silent, stuck
from drumline.jobs.core.outcomes import (
    RETRY_LIMIT,
    after_stop,
    at_work,
    attempt_of,
    backed_off,
    cut_short,
    finish,
    give_up_slice,
    in_minutes,
    note,
    preempted,
    proved,
    release_after_waiting,
    release_if_none_is_left,
    release_parked,
    turn_down,
)
from drumline.jobs.core.refusals import Action, action
from drumline.jobs.core.state import (
    Attempt,
    Choice,
    Decision,
    Effect,
    EffectKind,
    Ended,
    Event,
    Job,
    Outcome,
    Placement,
    PlacementPhase,
    Seen,
    Status,
    Thresholds,
    Wish,
    Zone,
)
from drumline.observed import (
    Fault,
    FaultKind,
    HostPhase,
    HostReport,
    PlacementState,
    Refusal,
    Scope,
)


def decide(job: Job, seen: Seen, now: float, patience: Thresholds) -> Decision:
    """The next state of a job; the job itself where nothing is new."""
    return release_parked(_decide(job, seen, now, patience), seen)


def _decide(job: Job, seen: Seen, now: float, patience: Thresholds) -> Decision:
    if job.wish is Wish.RESTART and (
        job.placement is None or job.placement.phase is not PlacementPhase.READY
    ):
        return resumed(job)
    if job.placement is None:
        return _without_slice(job, seen, now)
    if job.status.ended:
        return _holding(job, job.placement, seen, now)
    if job.placement.phase is PlacementPhase.ASKING:
        return _asking(job, job.placement, now)
    if job.placement.phase is PlacementPhase.READY:
        return _on_slice(job, job.placement, seen, now, patience)
    return _waiting(job, job.placement, seen, now, patience)


# --- no slice ---------------------------------------------------------------------------------


def _without_slice(job: Job, seen: Seen, now: float) -> Decision:
    if job.status.ended:
        return Decision(job)
    if job.wish is not Wish.RUN:
        return finish(job, Status.CANCELLED, "cancelled", now, ended=cut_short(job))
    if now < job.not_before:
        return Decision(job)
    if seen.old_slice_alive:
        return Decision(note(job, "the old slice is being released"))
    order = [*job.choices[job.next_choice :], *job.choices[: job.next_choice]]
    for choice in order:
        if seen.zones.get(choice, _OPEN).open:
            return _ask(job, choice, now)
    return Decision(note(job, _why_no_zone(job, seen)))


_OPEN = Zone()


def _why_no_zone(job: Job, seen: Seen) -> str:
    reasons = dict.fromkeys(seen.zones[choice].why for choice in job.choices)
    return "; ".join(reason for reason in reasons if reason) or "no zone is open"


def _ask(job: Job, choice: Choice, now: float) -> Decision:
    asks = job.asks + 1
    wanted = Placement(
        name=f"dl-{job.owner}-{job.id}-{asks}",
        zone=choice.zone,
        accelerator=choice.accelerator,
        hosts=choice.hosts * job.slices,
        asked_at=now,
        slices=job.slices,
    )
    attempts = job.attempts if job.attempt else job.attempts + 1
    asked = replace(
        job,
        asks=asks,
        attempts=attempts,
        attempt=job.attempt or Attempt(attempts, started_at=now),
        next_choice=job.choices.index(choice),
        placement=wanted,
    )
    text = f"{choice.accelerator} in {choice.zone}"
    return Decision(
        note(asked, f"asking for {text}", Status.WAITING),
        effects=(Effect(EffectKind.ASK, wanted),),
        events=(Event("asked", text),),
    )


# --- asked for, not there yet -----------------------------------------------------------------


def _asking(job: Job, wanted: Placement, now: float) -> Decision:
    if job.wish is not Wish.RUN:
        return give_up_slice(job, wanted, now)
    if now < job.not_before:
        return Decision(job)
    return Decision(job, effects=(Effect(EffectKind.ASK, wanted),))


def asked(job: Job) -> Job:
    """The cloud took the request."""
    if job.placement is None or job.placement.phase is not PlacementPhase.ASKING:
        return job
    return replace(job, placement=replace(job.placement, phase=PlacementPhase.QUEUED))


def refused(job: Job, refusal: Refusal, now: float, patience: Thresholds) -> Decision:
    """The cloud did not take the request."""
    wanted = job.placement
    if wanted is None or wanted.phase is not PlacementPhase.ASKING:
        return Decision(job)
    if action(refusal.fault) is Action.RETRY:
        # Nothing exists in the cloud, so the same request is made again under the same name.
        later = Decision(note(backed_off(job, now, patience), refusal.said))
        return release_if_none_is_left(later, refusal.fault)
    return release_parked(_after_refusal(job, wanted, refusal, now, patience), Seen())


_TAKEN_BACK = Fault(FaultKind.PREEMPTED, Scope.ZONE)


def _after_refusal(
    job: Job, wanted: Placement, refusal: Refusal, now: float, patience: Thresholds
) -> Decision:
    """What follows when the slice will not come; what is left of the request is released."""
    said = refusal.said
    match action(refusal.fault):
        case Action.NEXT_CHOICE:
            return release_if_none_is_left(_next_choice(job, wanted, said), refusal.fault)
        case Action.RETRY:
            released = (Effect(EffectKind.RELEASE, wanted, said),)
            later = backed_off(replace(job, placement=None), now, patience)
            events = (Event("waiting", said),)
            again = Decision(note(later, said, Status.WAITING), released, events)
            return release_if_none_is_left(again, refusal.fault)
        case Action.PREEMPTION:
            # With a backoff, so that a cloud that preempts every slice before it is ready is asked
            # less and less often.
            return preempted(backed_off(job, now, patience), wanted, said, now)
        case Action.GIVE_UP:
            ended = (Ended(attempt_of(job), Outcome.REFUSED, said),)
            released = (Effect(EffectKind.RELEASE, wanted, said),)
            done = replace(job, placement=None)
            return finish(done, Status.FAILED, said, now, effects=released, ended=ended)


def _waiting(job: Job, wanted: Placement, seen: Seen, now: float, patience: Thresholds) -> Decision:
    if job.wish is not Wish.RUN:
        return give_up_slice(job, wanted, now)
    sighting = seen.sighting
    if sighting is None:
        return Decision(job)
    listed, lost = sighting.listed, sighting.why_lost
    if listed is None or lost is not None:
        refusal = listed.refusal if listed else None
        taken_back = Refusal(_TAKEN_BACK, lost or "")
        return _after_refusal(job, wanted, refusal or taken_back, now, patience)
    if listed.state is PlacementState.READY and len(listed.endpoints) == wanted.hosts:
        ready = replace(wanted, phase=PlacementPhase.READY, ready_at=now)
        held = replace(job, placement=ready, refusals=0)
        started = note(held, "connecting to the hosts", Status.STARTING)
        return Decision(
            started,
            effects=(Effect(EffectKind.DRIVE, ready),),
            events=(Event("slice", _size_and_place(ready)),),
        )
    if listed.state is not PlacementState.QUEUED:
        booting = replace(wanted, phase=PlacementPhase.BOOTING)
        return Decision(
            note(replace(job, placement=booting), f"slice boots in {wanted.zone}", Status.STARTING)
        )
    waited = now - wanted.asked_at
    here = Choice(wanted.accelerator, wanted.zone)
    open_elsewhere = any(zone.open for choice, zone in seen.zones.items() if choice != here)
    why = f"no capacity in {wanted.zone}"
    if waited > patience.waiting and open_elsewhere:
        return _next_choice(job, wanted, f"{why} for {in_minutes(waited)}")
    position = f"zone {job.next_choice + 1} of {len(job.choices)} · " if job.next_choice else ""
    waits = Decision(note(job, f"{position}{why} for {in_minutes(waited)}", Status.WAITING))
    return release_after_waiting(waits) if waited > patience.waiting else waits


def _next_choice(job: Job, wanted: Placement, why: str) -> Decision:
    """Ask in another zone, or for another kind of slice, within the same attempt."""
    following = (job.next_choice + 1) % len(job.choices)
    moved = replace(job, placement=None, next_choice=following)
    return Decision(
        note(moved, why, Status.WAITING),
        effects=(
            Effect(EffectKind.SHORT, wanted, why),
            Effect(EffectKind.RELEASE, wanted, why),
        ),
        events=(Event("waiting", why),),
    )


# --- on a slice -------------------------------------------------------------------------------


def _on_slice(job: Job, held: Placement, seen: Seen, now: float, patience: Thresholds) -> Decision:
    lost = seen.sighting.why_lost if seen.sighting else None
    if lost is not None:
        if job.wish in {Wish.CANCEL, Wish.DELETE}:
            return give_up_slice(job, held, now)
        return preempted(job, held, lost, now, seen.steps)
    if job.wish is not Wish.RUN:
        return _stop_for_user(job, held, seen, now)
    if job.attempt is None:
        return _start_again(job, held, now)
    reports = seen.hosts
    if not reports:
        return Decision(job, effects=(Effect(EffectKind.DRIVE, held),))
    if job.attempt.stopping:
        return after_stop(job, held, seen, now, patience)
    if all(r.phase is HostPhase.EXITED and r.exit_code == 0 for r in reports):
        if job.attempt.running_at is None:
            # It was over before anyone saw it run. That it ran is told all the same.
            return _progress(job, held, seen, now, patience)
        ended = (Ended(job.attempt, Outcome.SUCCEEDED, ""),)
        released = (Effect(EffectKind.RELEASE, held, "the job is done"),)
        done = replace(job, placement=None, cause=None)
        return finish(done, Status.SUCCEEDED, "", now, effects=released, ended=ended)
    quiet = silent(job, held, seen, now, patience)
    if quiet is not None:
        return quiet
    unwanted = next((report for report in reports if report.refused), None)
    if unwanted is not None:
        why = f"host {unwanted.index}, {unwanted.refused}"
        return turn_down(job, held, why, now, patience.retry)
    failed = [report for report in reports if failing(report)]
    if failed:
        return failure(job, held, seen, failed, now, patience)
    return _progress(job, held, seen, now, patience)


def _progress(job: Job, held: Placement, seen: Seen, now: float, patience: Thresholds) -> Decision:
    attempt, reports = attempt_of(job), seen.hosts
    drive = (Effect(EffectKind.DRIVE, held),)
    if attempt.sent_at is None and all(_has_code(r) for r in reports):
        sent = replace(job, attempt=replace(attempt, sent_at=now))
        return Decision(sent, effects=drive, events=(Event("code", ""),))
    if all(r.phase in {HostPhase.RUNNING, HostPhase.EXITED} for r in reports):
        if attempt.running_at is not None:
            hanging = stuck(job, held, seen, now, patience)
            return hanging or Decision(at_work(job, seen), effects=drive)
        if any(r.examined == "running" for r in reports):
            return Decision(note(job, "burn-in of its chips", Status.STARTING), effects=drive)
        begun = replace(attempt, running_at=now)
        running = replace(job, attempt=begun, has_run=True, turned_down=0)
        event = Event("run", f"attempt {attempt.number}")
        started = Decision(note(running, "", Status.RUNNING), effects=drive, events=(event,))
        return proved(started, held, reports)
    slowest = min(reports, key=lambda r: (_ORDER[r.phase], r.index))
    what = slowest.detail or slowest.phase.value
    return Decision(note(job, f"host {slowest.index}: {what}", Status.STARTING), effects=drive)


def _has_code(report: HostReport) -> bool:
    """Whether a host has received the code: it is being set up, runs, or has run."""
    if report.phase in {HostPhase.READY, HostPhase.RUNNING, HostPhase.EXITED}:
        return True
    return report.phase is HostPhase.PREPARING and report.detail.startswith("setup")


_ORDER = {phase: place for place, phase in enumerate(HostPhase)}


def _start_again(job: Job, held: Placement, now: float) -> Decision:
    """A new attempt on the slice the job still holds."""
    if now < job.not_before:
        return Decision(job)
    number = job.attempts + 1
    again = replace(job, attempts=number, attempt=Attempt(number, started_at=now))
    status = Status.RECOVERING if job.has_run else Status.STARTING
    return Decision(
        note(again, "starting again on the same slice", status),
        effects=(Effect(EffectKind.DRIVE, held),),
    )


def _stop_for_user(job: Job, held: Placement, seen: Seen, now: float) -> Decision:
    if job.attempt is not None and not seen.stopped:
        stopping = replace(job, attempt=replace(job.attempt, stopping=True))
        return Decision(note(stopping, "stopping"), effects=(Effect(EffectKind.STOP, held),))
    if job.wish is Wish.DELETE:
        return give_up_slice(job, held, now)
    if job.wish is Wish.RESTART:
        return resumed(job)
    if job.keep <= 0:
        return give_up_slice(job, held, now)
    kept = f"slice {held.accelerator} in {held.zone} kept for a resume"
    keeping = replace(job, kept_until=now + job.keep)
    return finish(keeping, Status.CANCELLED, kept, now, ended=cut_short(job))


def _holding(job: Job, held: Placement, seen: Seen, now: float) -> Decision:
    """The job has ended and its slice was kept for a resume."""
    if job.kept_until is None:
        # Kept by an earlier version, which set no end.
        job = replace(job, kept_until=now + job.keep)
    lost = seen.sighting.why_lost if seen.sighting else None
    if lost is None and job.wish is Wish.CANCEL and now < (job.kept_until or 0.0):
        return Decision(job)
    why, reason = "no longer wanted", ""
    if lost is not None:
        why, reason = lost, f"the kept slice was taken: {lost}"
    elif job.wish is Wish.CANCEL:
        why = reason = f"not resumed within {in_minutes(job.keep)}"
    return Decision(
        replace(job, placement=None, reason=reason, kept_until=None),
        effects=(Effect(EffectKind.RELEASE, held, why),),
        events=(Event("released", f"slice in {held.zone}: {why}"),),
    )


# --- what the user asks for ---------------------------------------------------------------------


def resume(job: Job) -> Job:
    """Run an ended job again under its own id, on the slice it holds if it holds one."""
    return replace(
        job,
        wish=Wish.RUN,
        status=Status.QUEUED,
        reason="resumed",
        failures=0,
        bad_hosts=0,
        bad_in_a_row=0,
        departures=0,
        refusals=0,
        turned_down=0,
        not_before=0.0,
        kept_until=None,
        cause=None,
        attempt=None,
        ended_at=None,
    )


def resumed(job: Job) -> Decision:
    """The user resumed the job: what was under way is over, and the next attempt begins.

    A slice that the job file no longer asks for is released.
    """
    held, again = job.placement, resume(job)
    if held is None or not fits(job):
        effects = () if held is None else (Effect(EffectKind.RELEASE, held, "another is wanted"),)
        event = Event("resumed", "on a new slice")
        return Decision(replace(again, placement=None), effects, (event,), cut_short(job))
    kept = "kept" if held.phase is PlacementPhase.READY else "asked for"
    event = Event("resumed", f"on the slice {kept} in {held.zone}")
    return Decision(again, events=(event,), ended=cut_short(job))


def fits(job: Job) -> bool:
    """Whether what a job holds is what it asks for."""
    held = job.placement
    if held is None or held.slices != job.slices:
        return False
    return Choice(held.accelerator, held.zone) in job.choices


def clamped(job: Job, now: float) -> Job:
    """A job as an earlier server left it, with no time in the future.

    If the wall clock was set back between two servers, a backoff of seconds would last hours.
    """
    held, attempt = job.placement, job.attempt
    moments = [job.not_before, job.kept_until]
    if held is not None:
        moments += [held.asked_at, held.ready_at]
    if attempt is not None:
        moments += [attempt.started_at, attempt.running_at, attempt.failed_at, attempt.stuck_at]
    if all(moment is None or moment <= now for moment in moments):
        return job  # nearly always, and a thousand jobs are checked at every start
    if held is not None:
        held = replace(held, asked_at=min(held.asked_at, now), ready_at=_past(held.ready_at, now))
    if attempt is not None:
        attempt = replace(
            attempt,
            started_at=min(attempt.started_at, now),
            running_at=_past(attempt.running_at, now),
            failed_at=_past(attempt.failed_at, now),
            stuck_at=_past(attempt.stuck_at, now),
        )
    return replace(
        job,
        placement=held,
        attempt=attempt,
        not_before=min(job.not_before, now + RETRY_LIMIT),
        kept_until=_past(job.kept_until, now + job.keep),
    )


def _past(moment: float | None, now: float) -> float | None:
    return None if moment is None else min(moment, now)


# --- small parts --------------------------------------------------------------------------------


def _size_and_place(held: Placement) -> str:
    hosts = "1 host" if held.hosts == 1 else f"{held.hosts} hosts"
    return f"{hosts}, {held.chips} chips in {held.zone}"
