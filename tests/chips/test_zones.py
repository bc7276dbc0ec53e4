import pytest

from drumline.chips import (
    STORAGE,
    Slice,
    UnknownName,
    generations_in,
    places,
    price,
    region_of,
    same_region,
    slice_of,
    slices,
    zones,
)


@pytest.mark.parametrize("one", slices(), ids=lambda one: one.name)
def test_every_slice_is_to_be_had_somewhere(one: Slice) -> None:
    there = places(one)
    assert there
    assert len({place.zone for place in there}) == len(there)
    for place in there:
        assert region_of(place.zone)
        assert one.generation in generations_in(place.zone)


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
def test_the_zones_of_the_research_grants_are_known(name: str, zone: str) -> None:
    assert zone in {place.zone for place in places(slice_of(name))}


def test_a_pod_slice_is_not_offered_where_only_single_devices_are() -> None:
    assert "us-central1-b" not in {place.zone for place in places(slice_of("v2-32"))}


@pytest.mark.parametrize("zone", zones())
def test_a_zone_lies_in_its_region(zone: str) -> None:
    assert zone.startswith(f"{region_of(zone)}-")


def test_a_region_in_place_of_a_zone_gets_its_zones() -> None:
    with pytest.raises(UnknownName, match=r"'us-central2' is a region; zones there: us-central2-b"):
        region_of("us-central2")


@pytest.mark.parametrize("typed", ["", "nowhere", "us-central2-", "US-CENTRAL2-B", "us central2-b"])
def test_what_is_no_zone_is_said_to_be_none(typed: str) -> None:
    with pytest.raises(UnknownName, match="is no zone"):
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
def test_a_multi_region_bucket_is_not_in_the_slices_region(location: str, same: bool) -> None:
    assert same_region("us-central2-b", location) is same


def test_a_v4_8_on_demand_costs_what_the_slides_say() -> None:
    found = price(slice_of("v4-8"), "us-central2-b", "on-demand")
    assert found is not None
    assert round(found.per_chip_hour * 4, 2) == 12.88
    assert found.as_of
    assert found.source


@pytest.mark.parametrize("one", slices(), ids=lambda one: one.name)
def test_spot_is_never_dearer_than_on_demand(one: Slice) -> None:
    for place in places(one):
        on_demand = price(one, place.zone, "on-demand")
        spot = price(one, place.zone, "spot")
        if on_demand and spot:
            assert 0 < spot.per_chip_hour < on_demand.per_chip_hour


def test_a_price_nobody_published_is_none_and_a_wrong_tier_a_mistake() -> None:
    assert price(slice_of("tpu7x-64"), "us-central1-c", "spot") is None
    with pytest.raises(UnknownName, match="no tier"):
        price(slice_of("v4-8"), "us-central2-b", "cheap")


def test_a_terabyte_across_regions_costs_at_least_twenty_dollars() -> None:
    low, high = STORAGE.cross_region_per_gb
    assert 1000 * low == 20
    assert high > low > STORAGE.same_region_per_gb
