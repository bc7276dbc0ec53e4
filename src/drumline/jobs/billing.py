"""The cost of a job's slices, the cost of lost steps, and the quota of a project. Pure.

Google has no reliable way to read a user's quota by zone, so `drumline init` takes it from the
letter that grants it: `64 spot v6e chips in europe-west4-a`. It is only used for warnings, because
the letter may be old, and Google decides.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from drumline.chips import LOCAL_ZONES, chip, price, region_of, slice_of, zone_offers
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Candidate,
    OldProgram,
)
from drumline.jobs.core.steps import Steps
from drumline.jobs.store.records import SliceRow
from drumline.jobs.store.specs import StoredSpec

Attempt = Mapping[str, Any]
RateOf = Callable[[str, str, str], float | None]
"""A price in dollars per hour, of an accelerator in a zone with a capacity tier."""

_SAVED = frozenset({EndReason.SUCCEEDED.outcome, EndReason.RESTART_REQUESTED.outcome})
"""Outcomes of attempts without lost steps, because the program saved its work."""


def price_per_hour(accelerator: str, zone: str, capacity: str) -> float | None:
    """Return the price of a slice on Google in dollars per hour; None if it is not known.

    Reserved capacity has the list price.
    """
    if zone in LOCAL_ZONES:
        return None
    tier = "spot" if capacity == "spot" else "on-demand"
    slice_type = slice_of(accelerator)
    quote = price(slice_type, zone, tier)
    return None if quote is None else quote.per_chip_hour * slice_type.chips


@dataclass(frozen=True)
class Prices:
    """The prices of slices in dollars per hour. Slices of the emulator are free."""

    emulated: bool
    """True if the emulator serves all zones, also those of Google."""

    def per_hour(self, accelerator: str, zone: str, capacity: str) -> float | None:
        """Return the price of a slice; None for an emulated slice, or if it is not known."""
        return None if self.emulated else price_per_hour(accelerator, zone, capacity)

    def would_per_hour(self, accelerator: str, zone: str, capacity: str) -> float | None:
        """Return what an emulated slice would cost on Google; None for a real slice."""
        reference = self.reference_zone(accelerator, zone, capacity)
        return None if reference is None else price_per_hour(accelerator, reference, capacity)

    def reference_zone(self, accelerator: str, zone: str, capacity: str) -> str | None:
        """Return the zone of the prices of an emulated slice; None for a real slice."""
        if zone in LOCAL_ZONES:
            return cheapest_zone(accelerator, capacity)
        return zone if self.emulated else None

    def text(self, accelerator: str, zone: str, capacity: str) -> str:
        """Return the price of a slice as text, or an empty string if it is unknown."""
        if rate := self.per_hour(accelerator, zone, capacity):
            return f"about ${rate:,.2f} an hour"
        rate = self.would_per_hour(accelerator, zone, capacity)
        return f"would be about ${rate:,.2f} an hour on Google" if rate else ""


@lru_cache
def cheapest_zone(accelerator: str, capacity: str) -> str | None:
    """Return the zone with the lowest price of a slice, if possible one that needs no grant."""
    offers = zone_offers(slice_of(accelerator))
    rates = {offer: price_per_hour(accelerator, offer.zone, capacity) for offer in offers}
    priced = [(not offer.public, rate, offer.zone) for offer, rate in rates.items() if rate]
    return min(priced)[2] if priced else None


def cost_of_slices(
    rows: Iterable[SliceRow], spec: StoredSpec, now: float, rate_of: RateOf
) -> float | None:
    """Return the cost of a job's slices so far; None if no price is known."""
    total, known = 0.0, False
    for row in rows:
        rate = rate_of(row.accelerator, row.zone, spec.capacity)
        if rate is None or row.ready is None:
            continue
        known = True
        # At least 0, because the wall clock may have been set back.
        total += rate * max(0.0, (row.gone or now) - row.ready) / 3600
    return round(total, 4) if known else None


def unused_slices(rows: Iterable[SliceRow]) -> list[SliceRow]:
    """Return the slices that ran no program, because a different slice was ready earlier."""
    return [row for row in rows if row.program == OldProgram.NEVER]


def cost_of_lost_steps(
    attempts: Sequence[Attempt],
    steps_by_attempt: Mapping[int, Steps],
    slices: Sequence[SliceRow],
    spec: StoredSpec,
    rate_of: RateOf,
) -> float | None:
    """Return the cost of the time whose steps were lost; None if that is not known.

    An interrupted attempt loses the time since its last checkpoint, or all of its time without one.
    This is not known for a job with a `checkpoint` whose program never reported checkpoints.
    """
    cost = 0.0
    any_reports = any(steps.tells_checkpoints for steps in steps_by_attempt.values())
    for attempt in attempts:
        ended, outcome = attempt["ended"], attempt["outcome"]
        paid_from = _paid_from(attempt, slices)
        if ended is None or outcome in _SAVED or paid_from is None or paid_from >= ended:
            continue
        rate = rate_of(attempt["accelerator"], attempt["zone"], spec.capacity)
        if rate is None:
            return None
        steps = steps_by_attempt.get(attempt["number"])
        reports_checkpoints = steps.tells_checkpoints if steps else any_reports
        if not reports_checkpoints and attempt["running"] is not None and spec.checkpoint:
            return None
        saved_at = steps.saved_at if steps else None
        cost += rate * (ended - max(paid_from, saved_at or paid_from)) / 3600
    return round(cost, 4)


def _paid_from(attempt: Attempt, slices: Sequence[SliceRow]) -> float | None:
    """Return the start of an attempt's cost: when its slice was ready, or the attempt's start."""
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
    """A number of chips of one generation and capacity tier in one zone."""

    chips: int
    capacity: str
    generation: str
    zone: str

    def __str__(self) -> str:
        """Return the sentence that `parse_grant` reads."""
        noun = "chip" if self.chips == 1 else "chips"
        return f"{self.chips} {self.capacity} {self.generation} {noun} in {self.zone}"


def parse_grant(text: str) -> Grant:
    """Parse the sentence of a grant. Raises ValueError, or UnknownName for a chip or a zone."""
    match = _GRANT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not like '{EXAMPLE}'")
    region_of(match["zone"])
    capacity = match["capacity"].lower()
    return Grant(
        chips=int(match["chips"].replace(",", "")),
        capacity="spot" if capacity == "preemptible" else capacity,
        generation=chip(match["generation"]).name,
        zone=match["zone"],
    )


def quota_warnings(
    candidates: Iterable[Candidate], capacity: str, grants: Sequence[Grant]
) -> list[str]:
    """Return a warning for each candidate that the quota does not cover; none without a quota."""
    if not grants:
        return []
    without_quota: dict[str, list[str]] = {}
    warnings = []
    for candidate in candidates:
        slice_type = slice_of(candidate.accelerator)
        granted = sum(
            grant.chips
            for grant in grants
            if (grant.capacity, grant.generation, grant.zone)
            == (capacity, slice_type.generation, candidate.zone)
        )
        if granted == 0:
            zones = without_quota.setdefault(f"{capacity} {slice_type.generation} chips", [])
            zones += [candidate.zone] if candidate.zone not in zones else []
        elif granted < slice_type.chips:
            warnings.append(
                f"{slice_type.name} has {slice_type.chips:,} chips, more than your quota of "
                f"{granted:,} {capacity} {slice_type.generation} chips in {candidate.zone}"
            )
    for chips, zones in without_quota.items():
        warnings.append(f"you have no quota of {chips} in {', '.join(zones)}")
    return warnings
