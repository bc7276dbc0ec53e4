"""What becomes of a job: `decide(job, seen, now)` gives its next state and what to do about it.

Pure: no I/O and no clock. The supervisor looks, asks this module, writes the answer down, and only
then acts, so after a crash the written state alone says what was under way. Each effect can be
repeated without harm, and decide keeps returning it until what it brings about has been seen.

What could not be seen is not guessed: without a fresh look at the zone nothing is lost, released
or blamed. `troubles` judges what goes wrong on a slice, `endings` says what follows when an attempt
or a job is over.
"""

from dataclasses import replace

from drumline.chips import slice_of
from drumline.hosts.values import HostPhase, HostReport
from drumline.jobs.causes import failing
from drumline.jobs.endings import (
    after_stop,
    attempt_of,
    cut_short,
    finish,
    give_up_slice,
    in_minutes,
    note,
    taken,
)
from drumline.jobs.faults import FaultKind, classify, explain
from drumline.jobs.signs import why_lost
from drumline.jobs.state import (
    Attempt,
    Choice,
    Decision,
    Effect,
    EffectKind,
    Ended,
    Event,
    Job,
    Outcome,
    Patience,
    Seen,
    Slice,
    SlicePhase,
    Status,
    Wish,
    Zone,
)
from drumline.jobs.troubles import failure, silent, stuck


def decide(job: Job, seen: Seen, now: float, patience: Patience) -> Decision:
    """The next state of a job. Without anything new the job comes back as it is."""
    if job.slice is None:
        return _without_slice(job, seen, now)
    if job.status.ended:
        return _holding(job, job.slice, seen)
    if job.slice.phase is SlicePhase.ASKING:
        return _asking(job, job.slice, now)
    if job.slice.phase is SlicePhase.READY:
        return _on_slice(job, job.slice, seen, now, patience)
    return _waiting(job, job.slice, seen, now, patience)


# --- no slice ---------------------------------------------------------------------------------


def _without_slice(job: Job, seen: Seen, now: float) -> Decision:
    if job.status.ended:
        return Decision(job)
    if job.wish is not Wish.RUN:
        return finish(job, Status.CANCELLED, "cancelled", now, ended=cut_short(job))
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
    wanted = Slice(
        name=f"dl-{job.owner}-{job.id}-{asks}",
        zone=choice.zone,
        accelerator=choice.accelerator,
        hosts=choice.hosts,
        asked_at=now,
    )
    attempts = job.attempts if job.attempt else job.attempts + 1
    asked = replace(
        job,
        asks=asks,
        attempts=attempts,
        attempt=job.attempt or Attempt(attempts, started_at=now),
        next_choice=job.choices.index(choice),
        slice=wanted,
    )
    text = f"{choice.accelerator} in {choice.zone}"
    return Decision(
        note(asked, f"asking for {text}", Status.WAITING),
        effects=(Effect(EffectKind.ASK, wanted),),
        events=(Event("asked", text),),
    )


# --- asked for, not there yet -----------------------------------------------------------------


def _asking(job: Job, wanted: Slice, now: float) -> Decision:
    if job.wish is not Wish.RUN:
        return give_up_slice(job, wanted, now)
    return Decision(job, effects=(Effect(EffectKind.ASK, wanted),))


def asked(job: Job) -> Job:
    """The cloud took the request."""
    if job.slice is None or job.slice.phase is not SlicePhase.ASKING:
        return job
    return replace(job, slice=replace(job.slice, phase=SlicePhase.WAITING))


def refused(job: Job, code: int | None, text: str, now: float) -> Decision:
    """The cloud did not take the request."""
    wanted = job.slice
    if wanted is None or wanted.phase is not SlicePhase.ASKING:
        return Decision(job)
    fault = classify(code, text)
    said = explain(fault, wanted.zone, text)
    if fault.kind in {FaultKind.STOCKOUT, FaultKind.QUOTA, FaultKind.DENIED}:
        return _next_zone(job, wanted, said)
    if fault.kind is FaultKind.INVALID:
        ended = (Ended(attempt_of(job), Outcome.REFUSED, said),)
        return finish(job, Status.FAILED, said, now, ended=ended)
    return Decision(note(job, said))


def _waiting(job: Job, wanted: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    if job.wish is not Wish.RUN:
        return give_up_slice(job, wanted, now)
    look = seen.look
    if look is None:
        return Decision(job)
    lost = why_lost(look)
    if lost is not None:
        trouble = look.request.trouble if look.request else None
        fault = classify(trouble.code, trouble.message) if trouble else None
        if fault and fault.kind in {FaultKind.STOCKOUT, FaultKind.QUOTA, FaultKind.DENIED}:
            assert trouble is not None
            return _next_zone(job, wanted, explain(fault, wanted.zone, trouble.message))
        return taken(job, wanted, lost, now)
    node = look.node
    if node is not None and node.state == "READY" and len(node.endpoints) == wanted.hosts:
        ready = replace(wanted, phase=SlicePhase.READY, ready_at=now)
        started = note(replace(job, slice=ready), "connecting to the hosts", Status.STARTING)
        return Decision(
            started,
            effects=(Effect(EffectKind.DRIVE, ready),),
            events=(Event("slice", _size_and_place(ready)),),
        )
    state = look.request.state if look.request else "ACTIVE"
    if state in {"PROVISIONING", "ACTIVE"} or node is not None:
        booting = replace(wanted, phase=SlicePhase.BOOTING)
        return Decision(
            note(replace(job, slice=booting), f"slice boots in {wanted.zone}", Status.STARTING)
        )
    waited = now - wanted.asked_at
    open_elsewhere = any(
        zone.open for choice, zone in seen.zones.items() if choice.zone != wanted.zone
    )
    why = f"no capacity in {wanted.zone}"
    if waited > patience.waiting and open_elsewhere:
        return _next_zone(job, wanted, f"{why} for {in_minutes(waited)}")
    position = f"zone {job.next_choice + 1} of {len(job.choices)} · " if job.next_choice else ""
    return Decision(note(job, f"{position}{why} for {in_minutes(waited)}", Status.WAITING))


def _next_zone(job: Job, wanted: Slice, why: str) -> Decision:
    """Try elsewhere: the attempt goes on with another slice."""
    following = (job.next_choice + 1) % len(job.choices)
    moved = replace(job, slice=None, next_choice=following)
    return Decision(
        note(moved, why, Status.WAITING),
        effects=(
            Effect(EffectKind.SHORT, wanted, why),
            Effect(EffectKind.RELEASE, wanted, why),
        ),
        events=(Event("waiting", why),),
    )


# --- on a slice -------------------------------------------------------------------------------


def _on_slice(job: Job, held: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    look = seen.look
    lost = why_lost(look) if look else None
    if lost is not None:
        if job.wish is not Wish.RUN:
            return give_up_slice(job, held, now)
        return taken(job, held, lost, now, seen.course)
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
        ended = (Ended(job.attempt, Outcome.SUCCEEDED, ""),)
        released = (Effect(EffectKind.RELEASE, held, "the job is done"),)
        done = replace(job, slice=None, cause=None)
        return finish(done, Status.SUCCEEDED, "", now, effects=released, ended=ended)
    quiet = silent(job, held, seen, now, patience)
    if quiet is not None:
        return quiet
    failed = [report for report in reports if failing(report)]
    if failed:
        return failure(job, held, seen, failed, now, patience)
    return _progress(job, held, seen, now, patience)


def _progress(job: Job, held: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    attempt, reports = attempt_of(job), seen.hosts
    drive = (Effect(EffectKind.DRIVE, held),)
    if attempt.sent_at is None and all(_has_code(r) for r in reports):
        sent = replace(job, attempt=replace(attempt, sent_at=now))
        return Decision(sent, effects=drive, events=(Event("code", ""),))
    if all(r.phase in {HostPhase.RUNNING, HostPhase.EXITED} for r in reports):
        if attempt.running_at is not None:
            hanging = stuck(job, held, seen, now, patience)
            if hanging is not None:
                return hanging
            first = seen.course is not None and not job.has_stepped
            known = replace(job, has_stepped=True) if first else job
            return Decision(note(known, "", Status.RUNNING), effects=drive)
        running = replace(job, attempt=replace(attempt, running_at=now), has_run=True)
        event = Event("run", f"attempt {attempt.number}")
        return Decision(note(running, "", Status.RUNNING), effects=drive, events=(event,))
    slowest = min(reports, key=lambda r: (_ORDER[r.phase], r.index))
    what = slowest.detail or slowest.phase.value
    return Decision(note(job, f"host {slowest.index}: {what}", Status.STARTING), effects=drive)


def _has_code(report: HostReport) -> bool:
    """Whether a host is past the sending of the code: it is set up, runs, or has run."""
    if report.phase in {HostPhase.READY, HostPhase.RUNNING, HostPhase.EXITED}:
        return True
    return report.phase is HostPhase.PREPARING and report.detail.startswith("setup")


_ORDER = {phase: place for place, phase in enumerate(HostPhase)}


def _start_again(job: Job, held: Slice, now: float) -> Decision:
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


def _stop_for_user(job: Job, held: Slice, seen: Seen, now: float) -> Decision:
    if job.attempt is not None and not seen.stopped:
        stopping = replace(job, attempt=replace(job.attempt, stopping=True))
        return Decision(note(stopping, "stopping"), effects=(Effect(EffectKind.STOP, held),))
    if job.wish is Wish.DELETE:
        return give_up_slice(job, held, now)
    kept = f"slice {held.accelerator} in {held.zone} kept for a resume"
    return finish(job, Status.CANCELLED, kept, now, ended=cut_short(job))


def _holding(job: Job, held: Slice, seen: Seen) -> Decision:
    """The job has ended and its slice was kept for a resume."""
    lost = why_lost(seen.look) if seen.look else None
    if lost is None and job.wish is Wish.CANCEL:
        return Decision(job)
    why = lost or "no longer wanted"
    return Decision(
        replace(
            job, slice=None, reason="" if lost is None else f"the kept slice was taken: {lost}"
        ),
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
        departures=0,
        not_before=0.0,
        cause=None,
        attempt=None,
        ended_at=None,
    )


# --- small parts --------------------------------------------------------------------------------


def _size_and_place(held: Slice) -> str:
    hosts = "1 host" if held.hosts == 1 else f"{held.hosts} hosts"
    return f"{hosts}, {slice_of(held.accelerator).chips} chips in {held.zone}"
