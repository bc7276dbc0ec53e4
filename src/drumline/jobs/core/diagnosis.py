"""What may be wrong with a program on its slice: a silent host, a failing one, steps that stopped.

Pure. Each verdict needs a poll of the cloud that is newer than the trouble, because the first sign
of a preemption is often a failing or a hanging program.
"""

from dataclasses import replace

from drumline.jobs.core.causes import by_signal, failing, find_cause, leaving
from drumline.jobs.core.host_history import Proof
from drumline.jobs.core.outcomes import (
    DEPARTURES,
    attempt_of,
    bad_host,
    in_minutes,
    note,
    preempted,
)
from drumline.jobs.core.state import (
    Cause,
    Decision,
    Effect,
    EffectKind,
    Job,
    Placement,
    Seen,
    Thresholds,
)
from drumline.jobs.core.steps import Steps
from drumline.observed import HostPhase, HostReport, PlacementState

EDGE_FACTOR = 3.0
"""Factor on the time limit of an attempt's first and last step: programs compile and restore at the
start, evaluate and export at the end, which takes longer than any pause in between."""


def silent(
    job: Job, held: Placement, seen: Seen, now: float, patience: Thresholds
) -> Decision | None:
    """The verdict on a host that was silent for too long: the slice is lost, or the host is bad."""
    sighting, reports = seen.sighting, seen.hosts
    for report in reports:
        since = _silent_since(report, seen)
        done = report.phase is HostPhase.EXITED and not failing(report)
        if done or since is None:
            continue
        quiet = now - since
        limit = patience.bad_silence if report.heard is not None else patience.first_contact
        if quiet <= min(patience.silence, limit):
            continue
        fresh = sighting is not None and sighting.at > since + patience.silence
        listed = sighting.listed if sighting else None
        if fresh and (listed is None or listed.state is not PlacementState.READY):
            word = listed.word if listed and listed.slices else "gone"
            why = f"host {report.index} silent, the slice is {word}"
            return preempted(job, held, why, now, seen.steps)
        if fresh and quiet > limit:
            text = f"host {report.index} silent for {in_minutes(quiet)}"
            cause = Cause("bad host", report.index, len(reports), text, report.tail)
            accused = replace(cause, proof=Proof.START)
            return bad_host(job, held, accused, seen, now, idle=False)
        return Decision(
            note(job, f"host {report.index} silent for {in_minutes(quiet)}"),
            effects=(Effect(EffectKind.DRIVE, held), Effect(EffectKind.POLL, held)),
        )
    return None


def _silent_since(report: HostReport, seen: Seen) -> float | None:
    """When a host was last heard, or when we began to listen if that was later.

    A server that was down, or whose machine slept, heard no host in the meantime.
    """
    moments = [at for at in (report.heard, seen.listening_since) if at is not None]
    return max(moments, default=None)


def failure(
    job: Job,
    held: Placement,
    seen: Seen,
    failed: list[HostReport],
    now: float,
    patience: Thresholds,
) -> Decision:
    """A host failed: wait for its siblings and the cloud, then name the cause and stop them all."""
    attempt = attempt_of(job)
    if attempt.failed_at is None:
        noticed = replace(job, attempt=replace(attempt, failed_at=now))
        return Decision(noticed, effects=(Effect(EffectKind.POLL, held),))
    going = next((r for r in seen.hosts if r.going_down), None)
    over = all(r.phase is HostPhase.EXITED or failing(r) for r in seen.hosts)
    settled = over or now - attempt.failed_at >= patience.settle
    if going is not None and settled:
        # The host will be gone in a moment, whatever the cloud says about it until then.
        why = f"host {going.index} is going down: {going.going_down}"
        return preempted(job, held, why, now, seen.steps)
    # A host that shuts down ends its programs by signal first, and those that can save their work
    # and exit. A host not heard since then may be the lost one that made the others fail.
    signalled = any(by_signal(r) or leaving(r) for r in failed)
    since = attempt.failed_at + (patience.shutdown if signalled else 0.0)
    if not (settled and _seen_since(since, seen)):
        return _wait_and_see(job, held)
    cause = find_cause(failed, seen.hosts)
    if cause.kind == "bad host":
        return bad_host(job, held, cause, seen, now, idle=over)
    failed_there = f"{cause.kind} on host {cause.host}: {cause.error}"
    return _stop(job, held, cause, DEPARTURES.get(cause.kind, failed_there))


def stuck(
    job: Job, held: Placement, seen: Seen, now: float, patience: Thresholds
) -> Decision | None:
    """End a program that stopped making steps, so that it is started again."""
    attempt, steps = attempt_of(job), seen.steps
    since = steps.stepped_at if steps else attempt.running_at
    if since is not None and seen.listening_since is not None:
        # A server that was down saw no step, and its clock is not that of the server before.
        since = max(since, seen.listening_since)
    limit = _longest_pause(job, steps)
    if limit is None or since is None or now - since <= limit:
        if attempt.stuck_at is None:
            return None
        return Decision(replace(job, attempt=replace(attempt, stuck_at=None)))
    if attempt.stuck_at is None:
        noticed = replace(job, attempt=replace(attempt, stuck_at=now))
        return Decision(noticed, effects=(Effect(EffectKind.POLL, held),))
    # After a lost connection, a host is heard again just before its newest heartbeat arrives.
    settled = now - attempt.stuck_at >= patience.settle
    if not (settled and _seen_since(attempt.stuck_at, seen)):
        return _wait_and_see(job, held)
    last = f"the last was step {steps.step:,.0f}" if steps else "none since it started"
    first = seen.hosts[0]
    error = f"no step for {in_minutes(now - since)}, {last}"
    cause = Cause("stuck", first.index, len(seen.hosts), error, first.tail)
    return _stop(job, held, cause, error)


def _longest_pause(job: Job, steps: Steps | None) -> float | None:
    """Seconds without a step that are still normal; None where no step was ever reported."""
    if job.stuck_after is None or not (steps or job.has_stepped):
        return None
    inside = steps is not None and steps.moving and not steps.last_step
    return job.stuck_after * (1.0 if inside else EDGE_FACTOR)


def _seen_since(moment: float, seen: Seen) -> bool:
    """Whether every host has spoken and the cloud was polled after that moment.

    A program that ended by itself has nothing to add.
    """
    open_ended = [r for r in seen.hosts if not _ended_by_itself(r)]
    heard = all((at := _spoke_at(report)) is not None and at > moment for report in open_ended)
    return heard and seen.sighting is not None and seen.sighting.at > moment


def _ended_by_itself(report: HostReport) -> bool:
    return report.phase is HostPhase.EXITED and not (by_signal(report) or leaving(report))


def _spoke_at(report: HostReport) -> float | None:
    """When a host last said what its program does; None before its first word to this server.

    A host that rebooted is heard again before it has said that the program is gone, and until then
    its siblings, who lost their connection to it, look like the ones to blame.
    """
    if report.phase is HostPhase.CONNECTING or report.reported_at is not None:
        return report.reported_at
    return report.heard


def _wait_and_see(job: Job, held: Placement) -> Decision:
    return Decision(job, effects=(Effect(EffectKind.DRIVE, held), Effect(EffectKind.POLL, held)))


def _stop(job: Job, held: Placement, cause: Cause, reason: str) -> Decision:
    stopping = replace(job, attempt=replace(attempt_of(job), stopping=True), cause=cause)
    return Decision(note(stopping, reason), effects=(Effect(EffectKind.STOP, held),))
