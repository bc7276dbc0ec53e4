"""Decide when the outputs of a job are copied from its hosts: regularly, and at its end. Pure.

While an attempt has slices, its outputs are copied every `outputs_interval` seconds, so that a
preemption without notice loses at most the changes since then. A decision after which the slices
may be deleted, or with which the job ends, waits for a final copy, but not longer than a limit.
"""

from dataclasses import replace

from drumline.jobs.core.outcomes import format_duration, with_reason
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import (
    Attempt,
    Decision,
    Effect,
    EffectType,
    Event,
    Job,
    Observations,
    Status,
    Timeouts,
)

NOTICE_INTERVAL = 2.0
"""Seconds between two copies while a host is about to shut down, which takes about 30 s."""
MAX_SHARE = 0.2
"""The maximum fraction of a run that is spent on copying outputs. A large file that changes
constantly must not occupy the network of the hosts."""


def copy_outputs(
    before: Job, decision: Decision, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Add a copy of the outputs to a decision if one is due, or let the decision wait for one."""
    attempt, placement = before.attempt, before.active
    # Before a host has the code, it has no outputs.
    if not before.outputs or attempt is None or placement is None or attempt.sent_at is None:
        return decision
    job, copy = decision.job, observations.outputs
    copy_effect = Effect(EffectType.COPY_OUTPUTS, placement)
    if job.active is not None and job.active.name == placement.name and not job.status.ended:
        if job.attempt is None:
            return decision  # the next attempt on the same slices copies them
        if job.attempt.outputs_since is not None:
            # A host came back, and the attempt goes on.
            job = replace(job, attempt=replace(job.attempt, outputs_since=None))
        due = _next_copy(attempt, observations, timeouts)
        effects = (*decision.effects, copy_effect) if now >= due else decision.effects
        return replace(decision, job=job, effects=effects)
    lost = observations.lost_reason(placement) is not None
    since = now if attempt.outputs_since is None else attempt.outputs_since
    if copy is not None and attempt.outputs_since is not None and copy.began_at >= since:
        return _with_event(decision, copy.summary)
    if lost and copy is None:
        return _with_event(decision, "the first copy had not ended when the slice was lost")
    if lost and copy is not None:
        age = format_duration(max(0.0, now - copy.began_at))
        return _with_event(decision, f"copied {age} before the slice was lost: {copy.summary}")
    if now - since > timeouts.outputs:
        limit = format_duration(timeouts.outputs)
        return _with_event(decision, f"the copy of the last changes took longer than {limit}")
    succeeded = attempt.succeeded or job.status is Status.SUCCEEDED
    job = replace(before, attempt=replace(attempt, outputs_since=since, succeeded=succeeded))
    return Decision(with_reason(job, "copying the outputs"), effects=(copy_effect,))


def _next_copy(attempt: Attempt, observations: Observations, timeouts: Timeouts) -> float:
    """Return the timestamp at which the next copy is due while the program runs."""
    notice = any(report.shutdown_reason for report in observations.reports)
    pause = NOTICE_INTERVAL if notice else timeouts.outputs_interval
    copy = observations.outputs
    if copy is None:
        running_at = attempt.sent_at if attempt.running_at is None else attempt.running_at
        return (running_at or 0.0) + pause
    if notice:
        return copy.ended_at + pause
    return copy.ended_at + max(pause, (copy.ended_at - copy.began_at) * (1 / MAX_SHARE - 1))


def _with_event(decision: Decision, text: str) -> Decision:
    return replace(decision, events=(Event(EventType.OUTPUTS, text), *decision.events))
