"""Which zones are worth asking now. Pure: times come in as arguments.

A zone without capacity is left alone for a while, longer each time (multiplicative increase), and
comes back in steps (additive decrease) as requests are filled there. A preemption closes nothing:
a zone that preempts slices also grants them, and closing it would make capacity oscillate.
"""

from dataclasses import dataclass, field

from drumline.jobs.core.state import Choice, Zone

FIRST_BACKOFF = 30.0
"""Seconds that a zone is left alone after its first shortage."""
LONGEST_BACKOFF = 900.0
"""The most seconds: a zone that was empty all day is still asked four times an hour."""
RECOVERY = 60.0
"""Seconds taken off the backoff for each request that was filled."""
PENDING_LIMIT = 8
"""The most requests that wait in one zone for one kind of slice. The cloud fills them one by one; a
longer queue there gains nothing and costs quota and calls, so the other jobs wait here."""


@dataclass
class _Backoff:
    seconds: float = 0.0
    until: float = 0.0
    why: str = ""


@dataclass
class ZoneBackoff:
    """The backoff of each zone and kind of slice."""

    scale: float = 1.0
    """Factor on each backoff: the emulator's time runs faster."""
    _backoffs: dict[Choice, _Backoff] = field(default_factory=dict)

    def short(self, choice: Choice, why: str, now: float) -> None:
        """A request there was not filled."""
        backoff = self._backoffs.setdefault(choice, _Backoff())
        if now >= backoff.until:
            longer = backoff.seconds * 2 or FIRST_BACKOFF
            backoff.seconds = min(longer, LONGEST_BACKOFF)
        backoff.until = now + backoff.seconds * self.scale
        backoff.why = why

    def filled(self, choice: Choice) -> None:
        """A request there was filled."""
        backoff = self._backoffs.get(choice)
        if backoff is None:
            return
        backoff.seconds -= RECOVERY
        backoff.until = 0.0
        if backoff.seconds <= 0:
            del self._backoffs[choice]

    def zone(self, choice: Choice, pending: int, now: float) -> Zone:
        """Whether to ask there now, while `pending` requests of ours wait there already."""
        backoff = self._backoffs.get(choice)
        if backoff is not None and now < backoff.until:
            return Zone(open=False, why=backoff.why)
        if pending >= PENDING_LIMIT:
            return Zone(
                open=False,
                why=f"behind {pending} requests for {choice.accelerator} in {choice.zone}",
            )
        return Zone()
