"""How one attempt goes, as its heartbeats tell: how far it is, and what of it is saved.

Pure: `advance` takes one heartbeat more and the time it was seen, by our clock. From the steps
of a job's attempts follow whether it is stuck, how many steps were run again, and what was lost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

LARGEST = 2.0**63
"""Figures from here on are no steps and no metrics, and no database holds them."""


@dataclass(frozen=True)
class Steps:
    """What an attempt has told of its steps so far."""

    step: float
    stepped_at: float
    """When this step was first seen."""
    moving: bool = False
    """Whether it has told a second step: what it compiles before is behind it then."""
    total: float | None = None
    resumed: float | None = None
    """The checkpoint it went on from, 0 for a start from the beginning; None where not told."""
    checkpoint: float | None = None
    saved_at: float | None = None
    """When the newest checkpoint of this attempt was first seen; None before it saved one."""
    tells_checkpoints: bool = False

    @property
    def last_step(self) -> bool:
        """Whether no further step will come."""
        return self.total is not None and self.step >= self.total


def advance(steps: Steps | None, told: Mapping[str, object], now: float) -> Steps | None:
    """The steps after one more heartbeat; one without a step changes nothing."""
    step = number(told.get("step"))
    if step is None:
        return steps
    if steps is None:
        steps = Steps(step, now, resumed=number(told.get("resumed")))
    elif step != steps.step:
        # Backwards too: a loop that goes back to a checkpoint is alive.
        steps = replace(steps, step=step, stepped_at=now, moving=True)
    steps = replace(
        steps,
        total=number(told.get("total")) or steps.total,
        tells_checkpoints=steps.tells_checkpoints or "checkpoint" in told,
    )
    saved = number(told.get("checkpoint"))
    if saved is None or saved == steps.checkpoint:
        return steps
    fresh = saved != steps.resumed
    return replace(steps, checkpoint=saved, saved_at=now if fresh else steps.saved_at)


def steps_again(of_attempts: Iterable[Steps | None]) -> int | None:
    """Steps that more than one attempt ran; None where an attempt did not tell where it began.

    Counted from what was seen: a step that ran between the last heartbeat and the end of an attempt
    is not known of.
    """
    again, reached = 0.0, None
    for steps in of_attempts:
        if steps is None:
            continue
        if reached is not None:
            if steps.resumed is None:
                return None
            again += max(0.0, reached - steps.resumed)
        reached = steps.step
    return round(again)


def number(value: object) -> float | None:
    """A figure that can be reckoned with, or None: programs report what they like."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared, because a whole number may be too large to become a float; nan is in no range.
    return value if -LARGEST < value < LARGEST else None
