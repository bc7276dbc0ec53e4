"""The action that follows a refused or failed request for slices, by fault. Pure."""

from enum import StrEnum

from drumline.observed import Fault, FaultKind, Scope


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
    FaultKind.STOCKOUT: RefusalAction.NEXT_CANDIDATE,
    FaultKind.QUOTA: RefusalAction.NEXT_CANDIDATE,
    FaultKind.RATE: RefusalAction.RETRY,
    FaultKind.DENIED: RefusalAction.NEXT_CANDIDATE,
    # The job continues by itself once the user has logged in again.
    FaultKind.LOGIN: RefusalAction.RETRY,
    FaultKind.PREEMPTED: RefusalAction.PREEMPTION,
    FaultKind.CONFLICT: RefusalAction.RETRY,
    FaultKind.INVALID: RefusalAction.GIVE_UP,
    FaultKind.NOT_FOUND: RefusalAction.RETRY,
    FaultKind.TRANSIENT: RefusalAction.RETRY,
    # An unknown fault is no reason to give up the zone or the job.
    FaultKind.UNKNOWN: RefusalAction.NEXT_CANDIDATE,
}


def action_for(fault: Fault) -> RefusalAction:
    """Return the action that follows a fault."""
    action = _ACTIONS[fault.kind]
    if fault.scope is Scope.PROJECT and action is RefusalAction.NEXT_CANDIDATE:
        # Other zones refuse as well. The job continues once an administrator grants access.
        return RefusalAction.RETRY
    if fault.scope is Scope.ZONE and action is RefusalAction.GIVE_UP:
        return RefusalAction.NEXT_CANDIDATE
    return action
