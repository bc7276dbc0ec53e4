"""What the cloud offers: its zones, accelerator types and images, and the location of buckets."""

from drumline.chips import LOCAL_ZONES, generations_in, slices, zone_offers
from drumline.cloud.emulator.api import wire
from drumline.cloud.emulator.api.call import Call
from drumline.cloud.emulator.config import known_zones
from drumline.cloud.model import errors
from drumline.cloud.model.errors import Json


def _location(project: str, zone: str) -> Json:
    name = f"projects/{project}/locations/{zone}"
    return {"name": name, "locationId": zone, "labels": {"cloud.googleapis.com/zone": zone}}


def list_locations(call: Call) -> Json:
    """Every zone."""
    zones = {zone: zone for zone in known_zones()}
    return call.page("locations", zones, lambda zone: _location(call.path("project"), zone))


def get_location(call: Call) -> Json:
    """One zone."""
    return _location(call.path("project"), call.zone)


def _types(call: Call) -> list[Json]:
    return [
        {
            "name": f"{call.parent}/acceleratorTypes/{tpu_slice.name}",
            "type": tpu_slice.name,
            "acceleratorConfigs": [wire.accelerator_config(tpu_slice)],
        }
        for tpu_slice in slices()
        if tpu_slice.runtime_image
        and (
            call.zone in LOCAL_ZONES
            or any(offer.zone == call.zone for offer in zone_offers(tpu_slice))
        )
    ]


def list_types(call: Call) -> Json:
    """The accelerator types of a zone."""
    return call.page("acceleratorTypes", _by_name(_types(call)), dict)


def get_type(call: Call) -> Json:
    """One accelerator type."""
    return _pick(_types(call), call.name("acceleratorTypes"))


def _runtimes(call: Call) -> list[Json]:
    here = set(generations_in(call.zone))
    images = sorted(
        {
            tpu_slice.runtime_image
            for tpu_slice in slices()
            if tpu_slice.runtime_image
            and (call.zone in LOCAL_ZONES or tpu_slice.generation in here)
        }
    )
    return [
        {"name": f"{call.parent}/runtimeVersions/{image}", "version": image} for image in images
    ]


def list_runtimes(call: Call) -> Json:
    """The images of a zone."""
    return call.page("runtimeVersions", _by_name(_runtimes(call)), dict)


def get_runtime(call: Call) -> Json:
    """One image."""
    return _pick(_runtimes(call), call.name("runtimeVersions"))


def _by_name(found: list[Json]) -> dict[str, Json]:
    return {str(entry["name"]): entry for entry in found}


def _pick(found: list[Json], name: str) -> Json:
    for entry in found:
        if entry["name"] == name:
            return entry
    raise errors.not_found(name)


def get_bucket(call: Call) -> Json:
    """The location of a bucket."""
    name = call.path("id")
    location = call.service.config.buckets.get(name, "LOCAL")
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "location": location,
        "locationType": "region",
        "storageClass": "STANDARD",
    }
