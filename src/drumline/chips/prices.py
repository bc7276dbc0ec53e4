"""Prices of chips, storage and transfer in US dollars, with dates and sources.

Spot prices change up to monthly, list prices occasionally. Use them for comparisons and warnings,
not for accounting. They ignore research grants.
"""

from dataclasses import dataclass

from drumline.chips.names import UnknownName
from drumline.chips.slices import Slice
from drumline.chips.zones import region_of
from drumline.deprecated import renamed_keywords

AS_OF = "2026-08-22"
SOURCE = "Google's SKU prices as collected in the SkyPilot catalogue v8"

TIERS = ("spot", "on-demand")


@dataclass(frozen=True)
class Price:
    """The price of a chip-hour."""

    per_chip_hour: float
    tier: str
    region: str
    as_of: str = AS_OF
    source: str = SOURCE


# (on demand, spot) per chip-hour. v2 and v3 have separate prices for single hosts and pod slices.
_CHIP_HOUR: dict[str, dict[str, tuple[float, float | None]]] = {
    "v2": {
        "asia-east1": (1.305, 0.3915),
        "europe-west4": (1.2375, 0.3156),
        "us-central1": (1.125, 0.3375),
    },
    "v2 pod": {"europe-west4": (1.5, 0.3825), "us-central1": (1.5, 0.3825)},
    "v3": {
        "europe-west4": (2.2, 0.561),
        "us-central1": (2.0, 0.51),
        "us-east1": (2.0, None),
    },
    "v3 pod": {"europe-west4": (2.0, 0.66), "us-east1": (2.0, 0.6)},
    "v4": {"us-central2": (3.22, 0.9215)},
    "v5e": {
        "asia-east1": (1.3895, 0.4527),
        "asia-northeast1": (1.541, 0.2064),
        "asia-southeast1": (1.56, 0.78),
        "europe-north1": (1.3213, 0.6607),
        "europe-west1": (1.3213, 0.5285),
        "europe-west3": (1.416, 0.1896),
        "europe-west4": (1.56, 0.5356),
        "northamerica-northeast1": (1.3213, 0.177),
        "southamerica-west1": (1.716, 0.2298),
        "us-central1": (1.2, 0.3422),
        "us-east1": (1.2, 0.3422),
        "us-east4": (1.2, 0.5144),
        "us-east5": (1.2, 0.6),
        "us-south1": (1.416, 0.7196),
        "us-west1": (1.2, 0.3422),
        "us-west4": (1.2, 0.6068),
    },
    "v5p": {
        "europe-west1": (4.4595, 1.5294),
        "europe-west4": (4.2525, 0.8499),
        "us-central1": (4.2, 0.8136),
        "us-east1": (4.2, 0.8136),
        "us-east5": (4.2, 1.0588),
        "us-south1": (4.779, 0.6401),
    },
    "v6e": {
        "asia-northeast1": (3.24, 1.5299),
        "asia-south1": (3.24, 1.3789),
        "asia-southeast1": (2.97, 0.2673),
        "europe-west4": (2.97, 1.782),
        "southamerica-west1": (2.7, 1.08),
        "us-central1": (2.7, 0.6518),
        "us-east1": (2.7, 0.6518),
        "us-east4": (2.7, 0.2809),
        "us-east5": (2.7, 1.5437),
        "us-south1": (2.7, 0.9924),
        "us-west1": (2.7, 0.6518),
    },
}


@renamed_keywords(wanted="tpu_slice")
def price(tpu_slice: Slice, zone: str, tier: str) -> Price | None:
    """Return the price of a chip-hour of a slice in a zone, or None if none is published."""
    if tier not in TIERS:
        raise UnknownName(
            f"{tier!r} is not a tier with a list price; the tiers are {', '.join(TIERS)}"
        )
    region = region_of(zone)
    is_pod = tpu_slice.generation in {"v2", "v3"} and tpu_slice.hosts > 1
    table = f"{tpu_slice.generation} pod" if is_pod else tpu_slice.generation
    on_demand, spot = _CHIP_HOUR.get(table, {}).get(region, (None, None))
    per_chip = spot if tier == "spot" else on_demand
    return None if per_chip is None else Price(per_chip, tier, region)


@dataclass(frozen=True)
class StoragePrices:
    """Prices of Cloud Storage, standard class, in a single region."""

    per_gb_month: float = 0.02
    per_1000_class_a: float = 0.0050
    """Dollars per 1,000 operations that write or list."""
    per_1000_class_b: float = 0.0004
    """Dollars per 1,000 operations that read."""
    same_region_per_gb: float = 0.0
    cross_region_per_gb: tuple[float, float] = (0.02, 0.05)
    """Dollars per GB between the nearest and the farthest regions: at least $20 per TB."""
    internet_per_gb: float = 0.1
    boot_disk_gb: int = 100
    """The boot disk size of a TPU VM."""
    as_of: str = "2025-10"
    source: str = "Introduction to TPU & JAX, TPU Costs; Cloud Storage price list"


STORAGE = StoragePrices()
