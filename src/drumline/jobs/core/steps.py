"""The steps of one attempt, from its heartbeats: its progress and its checkpoints. Pure.

`update_steps` takes the next heartbeat and the time it was observed, by the server's clock. The
steps of a job's attempts show whether it is stuck, and how many steps it repeated and lost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

MAX_NUMBER = 2.0**63
"""The bound of steps and metrics, because SQLite stores no larger integer."""


@dataclass(frozen=True)
class Steps:
    """The steps that an attempt has reported. Saved as JSON, so the field names do not change."""

    step: float
    stepped_at: float
    """The timestamp of the first observation of this step."""
    moving: bool = False
    """True after the second step. The program has compiled by then."""
    total: float | None = None
    resumed: float | None = None
    """The step of the checkpoint it resumed from, 0 for a new start; None if not reported."""
    checkpoint: float | None = None
    saved_at: float | None = None
    """The timestamp of the first observation of the attempt's newest checkpoint, if there is
    one."""
    tells_checkpoints: bool = False
    """True if the program reports its checkpoints."""
    fenced: bool = False
    """True if the program has claimed its checkpoint folder with its fencing number."""

    @property
    def last_step(self) -> bool:
        """True if no further step will come."""
        return self.total is not None and self.step >= self.total

    def clamped(self, now: float) -> "Steps":
        """Move times in the future to `now`, because the clock of a previous server may differ."""
        if self.stepped_at <= now and (self.saved_at is None or self.saved_at <= now):
            return self
        saved_at = None if self.saved_at is None else min(self.saved_at, now)
        return replace(self, stepped_at=min(self.stepped_at, now), saved_at=saved_at)


def update_steps(steps: Steps | None, heartbeat: Mapping[str, object], now: float) -> Steps | None:
    """Return the steps after a heartbeat. A heartbeat without a step has no effect."""
    step = to_number(heartbeat.get("step"))
    if step is None:
        return steps
    if steps is None:
        steps = Steps(step, now, resumed=to_number(heartbeat.get("resumed")))
    elif step != steps.step:
        # A smaller step counts too: a loop that returns to a checkpoint is not stuck.
        steps = replace(steps, step=step, stepped_at=now, moving=True)
    steps = replace(
        steps,
        total=to_number(heartbeat.get("total")) or steps.total,
        tells_checkpoints=steps.tells_checkpoints or "checkpoint" in heartbeat,
        fenced=steps.fenced or heartbeat.get("fenced") is True,
    )
    checkpoint = to_number(heartbeat.get("checkpoint"))
    if checkpoint is None or checkpoint == steps.checkpoint:
        return steps
    new = checkpoint != steps.resumed
    return replace(steps, checkpoint=checkpoint, saved_at=now if new else steps.saved_at)


def count_repeated_steps(attempts: Iterable[Steps | None]) -> int | None:
    """Count the steps that more than one attempt ran; None if an attempt's start is unknown.

    Steps between the last heartbeat and the end of an attempt are missed.
    """
    repeated, reached = 0.0, None
    for steps in attempts:
        if steps is None:
            continue
        if reached is not None:
            if steps.resumed is None:
                return None
            repeated += max(0.0, reached - steps.resumed)
        reached = steps.step
    return round(repeated)


def to_number(value: object) -> float | None:
    """Return a finite number within bounds, else None, because programs report any value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The comparison does not convert, because an int may be too large for a float. nan is False.
    return value if -MAX_NUMBER < value < MAX_NUMBER else None
