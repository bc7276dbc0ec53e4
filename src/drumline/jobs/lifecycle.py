"""What becomes of a job: `decide(job, seen, now)` gives its next state and what to do about it.

Pure: no I/O and no clock. The supervisor looks, asks this module, writes the answer down, and only
then acts, so after a crash the written state alone says what was under way. Each effect can be
repeated without harm, and decide keeps returning it until what it brings about has been seen.

What could not be seen is not guessed: without a fresh look at the zone nothing is lost, released
or blamed. A failing program is blamed only after a look, newer than the failure, still shows its
slice alive, because the first sign of a preemption is often a failing program.
"""

from dataclasses import replace

from drumline.chips import slice_of
from drumline.hosts.values import HostPhase, HostReport
from drumline.jobs.causes import by_signal, failing, find_cause
from drumline.jobs.faults import FaultKind, classify, explain
from drumline.jobs.signs import why_lost
from drumline.jobs.state import (
    Attempt,
    Cause,
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

_REST_LIMIT = 60.0


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
        return _finish(job, Status.CANCELLED, "cancelled", now, ended=_cut_short(job))
    if seen.old_slice_alive:
        return Decision(_note(job, "the old slice is being released"))
    order = [*job.choices[job.next_choice :], *job.choices[: job.next_choice]]
    for choice in order:
        if seen.zones.get(choice, Zone()).open:
            return _ask(job, choice, now)
    return Decision(_note(job, _why_no_zone(job, seen)))


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
        _note(asked, f"asking for {text}", Status.WAITING),
        effects=(Effect(EffectKind.ASK, wanted),),
        events=(Event("asked", text),),
    )


# --- asked for, not there yet -----------------------------------------------------------------


def _asking(job: Job, wanted: Slice, now: float) -> Decision:
    if job.wish is not Wish.RUN:
        return _give_up_slice(job, wanted, now)
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
        ended = (Ended(_attempt(job), Outcome.REFUSED, said),)
        return _finish(job, Status.FAILED, said, now, ended=ended)
    return Decision(_note(job, said))


def _waiting(job: Job, wanted: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    if job.wish is not Wish.RUN:
        return _give_up_slice(job, wanted, now)
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
        return _taken(job, wanted, lost, now)
    node = look.node
    if node is not None and node.state == "READY" and len(node.endpoints) == wanted.hosts:
        ready = replace(wanted, phase=SlicePhase.READY, ready_at=now)
        started = _note(replace(job, slice=ready), "connecting to the hosts", Status.STARTING)
        return Decision(
            started,
            effects=(Effect(EffectKind.DRIVE, ready),),
            events=(Event("slice", _size_and_place(ready)),),
        )
    state = look.request.state if look.request else "ACTIVE"
    if state in {"PROVISIONING", "ACTIVE"} or node is not None:
        booting = replace(wanted, phase=SlicePhase.BOOTING)
        return Decision(
            _note(replace(job, slice=booting), f"slice boots in {wanted.zone}", Status.STARTING)
        )
    waited = now - wanted.asked_at
    open_elsewhere = any(
        zone.open for choice, zone in seen.zones.items() if choice.zone != wanted.zone
    )
    why = f"no capacity in {wanted.zone}"
    if waited > patience.waiting and open_elsewhere:
        return _next_zone(job, wanted, f"{why} for {_minutes(waited)}")
    position = f"zone {job.next_choice + 1} of {len(job.choices)} · " if job.next_choice else ""
    return Decision(_note(job, f"{position}{why} for {_minutes(waited)}", Status.WAITING))


def _next_zone(job: Job, wanted: Slice, why: str) -> Decision:
    """Try elsewhere: the attempt goes on with another slice."""
    following = (job.next_choice + 1) % len(job.choices)
    moved = replace(job, slice=None, next_choice=following)
    return Decision(
        _note(moved, why, Status.WAITING),
        effects=(
            Effect(EffectKind.SHORT, wanted, why),
            Effect(EffectKind.RELEASE, wanted, why),
        ),
        events=(Event("waiting", why),),
    )


def _give_up_slice(job: Job, wanted: Slice, now: float) -> Decision:
    """The user no longer wants a slice that we do not have yet."""
    released = (Effect(EffectKind.RELEASE, wanted, "no longer wanted"),)
    gone = replace(job, slice=None)
    return _finish(
        gone, Status.CANCELLED, "cancelled", now, effects=released, ended=_cut_short(job)
    )


# --- on a slice -------------------------------------------------------------------------------


def _on_slice(job: Job, held: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    look = seen.look
    lost = why_lost(look) if look else None
    if lost is not None:
        if job.wish is not Wish.RUN:
            return _give_up_slice(job, held, now)
        return _taken(job, held, lost, now)
    if job.wish is not Wish.RUN:
        return _stop_for_user(job, held, seen, now)
    if job.attempt is None:
        return _start_again(job, held, now)
    reports = seen.hosts
    if not reports:
        return Decision(job, effects=(Effect(EffectKind.DRIVE, held),))
    if job.attempt.stopping:
        return _after_stop(job, held, seen, now, patience)
    if all(r.phase is HostPhase.EXITED and r.exit_code == 0 for r in reports):
        ended = (Ended(job.attempt, Outcome.SUCCEEDED, ""),)
        released = (Effect(EffectKind.RELEASE, held, "the job is done"),)
        done = replace(job, slice=None, cause=None)
        return _finish(done, Status.SUCCEEDED, "", now, effects=released, ended=ended)
    silent = _silent(job, held, seen, now, patience)
    if silent is not None:
        return silent
    failed = [report for report in reports if failing(report)]
    if failed:
        return _failure(job, held, seen, failed, now, patience)
    return _progress(job, held, reports, now)


def _progress(job: Job, held: Slice, reports: tuple[HostReport, ...], now: float) -> Decision:
    attempt = _attempt(job)
    drive = (Effect(EffectKind.DRIVE, held),)
    if all(r.phase in {HostPhase.RUNNING, HostPhase.EXITED} for r in reports):
        if attempt.running_at is not None:
            return Decision(_note(job, "", Status.RUNNING), effects=drive)
        running = replace(job, attempt=replace(attempt, running_at=now), has_run=True)
        event = Event("run", f"attempt {attempt.number}")
        return Decision(_note(running, "", Status.RUNNING), effects=drive, events=(event,))
    slowest = min(reports, key=lambda r: (_ORDER[r.phase], r.index))
    what = slowest.detail or slowest.phase.value
    return Decision(_note(job, f"host {slowest.index}: {what}", Status.STARTING), effects=drive)


_ORDER = {phase: place for place, phase in enumerate(HostPhase)}


def _silent(job: Job, held: Slice, seen: Seen, now: float, patience: Patience) -> Decision | None:
    """A host that has not been heard for too long makes the slice lost or the host bad."""
    look, reports = seen.look, seen.hosts
    for report in reports:
        since = report.heard if report.heard is not None else seen.listening_since
        if report.phase is HostPhase.EXITED or since is None:
            continue
        quiet = now - since
        limit = patience.bad_silence if report.heard is not None else patience.first_contact
        if quiet <= min(patience.silence, limit):
            continue
        fresh = look is not None and look.at > since + patience.silence
        node = look.node if look else None
        if fresh and (node is None or node.state != "READY"):
            state = node.state if node else "gone"
            return _taken(job, held, f"host {report.index} silent, the slice is {state}", now)
        if fresh and quiet > limit:
            text = f"host {report.index} silent for {_minutes(quiet)}"
            cause = Cause("bad host", report.index, len(reports), text, report.tail)
            return _bad_host(job, held, cause, now)
        return Decision(
            _note(job, f"host {report.index} silent for {_minutes(quiet)}"),
            effects=(Effect(EffectKind.DRIVE, held), Effect(EffectKind.LOOK, held)),
        )
    return None


def _failure(
    job: Job, held: Slice, seen: Seen, failed: list[HostReport], now: float, patience: Patience
) -> Decision:
    attempt = _attempt(job)
    if attempt.failed_at is None:
        noticed = replace(job, attempt=replace(attempt, failed_at=now))
        return Decision(noticed, effects=(Effect(EffectKind.LOOK, held),))
    over = all(r.phase is HostPhase.EXITED or failing(r) for r in seen.hosts)
    settled = over or now - attempt.failed_at >= patience.settle
    # A host that goes down ends its programs by signal first; one that has not spoken since may be
    # the one that was lost and made the others fail.
    since = attempt.failed_at + (patience.shutdown if any(map(by_signal, failed)) else 0.0)
    heard = all(r.heard is not None and r.heard > since for r in seen.hosts)
    looked = seen.look is not None and seen.look.at > since
    if not (settled and heard and looked):
        drive, look = Effect(EffectKind.DRIVE, held), Effect(EffectKind.LOOK, held)
        return Decision(job, effects=(drive, look))
    cause = find_cause(failed, len(seen.hosts))
    if cause.kind == "bad host":
        return _bad_host(job, held, cause, now)
    stopping = replace(job, attempt=replace(attempt, stopping=True), cause=cause)
    return Decision(
        _note(stopping, f"program failed on host {cause.host}: {cause.error}"),
        effects=(Effect(EffectKind.STOP, held),),
    )


def _after_stop(job: Job, held: Slice, seen: Seen, now: float, patience: Patience) -> Decision:
    """The program failed and has been ended everywhere: start it again, or give up."""
    if not seen.stopped:
        return Decision(job, effects=(Effect(EffectKind.STOP, held),))
    attempt, cause = _attempt(job), job.cause
    assert cause is not None
    where = f"{cause.kind} on host {cause.host} of {cause.hosts}: {cause.error}"
    if cause.kind == "go on later":
        ended = Ended(attempt, Outcome.PREEMPTED, "saved its work and left")
        again = replace(job, attempt=None, cause=None, not_before=now)
        return Decision(
            _note(again, "saved its work, starting again", Status.RECOVERING),
            events=(Event("preempted", "the program saved its work and left"),),
            ended=(ended,),
        )
    ended = Ended(attempt, Outcome.PROGRAM_FAILED, where, cause)
    failures = job.failures + 1
    counted = replace(job, attempt=None, failures=failures)
    failed = Event("failed", where)
    if job.allowance.failures is not None and failures > job.allowance.failures:
        times = "1 failure" if failures == 1 else f"{failures} failures"
        return _finish(
            replace(counted, slice=None),
            Status.FAILED,
            f"{times} of the program; {where}",
            now,
            effects=(Effect(EffectKind.RELEASE, held, "the job failed"),),
            events=(failed,),
            ended=(ended,),
        )
    rest = min(_REST_LIMIT, patience.rest * 2 ** (failures - 1))
    resting = replace(counted, not_before=now + rest)
    return Decision(
        _note(resting, f"{where}; starting again", Status.RECOVERING),
        events=(failed,),
        ended=(ended,),
    )


def _start_again(job: Job, held: Slice, now: float) -> Decision:
    """A new attempt on the slice the job still holds."""
    if now < job.not_before:
        return Decision(job)
    number = job.attempts + 1
    again = replace(job, attempts=number, attempt=Attempt(number, started_at=now))
    status = Status.RECOVERING if job.has_run else Status.STARTING
    return Decision(
        _note(again, "starting again on the same slice", status),
        effects=(Effect(EffectKind.DRIVE, held),),
    )


def _bad_host(job: Job, held: Slice, cause: Cause, now: float) -> Decision:
    bad_hosts = job.bad_hosts + 1
    text = f"host {cause.host} of {cause.hosts}: {cause.error}"
    ended = (Ended(_attempt(job), Outcome.BAD_HOST, text, cause),)
    counted = replace(job, bad_hosts=bad_hosts, attempt=None, slice=None, cause=cause)
    released = (Effect(EffectKind.RELEASE, held, text),)
    events = (Event("badhost", text),)
    if job.allowance.bad_hosts is not None and bad_hosts > job.allowance.bad_hosts:
        why = f"{bad_hosts} bad hosts, the last: {text}"
        return _finish(counted, Status.FAILED, why, now, released, events, ended)
    recovering = _note(counted, f"{text}; slice being replaced", Status.RECOVERING)
    return Decision(recovering, released, events, ended)


def _taken(job: Job, held: Slice, why: str, now: float) -> Decision:
    """The slice is gone, by no fault of the program. Released, always, and asked for again."""
    preemptions = job.preemptions + 1
    ended = (Ended(_attempt(job), Outcome.PREEMPTED, why),) if job.attempt else ()
    counted = replace(job, preemptions=preemptions, attempt=None, slice=None, cause=None)
    released = (Effect(EffectKind.RELEASE, held, why),)
    events = (Event("preempted", f"slice taken in {held.zone}: {why}"),)
    if job.allowance.preemptions is not None and preemptions > job.allowance.preemptions:
        said = f"slice taken {preemptions} times"
        return _finish(counted, Status.FAILED, said, now, released, events, ended)
    return Decision(
        _note(counted, f"slice taken in {held.zone}", Status.RECOVERING), released, events, ended
    )


def _stop_for_user(job: Job, held: Slice, seen: Seen, now: float) -> Decision:
    if job.attempt is not None and not seen.stopped:
        stopping = replace(job, attempt=replace(job.attempt, stopping=True))
        return Decision(_note(stopping, "stopping"), effects=(Effect(EffectKind.STOP, held),))
    if job.wish is Wish.DELETE:
        return _give_up_slice(job, held, now)
    kept = f"slice {held.accelerator} in {held.zone} kept for a resume"
    return _finish(job, Status.CANCELLED, kept, now, ended=_cut_short(job))


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
        not_before=0.0,
        cause=None,
        attempt=None,
        ended_at=None,
    )


# --- small parts --------------------------------------------------------------------------------


def _attempt(job: Job) -> Attempt:
    return job.attempt or Attempt(max(job.attempts, 1), started_at=job.created_at)


def _cut_short(job: Job) -> tuple[Ended, ...]:
    return (Ended(job.attempt, Outcome.CANCELLED, ""),) if job.attempt else ()


def _finish(
    job: Job,
    status: Status,
    reason: str,
    now: float,
    effects: tuple[Effect, ...] = (),
    events: tuple[Event, ...] = (),
    ended: tuple[Ended, ...] = (),
) -> Decision:
    done = replace(job, status=status, reason=reason, attempt=None, ended_at=now)
    last = Event(status.value.lower(), reason)
    return Decision(done, effects, (*events, last), ended)


def _note(job: Job, reason: str, status: Status | None = None) -> Job:
    """The job with a new status and reason; a job that ran before is recovering, not starting."""
    if status in {Status.WAITING, Status.STARTING} and job.has_run:
        status = Status.RECOVERING
    return replace(job, reason=reason, status=status or job.status)


def _size_and_place(held: Slice) -> str:
    hosts = "1 host" if held.hosts == 1 else f"{held.hosts} hosts"
    return f"{hosts}, {slice_of(held.accelerator).chips} chips in {held.zone}"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
