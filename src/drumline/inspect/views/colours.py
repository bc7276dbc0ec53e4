"""Which colour each kind of operation has in a picture: the same kinds the same in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drumline.inspect.cost.timeline import COPIES, TimelineEvent
from drumline.inspect.views.tracks import COLLECTIVES

WAITING = "#d62839"
"""No kind has it: red is where the device waits."""
WAITING_PALE = "#fdeaec"
COPYING = "#6b7785"
"""Where it waits for a copy between its memories."""
OTHER = "other operations"

_FIXED = {
    "matmul": "#2f6db5",
    "elementwise": "#93c0e8",
    OTHER: "#bcc5cf",
    COPIES: "#8c97a3",
    "all-gather": "#e8a33d",
    "reduce-scatter": "#3a9f6b",
    "all-reduce": "#c26a1b",
    "all-to-all": "#c9649a",
    "collective-permute": "#1f9aa3",
    "collective-broadcast": "#8f8436",
}
_WRITTEN = ("#6b4fa1", "#9b82cf", "#453a73", "#b9a5e3", "#7d5fc4", "#5a3d86")
"""For kernels that somebody wrote, by how long they run; the last for all others."""


@dataclass(frozen=True)
class Colours:
    """What is shown under a name of its own, and how."""

    written: tuple[str, ...]

    @staticmethod
    def of(events: Iterable[tuple[TimelineEvent, int]]) -> Colours:
        """For the events of a program, with how often each happens."""
        seconds: dict[str, float] = {}
        marked = set()
        for event, times in events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.seconds * times
            # A part of a kernel may have lost the scope that names it: one that has it suffices.
            if f"kernel[{event.kind}" in event.place.op_name or event.kind == "custom-call":
                marked.add(event.kind)
        return Colours(tuple(sorted(marked, key=lambda kind: -seconds[kind])))

    def shown_as(self, event: TimelineEvent) -> str:
        """The name under which an event stands in the legend."""
        if event.resource == COPIES:
            return COPIES
        known = event.kind in COLLECTIVES or event.kind in _FIXED or event.kind in self.written
        return event.kind if known else OTHER

    def __getitem__(self, name: str) -> str:
        """The colour of a name in the legend."""
        if name in self.written and name not in _FIXED:
            return _WRITTEN[min(self.written.index(name), len(_WRITTEN) - 1)]
        return _FIXED.get(name, _FIXED[OTHER])


def is_dark(colour: str) -> bool:
    """Whether words on it had better be white."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def by_length(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The longest first; those that all pictures have in common stay comparable so."""
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
