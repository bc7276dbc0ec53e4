"""What the cloud has to offer: its zones, accelerator types and images, and where a bucket is."""

from drumline.chips import LOCAL_ZONES, generations_in, places, slices
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
    return call.page("locations", zones, lambda one: _location(call.path("project"), one))


def get_location(call: Call) -> Json:
    """One zone."""
    return _location(call.path("project"), call.zone)


def _types(call: Call) -> list[Json]:
    return [
        {
            "name": f"{call.parent}/acceleratorTypes/{one.name}",
            "type": one.name,
            "acceleratorConfigs": [wire.accelerator_config(one)],
        }
        for one in slices()
        if one.runtime_image
        and (call.zone in LOCAL_ZONES or any(place.zone == call.zone for place in places(one)))
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
            one.runtime_image
            for one in slices()
            if one.runtime_image and (call.zone in LOCAL_ZONES or one.generation in here)
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
    return {str(one["name"]): one for one in found}


def _pick(found: list[Json], name: str) -> Json:
    for one in found:
        if one["name"] == name:
            return one
    raise errors.not_found(name)


def get_bucket(call: Call) -> Json:
    """Where a bucket is."""
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
