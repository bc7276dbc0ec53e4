"""Which zones are worth asking now. Pure: times come in as arguments.

A zone that had nothing is left alone for a while, longer each time (multiplicative), and comes
back in steps (additive) as requests are filled there. One preemption closes nothing: a zone that
takes slices also gives them, and closing it makes a saw-tooth.
"""

from dataclasses import dataclass, field

from drumline.jobs.core.state import Choice, Zone

FIRST_REST = 30.0
"""Seconds a zone rests after it was short for the first time."""
LONGEST_REST = 900.0
"""A zone that was empty all day is still asked four times an hour."""
RECOVERY = 60.0
"""Seconds taken off the rest for each request that was filled."""
PENDING_LIMIT = 8
"""Requests that wait in one zone for one kind of slice. The cloud fills them one by one; a longer
queue there gains nothing and costs quota and calls, so the other jobs wait here."""


@dataclass
class _Rest:
    seconds: float = 0.0
    until: float = 0.0
    why: str = ""


@dataclass
class ZoneBackoff:
    """What is known of each zone and kind of slice."""

    scale: float = 1.0
    """The emulator lives faster: rests are multiplied by this."""
    _rests: dict[Choice, _Rest] = field(default_factory=dict)

    def short(self, choice: Choice, why: str, now: float) -> None:
        """A request there was not filled."""
        rest = self._rests.setdefault(choice, _Rest())
        if now >= rest.until:
            longer = rest.seconds * 2 or FIRST_REST
            rest.seconds = min(longer, LONGEST_REST)
        rest.until = now + rest.seconds * self.scale
        rest.why = why

    def filled(self, choice: Choice) -> None:
        """A request there was filled."""
        rest = self._rests.get(choice)
        if rest is None:
            return
        rest.seconds -= RECOVERY
        rest.until = 0.0
        if rest.seconds <= 0:
            del self._rests[choice]

    def zone(self, choice: Choice, pending: int, now: float) -> Zone:
        """Whether to ask there now, while `pending` requests of ours wait there already."""
        rest = self._rests.get(choice)
        if rest is not None and now < rest.until:
            return Zone(open=False, why=rest.why)
        if pending >= PENDING_LIMIT:
            return Zone(
                open=False,
                why=f"behind {pending} requests for {choice.accelerator} in {choice.zone}",
            )
        return Zone()
