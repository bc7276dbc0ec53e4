"""The slices and requests that a job releases, and the slices that it holds back. Pure.

A slice with a bad host may be held back instead of released, because the cloud often regrants a
released slice within minutes, with the same bad host. Held-back slices cost as much as active
slices. So a job may hold back only a few. It releases all of its held-back slices once the program
runs elsewhere or no other slice is available.
"""

from collections.abc import Sequence
from dataclasses import replace

from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import (
    Decision,
    DesiredState,
    Effect,
    EffectType,
    Event,
    Job,
    Placement,
    PlacementRole,
    Timeouts,
)
from drumline.observed import Fault, FaultType, HostPhase, HostReport

REJECTIONS_PER_HELD_BACK = 3
"""Rejected slices in a row for each slice that a job holds back without `parking` in its job file.
The cloud often regrants a returned slice at once: such a job was granted the same excluded host a
hundred times."""
MAX_HELD_BACK = 4
"""The maximum number of slices that a job holds back without `parking` in its job file."""


def release_or_hold_back(
    job: Job, placement: Placement, reason: str, *, idle: bool
) -> tuple[Job, tuple[Effect, ...], tuple[Event, ...]]:
    """Return the job without its slices, which are held back if the limit allows, else released.

    Slices that may still run the program are not `idle` and are always released. The next attempt
    waits for the deletion of released slices, but not of held-back slices, and two programs would
    write to the same checkpoints.
    """
    limit = job.parking
    if limit is None:
        limit = min(job.turned_down // REJECTIONS_PER_HELD_BACK, MAX_HELD_BACK)
    if not idle or len(job.held_back) >= limit:
        return job.drop(placement), (Effect(EffectType.RELEASE, placement, reason),), ()
    job = job.put(replace(placement, role=PlacementRole.HELD_BACK))
    where = f"{placement.chips} chips in {placement.zone}"
    return job, (), (Event(EventType.PARKED, f"{placement.name} ({where}) until another runs"),)


def release_unneeded(decision: Decision, reports: Sequence[HostReport]) -> Decision:
    """Add the release of requests and held-back slices that the job no longer needs.

    Other requests stay until every host of the active slices has answered, and held-back slices
    until the program runs.
    """
    job = decision.job
    if job.status.ended:
        decision = release_requests(decision, "the job is over")
        return _release_all_held_back(decision, "the job is over")
    # A server that has just started has no reports yet, and all() of none is True.
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


def _is_working(report: HostReport) -> bool:
    """Return True if a host runs the program or has finished it, and passed its burn-in."""
    finished = report.phase is HostPhase.EXITED and report.exit_code == 0
    working = finished or report.phase is HostPhase.RUNNING
    return working and report.burn_in in {"", "pass", "warn"}


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
    held-back slices would cost money until capacity returns.
    """
    job = decision.job
    tried_all = job.next_choice == 0 and not job.requests and fault.kind is FaultType.STOCKOUT
    if (fault.kind is FaultType.QUOTA and not job.requests) or tried_all:
        return release_held_back(decision)
    return decision


def release_held_back(decision: Decision) -> Decision:
    """Add the release of held-back slices, because the cloud grants no other slices."""
    return _release_all_held_back(decision, "no other slice is available")


def release_while_waiting(decision: Decision, now: float, timeouts: Timeouts) -> Decision:
    """Add the release of held-back slices if the job waits for a deletion and any of them is old.

    Some deletions never finish, and held-back slices would cost money forever. Until then, they
    stay, so that the next request is not granted the same host.
    """
    granted_at = [slices.ready_at or slices.asked_at for slices in decision.job.held_back]
    if not any(now - at > timeouts.deleting for at in granted_at):
        return decision
    return _release_all_held_back(decision, "the job waits for another slice to be deleted")


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
