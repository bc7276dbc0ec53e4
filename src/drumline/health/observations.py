"""What a burn-in saw, as values that travel between hosts. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Value = tuple[int, ...]

SAME, ZERO, HOP, REDUCED = "same", "zero", "hop", "reduced"
"""How values are judged: they should be the same on all chips; their first number should be 0; that
of what a chip received should be 0; that of what all chips together made should be 0."""


@dataclass(frozen=True)
class Observation:
    """One run of one program on every chip."""

    test: str
    subject: str
    """What was computed, with what: values of one test and subject should be equal over runs."""
    run: int
    rule: str
    values: Mapping[int, Value]
    """By device."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    flops: float = 0.0
    """Operations of each chip within `seconds`."""
    bytes: float = 0.0
    truth: Value | None = None
    """The value, where the host knows it."""
    senders: Mapping[int, int] = field(default_factory=dict)
    """For each chip the one that it received from in this hop; none before the first."""

    def as_json(self) -> dict[str, Any]:
        """With lists for pairs, as JSON has no other keys than text."""
        return {
            **vars(self),
            "values": [[device, *value] for device, value in self.values.items()],
            "seconds": list(self.seconds.items()),
            "senders": list(self.senders.items()),
        }


def from_json(told: dict[str, Any]) -> Observation:
    """What `as_json` made."""
    return Observation(
        **{
            **told,
            "values": {device: tuple(value) for device, *value in told["values"]},
            "seconds": dict(told["seconds"]),
            "senders": dict(told["senders"]),
            "truth": None if told["truth"] is None else tuple(told["truth"]),
        }
    )


def joined(observations: Iterable[Observation]) -> list[Observation]:
    """Those of one run, made by several hosts each for its own chips, become one."""
    found: dict[tuple[str, str, int], Observation] = {}
    for seen in observations:
        key = (seen.test, seen.subject, seen.run)
        known = found.get(key)
        found[key] = (
            seen
            if known is None
            else replace(
                known,
                values={**known.values, **seen.values},
                seconds={**known.seconds, **seen.seconds},
            )
        )
    return list(found.values())
