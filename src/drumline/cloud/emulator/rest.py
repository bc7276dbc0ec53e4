"""Cloud TPU REST v2, as the `google-cloud-tpu` client speaks it, and the one call of Cloud Storage
that tells where a bucket is."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from drumline.chips import LOCAL_ZONES, generations_in, places, slices
from drumline.cloud.emulator import asked, control, errors, wire
from drumline.cloud.emulator.config import known_zones
from drumline.cloud.emulator.errors import Json, Refused, Status, invalid
from drumline.cloud.emulator.service import Service

T = TypeVar("T")
ANY_ZONE = "-"
LOCATION = "/v2/projects/{project}/locations/{zone}"


@dataclass(frozen=True)
class Call:
    """One call: what it is about, and what it carries."""

    service: Service
    http: HttpRequest
    body: object

    def path(self, key: str) -> str:
        """A part of the path."""
        return str(self.http.path_params.get(key, ""))

    def query(self, key: str, other: str = "") -> str:
        """A query parameter, in either spelling."""
        return self.http.query_params.get(key) or self.http.query_params.get(other) or ""

    @property
    def zone(self) -> str:
        """The zone it is about."""
        return self.path("zone")

    @property
    def parent(self) -> str:
        """`projects/p/locations/z`."""
        return f"projects/{self.path('project')}/locations/{self.zone}"

    def name(self, collection: str) -> str:
        """The full name of the resource it is about."""
        return f"{self.parent}/{collection}/{self.path('id')}"

    def covers(self, name: str) -> bool:
        """Whether a resource lies in the project and zone of the call."""
        _, project, _, zone, *_ = name.split("/")
        return project == self.path("project") and self.zone in {zone, ANY_ZONE}

    def page(self, key: str, everything: Sequence[T], show: Callable[[T], Json]) -> Json:
        """One page of a list; the token is the place where the next begins."""
        most = self.service.config.page_size
        try:
            start = int(base64.urlsafe_b64decode(self.query("pageToken", "page_token") or "MA=="))
            size = int(self.query("pageSize", "page_size") or most)
        except ValueError:
            raise invalid("The page token or size is invalid") from None
        if size < 0 or start < 0:
            raise invalid("The page token or size is invalid")
        end = start + min(size or most, most)
        answer: Json = {key: [show(one) for one in everything[start:end]]}
        if end < len(everything):
            answer["nextPageToken"] = base64.urlsafe_b64encode(str(end).encode()).decode()
        return answer


# Queued resources


def create_request(call: Call) -> Json:
    """Queue a request."""
    identity = call.query("queuedResourceId", "queued_resource_id")
    spec = asked.request_spec(call.parent, identity, call.body)
    return wire.operation_json(call.service.fleet.create_request(spec))


def list_requests(call: Call) -> Json:
    """All requests, whatever their state."""
    found = [one for name, one in sorted(call.service.fleet.requests.items()) if call.covers(name)]
    return call.page("queuedResources", found, wire.request_json)


def get_request(call: Call) -> Json:
    """One request."""
    return wire.request_json(call.service.fleet.request(call.name("queuedResources")))


def delete_request(call: Call) -> Json:
    """Delete a request."""
    force = call.query("force").lower() == "true"
    name = call.name("queuedResources")
    return wire.operation_json(call.service.fleet.delete_request(name, force=force))


# Nodes


def create_node(call: Call) -> Json:
    """Create a node, now or not at all."""
    spec = asked.node_spec(call.parent, call.query("nodeId", "node_id"), call.body)
    return wire.operation_json(call.service.fleet.create_node(spec))


def list_nodes(call: Call) -> Json:
    """All nodes, preempted ones included."""
    found = [one for name, one in sorted(call.service.fleet.nodes.items()) if call.covers(name)]
    return call.page("nodes", found, wire.node_json)


def get_node(call: Call) -> Json:
    """One node."""
    return wire.node_json(call.service.fleet.node(call.name("nodes")))


def delete_node(call: Call) -> Json:
    """Delete a node."""
    return wire.operation_json(call.service.fleet.delete_node(call.name("nodes")))


def patch_node(call: Call) -> Json:
    """Change a node's labels, the one thing that can be changed here."""
    mask = call.query("updateMask", "update_mask")
    labels = asked.read_json_object(call.body).get("labels")
    if mask != "labels" or not isinstance(labels, dict):
        raise invalid(f"The field mask '{mask}' is not supported; only labels are", "update_mask")
    asked.check_labels(labels, "node.labels")
    return wire.operation_json(call.service.fleet.relabel(call.name("nodes"), labels))


def guest_attributes(call: Call) -> Json:
    """What a node's hosts say about themselves."""
    node = call.service.fleet.node(call.name("nodes"))
    given = asked.read_json_object(call.body)
    path = given.get("queryPath") or given.get("query_path") or ""
    wanted = given.get("workerIds") or given.get("worker_ids") or range(len(node.hosts))
    try:
        workers = [int(worker) for worker in wanted]
    except (TypeError, ValueError):
        raise invalid("worker_ids must be numbers", "worker_ids") from None
    if not all(0 <= worker < len(node.hosts) for worker in workers):
        raise invalid(f"worker_ids must be below {len(node.hosts)}", "worker_ids")
    return wire.guest_attributes(node, workers, str(path))


def not_here(call: Call) -> Json:
    """What the real service does and this one does not."""
    message = f"Operation is not implemented, or supported, or enabled: {call.http.url.path}"
    raise Refused(Status(errors.UNIMPLEMENTED, message))


# Operations


def list_operations(call: Call) -> Json:
    """All operations, oldest first."""
    found = [one for name, one in call.service.fleet.operations.items() if call.covers(name)]
    return call.page("operations", found, wire.operation_json)


def get_operation(call: Call) -> Json:
    """One operation."""
    operation = call.service.fleet.operations.get(call.name("operations"))
    if operation is None:
        raise errors.not_found(call.name("operations"))
    return wire.operation_json(operation)


def forget_operation(call: Call) -> Json:
    """Delete or cancel: both leave the work as it is."""
    get_operation(call)
    return {}


# What there is


def _location(project: str, zone: str) -> Json:
    name = f"projects/{project}/locations/{zone}"
    return {"name": name, "locationId": zone, "labels": {"cloud.googleapis.com/zone": zone}}


def list_locations(call: Call) -> Json:
    """Every zone."""
    return call.page("locations", known_zones(), lambda one: _location(call.path("project"), one))


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
    return call.page("acceleratorTypes", _types(call), lambda one: one)


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
    return call.page("runtimeVersions", _runtimes(call), lambda one: one)


def get_runtime(call: Call) -> Json:
    """One image."""
    return _pick(_runtimes(call), call.name("runtimeVersions"))


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


Answer = Callable[[Call], Json]
_READS = {"GET"}
_ROUTES: tuple[tuple[str, str, str, Answer], ...] = (
    ("GET", "/v2/projects/{project}/locations", "locations.list", list_locations),
    ("POST", f"{LOCATION}/queuedResources", "queuedResources.create", create_request),
    ("GET", f"{LOCATION}/queuedResources", "queuedResources.list", list_requests),
    ("POST", f"{LOCATION}/queuedResources/{{id}}:reset", "queuedResources.reset", not_here),
    ("GET", f"{LOCATION}/queuedResources/{{id}}", "queuedResources.get", get_request),
    ("DELETE", f"{LOCATION}/queuedResources/{{id}}", "queuedResources.delete", delete_request),
    ("POST", f"{LOCATION}/nodes", "nodes.create", create_node),
    ("GET", f"{LOCATION}/nodes", "nodes.list", list_nodes),
    ("POST", f"{LOCATION}/nodes/{{id}}:getGuestAttributes", "nodes.getGuestAttributes",
     guest_attributes),
    ("POST", f"{LOCATION}/nodes/{{id}}:start", "nodes.start", not_here),
    ("POST", f"{LOCATION}/nodes/{{id}}:stop", "nodes.stop", not_here),
    ("GET", f"{LOCATION}/nodes/{{id}}", "nodes.get", get_node),
    ("PATCH", f"{LOCATION}/nodes/{{id}}", "nodes.patch", patch_node),
    ("DELETE", f"{LOCATION}/nodes/{{id}}", "nodes.delete", delete_node),
    ("GET", f"{LOCATION}/operations", "operations.list", list_operations),
    ("POST", f"{LOCATION}/operations/{{id}}:cancel", "operations.cancel", forget_operation),
    ("GET", f"{LOCATION}/operations/{{id}}", "operations.get", get_operation),
    ("DELETE", f"{LOCATION}/operations/{{id}}", "operations.delete", forget_operation),
    ("GET", f"{LOCATION}/acceleratorTypes", "acceleratorTypes.list", list_types),
    ("GET", f"{LOCATION}/acceleratorTypes/{{id}}", "acceleratorTypes.get", get_type),
    ("GET", f"{LOCATION}/runtimeVersions", "runtimeVersions.list", list_runtimes),
    ("GET", f"{LOCATION}/runtimeVersions/{{id}}", "runtimeVersions.get", get_runtime),
    ("POST", f"{LOCATION}:generateServiceIdentity", "locations.generateServiceIdentity", not_here),
    ("GET", LOCATION, "locations.get", get_location),
    ("GET", "/storage/v1/b/{id}", "buckets.get", get_bucket),
)  # fmt: skip


def routes(service: Service) -> list[Route]:
    """All of the API."""
    return [
        Route(path, _handler(service, method, answer), methods=[verb])
        for verb, path, method, answer in _ROUTES
    ]


async def _unknown_path(http: HttpRequest, _: Exception) -> JSONResponse:
    refused = errors.unknown_path()
    if http.url.path.startswith(control.PREFIX):
        sentence = f"there is no control {http.method} {http.url.path}"
        return JSONResponse({"error": sentence}, refused.http_status)
    return JSONResponse(refused.as_json(), refused.http_status)


async def _internal(_: HttpRequest, __: Exception) -> JSONResponse:
    refused = Refused(Status(errors.INTERNAL, "Internal error encountered."))
    return JSONResponse(refused.as_json(), refused.http_status)


# A method that does not exist and a verb that a path does not take are one to Google.
EXCEPTION_HANDLERS = {404: _unknown_path, 405: _unknown_path, 500: _internal}


def _handler(
    service: Service, method: str, answer: Answer
) -> Callable[[HttpRequest], Awaitable[JSONResponse]]:
    async def handle(http: HttpRequest) -> JSONResponse:
        zone = str(http.path_params.get("zone", ""))
        service.calls.count(method, zone)
        try:
            if wait := service.delay():
                await asyncio.sleep(wait)
            call = Call(service, http, await _body(http))
            _let_in(call, method)
            trouble = service.trouble()
            if trouble is not None and not (_changes(method) and _may_pass(service, trouble)):
                raise trouble
            service.fleet.advance()
            shown = answer(call)
            service.settle()
            if trouble is not None:
                raise trouble
            return JSONResponse(shown)
        except Refused as refused:
            return JSONResponse(refused.as_json(), refused.http_status)

    return handle


def _changes(method: str) -> bool:
    return method.rpartition(".")[2] in {"create", "delete", "patch"}


def _may_pass(service: Service, trouble: Refused) -> bool:
    # A call that came too often was never looked at; any other may have been carried out.
    return trouble.http_status >= 500 and service.takes_effect()


def _let_in(call: Call, method: str) -> None:
    faults = call.service.faults
    if faults.login == "expired":
        raise errors.login_expired()
    if not call.zone:
        return
    if call.zone in faults.deny:
        raise errors.permission_denied(f"tpu.{method}", call.parent)
    if call.zone != ANY_ZONE and call.zone not in known_zones():
        raise errors.unknown_location(call.zone)


async def _body(http: HttpRequest) -> object:
    raw = await http.body()
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except ValueError:
        raise invalid("Invalid JSON payload received.") from None
