"""Facts about hardware: chips, slices, zones, prices. No input or output, nothing of ours imported.

The job manager asks it how many hosts to wait for, the cost model how fast the links are, the
command line what to print. Each figure carries its source.
"""

from drumline.chips.catalogue import Chip, chip, chips
from drumline.chips.names import UnknownName
from drumline.chips.prices import STORAGE, TIERS, Price, StoragePrices, price
from drumline.chips.slices import IciAxis, Slice, slice_of, slices
from drumline.chips.zones import (
    LOCAL_ZONES,
    Place,
    generations_in,
    places,
    region_of,
    same_region,
    zones,
)

__all__ = [
    "LOCAL_ZONES",
    "STORAGE",
    "TIERS",
    "Chip",
    "IciAxis",
    "Place",
    "Price",
    "Slice",
    "StoragePrices",
    "UnknownName",
    "chip",
    "chips",
    "generations_in",
    "places",
    "price",
    "region_of",
    "same_region",
    "slice_of",
    "slices",
    "zones",
]
