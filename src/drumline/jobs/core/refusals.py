"""The action that follows a refused or failed request for slices, by fault. Pure."""

from enum import StrEnum

from drumline.observed import Fault, FaultType, Scope


class RefusalAction(StrEnum):
    """The next action of a job after a refusal."""

    NEXT_CANDIDATE = "next candidate"
    """Request the next candidate. The backoff of this zone grows."""
    RETRY = "retry"
    """Repeat the request after a growing backoff, because no other zone would accept it."""
    PREEMPTION = "preemption"
    """Count a preemption: the cloud took the slice back before it was ready."""
    GIVE_UP = "give up"
    """End the job, because only a change of the job file can help."""


_ACTIONS = {
    FaultType.STOCKOUT: RefusalAction.NEXT_CANDIDATE,
    FaultType.QUOTA: RefusalAction.NEXT_CANDIDATE,
    FaultType.RATE: RefusalAction.RETRY,
    FaultType.DENIED: RefusalAction.NEXT_CANDIDATE,
    # The job continues by itself after the next login of the user.
    FaultType.LOGIN: RefusalAction.RETRY,
    FaultType.PREEMPTED: RefusalAction.PREEMPTION,
    FaultType.CONFLICT: RefusalAction.RETRY,
    FaultType.INVALID: RefusalAction.GIVE_UP,
    FaultType.NOT_FOUND: RefusalAction.RETRY,
    FaultType.TRANSIENT: RefusalAction.RETRY,
    # An unknown fault is no reason to give up the zone or the job.
    FaultType.UNKNOWN: RefusalAction.NEXT_CANDIDATE,
}


REFUSALS_PER_CANDIDATE = 3
"""Refusals in a row after which the next candidate is requested. A service may fail in one zone for
weeks, and a permission may be missing in one zone only."""
# A login is missing in all zones, and calls are counted for the whole project.
_SAME_EVERYWHERE = frozenset({FaultType.LOGIN, FaultType.RATE})


def action_for(fault: Fault) -> RefusalAction:
    """Return the action that follows a fault."""
    action = _ACTIONS[fault.kind]
    if fault.kind is FaultType.DENIED and fault.scope is Scope.REQUEST:
        # A policy forbids the request itself. Only a change of the policy or of the job file helps.
        return RefusalAction.GIVE_UP
    if fault.scope is Scope.PROJECT and action is RefusalAction.NEXT_CANDIDATE:
        # Other zones refuse as well. The job continues once an administrator grants access.
        return RefusalAction.RETRY
    if fault.scope is Scope.ZONE and action is RefusalAction.GIVE_UP:
        return RefusalAction.NEXT_CANDIDATE
    return action


def leaves_candidate(fault: Fault, refusals: int) -> bool:
    """Return True if the last of `refusals` in a row leads to a request of the next candidate.

    Until then a request that is to be repeated stays with its candidate.
    """
    return fault.kind not in _SAME_EVERYWHERE and refusals % REFUSALS_PER_CANDIDATE == 0
