"""The quota of a project as its owner wrote it in the settings, and jobs that exceed it. Pure.

Google has no reliable way to read a user's quota by zone, so `drumline init` takes it from the
letter that grants it: `64 spot v6e chips in europe-west4-a`. It is only for warnings: the letter
may be old, and Google decides.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumline.chips import chip, region_of, slice_of
from drumline.jobs.core.state import Choice

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
