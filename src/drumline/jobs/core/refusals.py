"""What follows when a placement was refused, or a request for one failed. Pure."""

from enum import StrEnum

from drumline.observed import Fault, FaultKind, Scope


class Action(StrEnum):
    """What the job does next."""

    NEXT_CHOICE = "next choice"
    """The job asks for its next choice, and this zone is left alone, longer each time."""
    RETRY = "retry"
    """The same request is made again after a growing backoff: another zone would do no better."""
    PREEMPTION = "preemption"
    """The cloud took the slice back before it was ready."""
    GIVE_UP = "give up"
    """Nothing but a change of the job file can help."""


_USUAL = {
    FaultKind.STOCKOUT: Action.NEXT_CHOICE,
    FaultKind.QUOTA: Action.NEXT_CHOICE,
    FaultKind.RATE: Action.RETRY,
    FaultKind.DENIED: Action.NEXT_CHOICE,
    # The user logs in again and the job goes on by itself: no reason to end it.
    FaultKind.LOGIN: Action.RETRY,
    FaultKind.PREEMPTED: Action.PREEMPTION,
    FaultKind.CONFLICT: Action.RETRY,
    FaultKind.INVALID: Action.GIVE_UP,
    FaultKind.NOT_FOUND: Action.RETRY,
    FaultKind.TRANSIENT: Action.RETRY,
    # Its meaning is unknown, so neither the zone nor the job is given up.
    FaultKind.UNKNOWN: Action.NEXT_CHOICE,
}


def action(fault: Fault) -> Action:
    """What a fault leads to, by its kind and its scope."""
    usual = _USUAL[fault.kind]
    if fault.scope is Scope.PROJECT and usual is Action.NEXT_CHOICE:
        # No zone does better, and once an administrator has granted it the job goes on by itself.
        return Action.RETRY
    if fault.scope is Scope.ZONE and usual is Action.GIVE_UP:
        return Action.NEXT_CHOICE
    return usual
