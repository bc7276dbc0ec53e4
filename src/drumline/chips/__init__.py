"""Facts about hardware: chips, slices, zones, prices; and how a mesh lies on a slice.

No I/O, and no imports of Drumline. The job manager takes the number of hosts from here,
the cost model the speed of links, training the order of its devices, the command line what it
prints. Each figure has its source.
"""

from drumline.chips.catalogue import Chip, chip, chips
from drumline.chips.meshes import lay_mesh
from drumline.chips.names import UnknownName
from drumline.chips.prices import STORAGE, TIERS, Price, StoragePrices, price
from drumline.chips.slices import IciAxis, Slice, slice_of, slices, wraps_of
from drumline.chips.tours import closes, links, tour
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
    "closes",
    "generations_in",
    "lay_mesh",
    "links",
    "places",
    "price",
    "region_of",
    "same_region",
    "slice_of",
    "slices",
    "tour",
    "wraps_of",
    "zones",
]
