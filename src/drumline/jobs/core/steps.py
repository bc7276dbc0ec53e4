"""The progress of one attempt by its heartbeats: how far it is, and what of it is saved.

Pure: `advance` takes the next heartbeat and the time it was seen, by our clock. The steps of a
job's attempts show whether it is stuck, how many steps were run again, and what was lost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

LARGEST = 2.0**63
"""The bound of steps and metrics: SQLite stores no larger integer."""


@dataclass(frozen=True)
class Steps:
    """What an attempt has reported about its steps so far."""

    step: float
    stepped_at: float
    """When this step was first seen."""
    moving: bool = False
    """Whether a second step was reported: by then the program has compiled."""
    total: float | None = None
    resumed: float | None = None
    """The checkpoint it resumed from, 0 for a start from the beginning; None where not reported."""
    checkpoint: float | None = None
    saved_at: float | None = None
    """When the newest checkpoint of this attempt was first seen; None before it saved one."""
    tells_checkpoints: bool = False

    @property
    def last_step(self) -> bool:
        """Whether no further step will come."""
        return self.total is not None and self.step >= self.total

    def by(self, now: float) -> "Steps":
        """As an earlier server saw them, whose clock may have been ahead: nothing after `now`."""
        if self.stepped_at <= now and (self.saved_at is None or self.saved_at <= now):
            return self
        saved = None if self.saved_at is None else min(self.saved_at, now)
        return replace(self, stepped_at=min(self.stepped_at, now), saved_at=saved)


def advance(steps: Steps | None, heartbeat: Mapping[str, object], now: float) -> Steps | None:
    """The steps after one more heartbeat; a heartbeat without a step changes nothing."""
    step = number(heartbeat.get("step"))
    if step is None:
        return steps
    if steps is None:
        steps = Steps(step, now, resumed=number(heartbeat.get("resumed")))
    elif step != steps.step:
        # Backwards too: a loop that goes back to a checkpoint is alive.
        steps = replace(steps, step=step, stepped_at=now, moving=True)
    steps = replace(
        steps,
        total=number(heartbeat.get("total")) or steps.total,
        tells_checkpoints=steps.tells_checkpoints or "checkpoint" in heartbeat,
    )
    saved = number(heartbeat.get("checkpoint"))
    if saved is None or saved == steps.checkpoint:
        return steps
    fresh = saved != steps.resumed
    return replace(steps, checkpoint=saved, saved_at=now if fresh else steps.saved_at)


def steps_again(of_attempts: Iterable[Steps | None]) -> int | None:
    """Steps that more than one attempt ran; None where an attempt did not report where it began.

    Counted from what was seen: a step that ran between the last heartbeat and the end of an attempt
    is missed.
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
    """A finite number within bounds, or None: programs report what they like."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared, because an int may be too large to become a float; nan is in no range.
    return value if -LARGEST < value < LARGEST else None
