"""What a job's slices cost, and how much of that was for steps that were lost. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.chips import LOCAL_ZONES, chip, price, region_of, slice_of
from drumline.jobs.core.state import Choice, Outcome
from drumline.jobs.core.steps import Steps
from drumline.jobs.store.records import SliceRow
from drumline.jobs.store.specs import StoredSpec

Attempt = Mapping[str, Any]

_KEPT = frozenset({Outcome.SUCCEEDED.value, Outcome.LEFT.value})
"""Outcomes of attempts that lost nothing, as the program saved its work."""


def per_hour(accelerator: str, zone: str, capacity: str) -> float | None:
    """The price of a slice in dollars an hour; reserved capacity counts at the list price."""
    if zone in LOCAL_ZONES:
        return None
    tier = "spot" if capacity == "spot" else "on-demand"
    wanted = slice_of(accelerator)
    found = price(wanted, zone, tier)
    return None if found is None else found.per_chip_hour * wanted.chips


def cost(rows: Iterable[SliceRow], spec: StoredSpec, now: float) -> float | None:
    """What the slices of a job have cost so far; None where no price is known."""
    total, known = 0.0, False
    for row in rows:
        rate = per_hour(row.accelerator, row.zone, spec.capacity)
        if rate is None or row.ready is None:
            continue
        known = True
        # By the wall clock, which may have been set back in between.
        total += rate * max(0.0, (row.gone or now) - row.ready) / 3600
    return round(total, 4) if known else None


def cost_lost(
    attempts: Sequence[Attempt],
    by_attempt: Mapping[int, Steps],
    slices: Sequence[SliceRow],
    spec: StoredSpec,
) -> float | None:
    """The cost of time whose steps were lost; None where that is not known.

    For an attempt that was cut short, that is the time since its last checkpoint, or all of it
    if it saved none. It is not known for an attempt of a job with a `checkpoint` that never
    reported whether it saved one.
    """
    lost, tells = 0.0, any(steps.tells_checkpoints for steps in by_attempt.values())
    for attempt in attempts:
        ended, outcome = attempt["ended"], attempt["outcome"]
        begin = _paid_from(attempt, slices)
        if ended is None or outcome in _KEPT or begin is None or begin >= ended:
            continue
        rate = per_hour(attempt["accelerator"], attempt["zone"], spec.capacity)
        if rate is None:
            return None
        steps = by_attempt.get(attempt["number"])
        silent = not (steps.tells_checkpoints if steps else tells)
        if silent and attempt["running"] is not None and spec.checkpoint:
            return None
        saved = steps.saved_at if steps else None
        lost += rate * (ended - max(begin, saved or begin)) / 3600
    return round(lost, 4)


def _paid_from(attempt: Attempt, slices: Sequence[SliceRow]) -> float | None:
    """When an attempt began to cost: when its slice was ready, or later, at its own start."""
    ended = attempt["ended"]
    ready = [
        row.ready
        for row in slices
        if row.zone == attempt["zone"] and row.ready is not None and ended and row.ready <= ended
    ]
    return max(attempt["started"], max(ready)) if ready else None


EXAMPLE = "64 spot v6e chips in europe-west4-a"
_GRANT = re.compile(
    r"(?P<chips>[0-9,]+) (?P<capacity>spot|preemptible|on-demand|reserved) (?:Cloud )?(?:TPU )?"
    r"(?P<generation>\S+) chips? in (?:zone )?(?P<zone>\S+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Grant:
    """A number of chips of a kind, in one zone."""

    chips: int
    capacity: str
    generation: str
    zone: str

    def __str__(self) -> str:
        """The sentence that `read_grant` reads."""
        noun = "chip" if self.chips == 1 else "chips"
        return f"{self.chips} {self.capacity} {self.generation} {noun} in {self.zone}"


def read_grant(text: str) -> Grant:
    """A grant from its sentence. Raises ValueError, or UnknownName for a chip or a zone."""
    found = _GRANT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not like '{EXAMPLE}'")
    region_of(found["zone"])
    capacity = found["capacity"].lower()
    return Grant(
        chips=int(found["chips"].replace(",", "")),
        capacity="spot" if capacity == "preemptible" else capacity,
        generation=chip(found["generation"]).name,
        zone=found["zone"],
    )


def beyond_quota(choices: Iterable[Choice], capacity: str, grants: Sequence[Grant]) -> list[str]:
    """A warning for each slice and zone that the quota does not cover; none without a quota."""
    if not grants:
        return []
    without: dict[str, list[str]] = {}
    warnings = []
    for choice in choices:
        wanted = slice_of(choice.accelerator)
        granted = sum(
            grant.chips
            for grant in grants
            if (grant.capacity, grant.generation, grant.zone)
            == (capacity, wanted.generation, choice.zone)
        )
        if granted == 0:
            zones = without.setdefault(f"{capacity} {wanted.generation} chips", [])
            zones += [choice.zone] if choice.zone not in zones else []
        elif granted < wanted.chips:
            warnings.append(
                f"{wanted.name} has {wanted.chips:,} chips, more than your quota of "
                f"{granted:,} {capacity} {wanted.generation} chips in {choice.zone}"
            )
    warnings += [f"you have no quota of {what} in {', '.join(z)}" for what, z in without.items()]
    return warnings
