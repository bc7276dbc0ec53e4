"""Chips, slices, zones, prices and mesh orders, as tables with sources and pure functions."""

from drumline.chips.catalogue import Chip, chip, chips
from drumline.chips.names import UnknownName
from drumline.chips.prices import STORAGE, TIERS, Price, StoragePrices, price
from drumline.chips.slices import IciAxis, Slice, slice_of, slices, wraps_of
from drumline.chips.torus import closes, links, mesh_order, ring_order
from drumline.chips.zones import (
    LOCAL_ZONES,
    ZoneOffer,
    generations_in,
    region_of,
    same_region,
    zone_offers,
    zones,
)
from drumline.deprecated import lookup

__all__ = [
    "LOCAL_ZONES",
    "STORAGE",
    "TIERS",
    "Chip",
    "IciAxis",
    "Price",
    "Slice",
    "StoragePrices",
    "UnknownName",
    "ZoneOffer",
    "chip",
    "chips",
    "closes",
    "generations_in",
    "links",
    "mesh_order",
    "price",
    "region_of",
    "ring_order",
    "same_region",
    "slice_of",
    "slices",
    "wraps_of",
    "zone_offers",
    "zones",
]

_NEW_NAMES = {
    "Place": "drumline.chips:ZoneOffer",
    "lay_mesh": "drumline.chips:mesh_order",
    "places": "drumline.chips:zone_offers",
    "tour": "drumline.chips:ring_order",
}


def __getattr__(name: str) -> object:
    return lookup(__name__, name, _NEW_NAMES)


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted({*globals(), *__all__})
