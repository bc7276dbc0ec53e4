"""The zones of the chip generations, and the regions of zones and buckets.

Google's documentation lists the public zones. The Cloud TPU API lists accelerator types in further
zones, which are for projects with a grant.
"""

import re
from dataclasses import dataclass

from drumline.chips.names import UnknownName, nearest
from drumline.chips.slices import Slice
from drumline.deprecated import renamed_keywords

DOCUMENTED = "Cloud TPU documentation, TPU regions and zones, read 2026-11"
LISTED = "accelerator types of the Cloud TPU API, crawl of 2026-08-22 (SkyPilot catalogue v8)"


@dataclass(frozen=True)
class ZoneOffer:
    """A zone that offers a generation."""

    zone: str
    public: bool
    """True for a public zone, False if it needs a grant."""
    sizes: tuple[int, ...] | None = None
    """The suffixes of the slices offered, or None for all."""

    @property
    def source(self) -> str:
        """The source of this entry."""
        return DOCUMENTED if self.public else LISTED


def _public(*zones: str, sizes: tuple[int, ...] | None = None) -> tuple[ZoneOffer, ...]:
    return tuple(ZoneOffer(zone, True, sizes) for zone in zones)


def _granted(*zones: str, sizes: tuple[int, ...] | None = None) -> tuple[ZoneOffer, ...]:
    return tuple(ZoneOffer(zone, False, sizes) for zone in zones)


_V2_PODS = (32, 128, 256, 512)
_OFFERS: dict[str, tuple[ZoneOffer, ...]] = {
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
"""Zones of the emulator, all in the region `local`. They offer every generation."""
_ZONES = {offer.zone for offers in _OFFERS.values() for offer in offers}
_ZONE = re.compile(r"(?P<region>[a-z]+-[a-z]+[0-9]+)-[a-z][a-z0-9]*")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")


@renamed_keywords(wanted="tpu_slice")
def zone_offers(tpu_slice: Slice) -> tuple[ZoneOffer, ...]:
    """Return the zones that offer a slice, starting with the public zones."""
    size = int(tpu_slice.name.rpartition("-")[2])
    offers = _OFFERS[tpu_slice.generation]
    return tuple(offer for offer in offers if offer.sizes is None or size in offer.sizes)


def zones() -> tuple[str, ...]:
    """Return all zones with TPUs, sorted by name."""
    return tuple(sorted(_ZONES))


def generations_in(zone: str) -> tuple[str, ...]:
    """Return the generations that a zone offers, starting with the oldest."""
    return tuple(
        generation
        for generation, offers in _OFFERS.items()
        if any(offer.zone == zone for offer in offers)
    )


def region_of(zone: str) -> str:
    """Return the region of a zone: `us-central2` for `us-central2-b`."""
    if zone in LOCAL_ZONES:
        return "local"
    match = _ZONE.fullmatch(zone)
    if match:
        return match["region"]
    if _REGION.fullmatch(zone):
        in_region = [name for name in zones() if name.startswith(f"{zone}-")]
        listed = ", ".join(in_region) or "none with TPUs"
        raise UnknownName(f"{zone!r} is a region; its zones: {listed}")
    matches = nearest(zone, zones())
    hint = f"nearest: {', '.join(matches)}" if matches else "example: us-central2-b"
    raise UnknownName(f"{zone!r} is not a zone; {hint}")


def same_region(zone: str, bucket_location: str) -> bool:
    """Return True if a zone and a bucket are in the same region, so that reads are free.

    This is False for buckets in a multi-region (`US`, `EU`, `ASIA`) or a dual-region (`NAM4`,
    `US-CENTRAL1+US-EAST1`), even if the zone is inside it.
    """
    return bucket_location.strip().casefold() == region_of(zone)
