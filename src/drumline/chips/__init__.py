"""Facts about hardware: chips, slices, zones, prices. No I/O, and no imports of Drumline.

The job manager takes the number of hosts from here, the cost model the speed of links, the command
line what it prints. Each figure has its source.
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
