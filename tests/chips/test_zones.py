import pytest

from drumline.chips import (
    STORAGE,
    Slice,
    UnknownName,
    generations_in,
    price,
    region_of,
    same_region,
    slice_of,
    slices,
    zone_offers,
    zones,
)


@pytest.mark.parametrize("tpu_slice", slices(), ids=lambda tpu_slice: tpu_slice.name)
def test_some_zone_offers_every_slice(tpu_slice: Slice) -> None:
    offers = zone_offers(tpu_slice)
    assert offers
    assert len({offer.zone for offer in offers}) == len(offers)
    for offer in offers:
        assert region_of(offer.zone)
        assert tpu_slice.generation in generations_in(offer.zone)


@pytest.mark.parametrize(
    ("name", "zone"),
    [
        ("v2-8", "us-central1-f"),
        ("v3-8", "europe-west4-a"),
        ("v4-128", "us-central2-b"),
        ("v5litepod-64", "us-central1-a"),
        ("v5litepod-64", "europe-west4-b"),
        ("v6e-64", "europe-west4-a"),
        ("v6e-64", "us-east1-d"),
    ],
)
def test_the_zones_of_research_grants_are_listed(name: str, zone: str) -> None:
    assert zone in {offer.zone for offer in zone_offers(slice_of(name))}


def test_zones_with_single_hosts_only_do_not_offer_pod_slices() -> None:
    assert "us-central1-b" not in {offer.zone for offer in zone_offers(slice_of("v2-32"))}


@pytest.mark.parametrize("zone", zones())
def test_the_name_of_a_zone_starts_with_its_region(zone: str) -> None:
    assert zone.startswith(f"{region_of(zone)}-")


def test_the_error_for_a_region_lists_its_zones() -> None:
    with pytest.raises(UnknownName, match=r"'us-central2' is a region; its zones: us-central2-b"):
        region_of("us-central2")


@pytest.mark.parametrize("typed", ["", "nowhere", "us-central2-", "US-CENTRAL2-B", "us central2-b"])
def test_an_unknown_zone_is_an_error(typed: str) -> None:
    with pytest.raises(UnknownName, match="is not a zone"):
        region_of(typed)


@pytest.mark.parametrize(
    ("location", "same"),
    [
        ("US-CENTRAL2", True),
        ("us-central2", True),
        ("US-CENTRAL1", False),
        ("US", False),
        ("EU", False),
        ("NAM4", False),
        ("US-CENTRAL1+US-CENTRAL2", False),
        ("", False),
    ],
)
def test_a_multi_region_bucket_is_not_in_the_region_of_a_zone(location: str, same: bool) -> None:
    assert same_region("us-central2-b", location) is same


def test_the_on_demand_price_of_a_v4_8() -> None:
    on_demand = price(slice_of("v4-8"), "us-central2-b", "on-demand")
    assert on_demand is not None
    assert round(on_demand.per_chip_hour * 4, 2) == 12.88
    assert on_demand.as_of
    assert on_demand.source


@pytest.mark.parametrize("tpu_slice", slices(), ids=lambda tpu_slice: tpu_slice.name)
def test_spot_costs_less_than_on_demand(tpu_slice: Slice) -> None:
    for offer in zone_offers(tpu_slice):
        on_demand = price(tpu_slice, offer.zone, "on-demand")
        spot = price(tpu_slice, offer.zone, "spot")
        if on_demand and spot:
            assert 0 < spot.per_chip_hour < on_demand.per_chip_hour


def test_an_unpublished_price_is_none_and_an_unknown_tier_an_error() -> None:
    assert price(slice_of("tpu7x-64"), "us-central1-c", "spot") is None
    with pytest.raises(UnknownName, match="is not a tier"):
        price(slice_of("v4-8"), "us-central2-b", "cheap")


def test_a_terabyte_across_regions_costs_at_least_twenty_dollars() -> None:
    low, high = STORAGE.cross_region_per_gb
    assert 1000 * low == 20
    assert high > low > STORAGE.same_region_per_gb
