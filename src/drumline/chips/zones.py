"""The zones of each generation, and what is in the same region.

Two sources: the zones that Google's documentation lists for everyone (`public`), and those where
the Cloud TPU API lists the accelerator types as well, which are open to projects with a grant.
"""

import re
from dataclasses import dataclass

from drumline.chips.names import UnknownName, nearest
from drumline.chips.slices import Slice

DOCUMENTED = "Cloud TPU documentation, TPU regions and zones, read 2026-11"
LISTED = "accelerator types of the Cloud TPU API, crawl of 2026-08-22 (SkyPilot catalogue v8)"


@dataclass(frozen=True)
class Place:
    """A zone that has a generation; `sizes` are the suffixes it has, None for all."""

    zone: str
    public: bool
    sizes: tuple[int, ...] | None = None

    @property
    def source(self) -> str:
        """The source of this fact."""
        return DOCUMENTED if self.public else LISTED


def _public(*zones: str, sizes: tuple[int, ...] | None = None) -> tuple[Place, ...]:
    return tuple(Place(zone, True, sizes) for zone in zones)


def _granted(*zones: str, sizes: tuple[int, ...] | None = None) -> tuple[Place, ...]:
    return tuple(Place(zone, False, sizes) for zone in zones)


_V2_PODS = (32, 128, 256, 512)
_PLACES: dict[str, tuple[Place, ...]] = {
    "v2": (
        *_public("us-central1-b", "us-central1-c", sizes=(8,)),
        *_public("us-central1-a", sizes=_V2_PODS),
        *_public("europe-west4-a"),
        *_public("asia-east1-c", sizes=(8,)),
        *_granted("us-central1-f", sizes=(8,)),
    ),
    "v3": (
        *_public("us-central1-a", "us-central1-b", sizes=(8,)),
        *_public("europe-west4-a"),
        *_granted("us-central1-f", sizes=(8,)),
        *_granted("us-east1-d"),
    ),
    "v4": _public("us-central2-b"),
    "v5e": (
        *_public("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"),
        *_public("europe-west4-b", "asia-southeast1-b"),
        *_granted("us-east1-b", "us-east1-c", "us-east4-b", "us-east5-a", "us-east5-b"),
        *_granted("us-east5-c", "us-south1-b", "us-west4-b", "northamerica-northeast1-b"),
        *_granted("southamerica-west1-b", "southamerica-west1-c", "europe-north1-a"),
        *_granted("europe-north1-c", "europe-west1-b", "europe-west1-c", "europe-west3-c"),
        *_granted("europe-west4-a", "asia-east1-a", "asia-east1-b", "asia-east1-c"),
        *_granted("asia-northeast1-b"),
    ),
    "v5p": (
        *_public("us-central1-a", "us-east5-a", "europe-west4-b"),
        *_granted("us-east1-d", "us-east5-b", "us-east5-c", "us-south1-a", "us-south1-b"),
        *_granted("us-south1-c", "europe-west1-b", "europe-west1-d"),
    ),
    "v6e": (
        *_public("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b"),
        *_public("europe-west4-a", "asia-northeast1-b", "southamerica-west1-a"),
        *_granted("us-central1-a", "us-central1-c", "us-central2-b", "us-east4-a", "us-east5-c"),
        *_granted("us-south1-a", "us-south1-c", "us-west1-c", "southamerica-east1-c"),
        *_granted("asia-east1-c", "asia-south1-b", "asia-south1-c", "asia-southeast1-b"),
    ),
    "7x": _public("us-central1-c"),
}
LOCAL_ZONES = ("local-a", "local-b", "local-c")
"""Zones that only the emulator has, all in the region `local`, with every generation."""
_ZONES = {place.zone for places in _PLACES.values() for place in places}
_ZONE = re.compile(r"(?P<region>[a-z]+-[a-z]+[0-9]+)-[a-z][a-z0-9]*")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")


def places(wanted: Slice) -> tuple[Place, ...]:
    """The zones that have this slice, those open to everyone first."""
    size = int(wanted.name.rpartition("-")[2])
    return tuple(
        place for place in _PLACES[wanted.generation] if place.sizes is None or size in place.sizes
    )


def zones() -> tuple[str, ...]:
    """Every zone with a TPU, by name."""
    return tuple(sorted(_ZONES))


def generations_in(zone: str) -> tuple[str, ...]:
    """The generations that a zone has, oldest first; none for a zone without TPUs."""
    return tuple(
        name for name, there in _PLACES.items() if any(place.zone == zone for place in there)
    )


def region_of(zone: str) -> str:
    """The region of a zone: `us-central2` of `us-central2-b`."""
    if zone in LOCAL_ZONES:
        return "local"
    match = _ZONE.fullmatch(zone)
    if match:
        return match["region"]
    if _REGION.fullmatch(zone):
        inside = [name for name in zones() if name.startswith(f"{zone}-")]
        there = ", ".join(inside) or "none with TPUs"
        raise UnknownName(f"{zone!r} is a region; zones there: {there}")
    near = nearest(zone, zones())
    hint = f"nearest: {', '.join(near)}" if near else "one looks like us-central2-b"
    raise UnknownName(f"{zone!r} is no zone; {hint}")


def same_region(zone: str, bucket_location: str) -> bool:
    """Whether reading that bucket from that zone stays within one region, and so is free.

    A bucket in a multi-region (`US`, `EU`, `ASIA`) or a dual-region (`NAM4`,
    `US-CENTRAL1+US-EAST1`) is in no zone's region, even where the zone lies inside it.
    """
    return bucket_location.strip().casefold() == region_of(zone)
