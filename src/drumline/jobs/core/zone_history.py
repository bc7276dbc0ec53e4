"""What this home has seen of each zone: the waits for slices, refusals, and lives of slices. Pure.

Spot slices are granted within minutes or not for hours, and many of them are lost soon after their
grant. So the newest events count most: the health of a zone falls with each refusal and each early
loss, and recovers within an hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, median

EARLY_LOSS = 900.0
"""A slice that is lost within this time counts against its zone. Most slices that live for 15
minutes live for hours."""
FAILURE_FACTOR = 0.7
"""Factor on the health of a zone for each refusal or early loss."""
RECOVERY_SECONDS = 3600.0
"""Seconds in which the health of a zone recovers from 0 to 1."""
HEALTHY = 0.5
"""The health from which a zone is reliable: two failures within a few minutes are too many."""
USUAL_LIFETIME = 2 * 3600.0
"""The lifetime in seconds that a slice is assumed to have if nothing is known. Training assumes the
same, see train/save_interval.py."""
MAX_EVENTS = 50
"""The newest events of a zone and accelerator that count."""


class ZoneEventType(StrEnum):
    """The kind of an event of a zone."""

    GRANTED = "granted"
    """A slice was ready, some seconds after its request."""
    REFUSED = "refused"
    """A request was refused, or given up after some seconds."""
    LOST = "lost"
    """A slice was lost some seconds after it was ready."""


@dataclass(frozen=True)
class ZoneEvent:
    """One event of a zone and accelerator."""

    at: float
    kind: ZoneEventType
    seconds: float


@dataclass(frozen=True)
class ZoneSummary:
    """The newest events of a zone and accelerator, in numbers."""

    granted: int = 0
    refused: int = 0
    lost: int = 0
    early_losses: int = 0
    wait: float | None = None
    """The median seconds from a request to a slice that is ready; None if there was none."""
    lifetime: float | None = None
    """The median seconds from a slice that is ready to its loss; None if none was lost."""
    health: float = 1.0
    """From 0 to 1, see the top of the file."""

    @property
    def reliable(self) -> bool:
        """True if the zone should be asked before those that are not."""
        return self.health >= HEALTHY


def summarize(events: Sequence[ZoneEvent], now: float, early_loss: float) -> ZoneSummary:
    """Return the events of a zone and accelerator, oldest first, in numbers.

    A slice that is lost within `early_loss` seconds counts against the zone.
    """
    health, last_failure = 1.0, 0.0
    by_kind: dict[ZoneEventType, list[float]] = {kind: [] for kind in ZoneEventType}
    for event in events:
        by_kind[event.kind].append(event.seconds)
        early = event.kind is ZoneEventType.LOST and event.seconds < early_loss
        if early or event.kind is ZoneEventType.REFUSED:
            health = FAILURE_FACTOR * _recovered(health, event.at - last_failure)
            last_failure = event.at
    granted, lost = by_kind[ZoneEventType.GRANTED], by_kind[ZoneEventType.LOST]
    return ZoneSummary(
        granted=len(granted),
        refused=len(by_kind[ZoneEventType.REFUSED]),
        lost=len(lost),
        early_losses=sum(seconds < early_loss for seconds in lost),
        wait=median(granted) if granted else None,
        lifetime=median(lost) if lost else None,
        health=_recovered(health, now - last_failure),
    )


def _recovered(health: float, seconds: float) -> float:
    return min(1.0, health + max(0.0, seconds) / RECOVERY_SECONDS)


def mean_lifetime(events: Sequence[ZoneEvent], usual_lifetime: float) -> float | None:
    """Estimate the mean lifetime of slices of a zone and accelerator; None without a loss.

    The estimate is the time that slices lived, divided by the number of losses. It is not the mean
    of the lost slices alone, because those that their jobs released had lived without a loss. Their
    lives are not recorded, so each counts with the mean of the lost slices. One more slice that was
    lost after `usual_lifetime` seconds is counted, so that a single early loss does not decide.

    The interval between checkpoints depends on this ratio alone, whatever the distribution of the
    lives, as long as most slices live longer than an interval. A median would ignore the slices
    that live for hours.
    """
    lives = [event.seconds for event in events if event.kind is ZoneEventType.LOST]
    grants = sum(event.kind is ZoneEventType.GRANTED for event in events)
    if not lives:
        return None
    # The grants of some lost slices may be older than the events that are kept.
    slices = max(grants, len(lives))
    return (usual_lifetime + slices * mean(lives)) / (1 + len(lives))
