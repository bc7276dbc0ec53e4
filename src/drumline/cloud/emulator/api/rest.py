"""Cloud TPU REST v2, as the `google-cloud-tpu` client uses it, and the one call of Cloud Storage
that gives the location of a bucket."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from drumline.cloud.emulator.api import asked, control, wire
from drumline.cloud.emulator.api.call import ANY_ZONE, Call
from drumline.cloud.emulator.config import known_zones
from drumline.cloud.emulator.service import Service
from drumline.cloud.model import errors
from drumline.cloud.model.errors import ApiError, Json, RpcStatus, invalid

LOCATION = "/v2/projects/{project}/locations/{zone}"


# Queued resources


def create_request(call: Call) -> Json:
    """Queue a request."""
    identity = call.query("queuedResourceId")
    fleet = call.service.fleet
    operation = fleet.operations.once(
        call.request_id,
        f"create {call.parent}/{identity} {json.dumps(call.body, sort_keys=True)}",
        lambda: fleet.create_request(asked.request_spec(call.parent, identity, call.body)),
    )
    return wire.operation_json(operation)


def list_requests(call: Call) -> Json:
    """All requests, whatever their state."""
    found = call.covered(call.service.fleet.requests)
    return call.page("queuedResources", found, wire.request_json)


def get_request(call: Call) -> Json:
    """One request."""
    return wire.request_json(call.service.fleet.request(call.name("queuedResources")))


def delete_request(call: Call) -> Json:
    """Delete a request."""
    force = call.query("force").lower() == "true"
    name = call.name("queuedResources")
    fleet = call.service.fleet
    operation = fleet.operations.once(
        call.request_id, f"delete {name}", lambda: fleet.delete_request(name, force=force)
    )
    return wire.operation_json(operation)


def reset_request(call: Call) -> Json:
    """Reset the hosts of a request."""
    return wire.operation_json(call.service.fleet.reset_request(call.name("queuedResources")))


# Nodes


def create_node(call: Call) -> Json:
    """Create a node at once, or fail."""
    spec = asked.node_spec(call.parent, call.query("nodeId"), call.body)
    return wire.operation_json(call.service.fleet.create_node(spec))


def list_nodes(call: Call) -> Json:
    """All nodes, preempted ones included."""
    return call.page("nodes", call.covered(call.service.fleet.nodes), wire.node_json)


def get_node(call: Call) -> Json:
    """One node."""
    return wire.node_json(call.service.fleet.node(call.name("nodes")))


def delete_node(call: Call) -> Json:
    """Delete a node."""
    return wire.operation_json(call.service.fleet.delete_node(call.name("nodes")))


def stop_node(call: Call) -> Json:
    """Stop a node."""
    return wire.operation_json(call.service.fleet.stop_node(call.name("nodes")))


def start_node(call: Call) -> Json:
    """Start a node that was stopped."""
    return wire.operation_json(call.service.fleet.start_node(call.name("nodes")))


def patch_node(call: Call) -> Json:
    """Change a node's labels; nothing else can be changed here."""
    mask = call.query("updateMask")
    labels = asked.read_json_object(call.body).get("labels")
    if mask != "labels" or not isinstance(labels, dict):
        raise invalid(f"The field mask '{mask}' is not supported; only labels are", "update_mask")
    asked.check_labels(labels, "node.labels")
    return wire.operation_json(call.service.fleet.relabel(call.name("nodes"), labels))


def guest_attributes(call: Call) -> Json:
    """What a node's hosts published: their host keys."""
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


# Operations


def get_operation(call: Call) -> Json:
    """One operation."""
    operation = call.service.fleet.operations.all.get(call.name("operations"))
    if operation is None:
        raise errors.not_found(call.name("operations"))
    return wire.operation_json(operation)


# Buckets


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


Answer = Callable[[Call], Json]
_PAGES = ("pageSize", "pageToken")
_QUEUED = f"{LOCATION}/queuedResources"
_NODES = f"{LOCATION}/nodes"
_OPERATIONS = f"{LOCATION}/operations"
_ROUTES: tuple[tuple[str, str, str, Answer, tuple[str, ...]], ...] = (
    ("POST", _QUEUED, "queuedResources.create", create_request, ("queuedResourceId", "requestId")),
    ("GET", _QUEUED, "queuedResources.list", list_requests, _PAGES),
    ("POST", f"{_QUEUED}/{{id}}:reset", "queuedResources.reset", reset_request, ()),
    ("GET", f"{_QUEUED}/{{id}}", "queuedResources.get", get_request, ()),
    ("DELETE", f"{_QUEUED}/{{id}}", "queuedResources.delete", delete_request,
     ("force", "requestId")),
    ("POST", _NODES, "nodes.create", create_node, ("nodeId",)),
    ("GET", _NODES, "nodes.list", list_nodes, _PAGES),
    ("POST", f"{_NODES}/{{id}}:getGuestAttributes", "nodes.getGuestAttributes",
     guest_attributes, ()),
    ("POST", f"{_NODES}/{{id}}:start", "nodes.start", start_node, ()),
    ("POST", f"{_NODES}/{{id}}:stop", "nodes.stop", stop_node, ()),
    ("GET", f"{_NODES}/{{id}}", "nodes.get", get_node, ()),
    ("PATCH", f"{_NODES}/{{id}}", "nodes.patch", patch_node, ("updateMask",)),
    ("DELETE", f"{_NODES}/{{id}}", "nodes.delete", delete_node, ()),
    ("GET", f"{_OPERATIONS}/{{id}}", "operations.get", get_operation, ()),
    ("GET", "/storage/v1/b/{id}", "buckets.get", get_bucket, ("projection",)),
)  # fmt: skip
_CHANGES = {"create", "delete", "patch", "start", "stop", "reset"}


def routes(service: Service) -> list[Route]:
    """All of the API."""
    return [
        Route(path, _handler(service, method, answer, query), methods=[verb])
        for verb, path, method, answer, query in _ROUTES
    ]


async def _unknown_path(http: HttpRequest, _: Exception) -> JSONResponse:
    refused = errors.unknown_path()
    if http.url.path.startswith(control.PREFIX):
        sentence = f"there is no control {http.method} {http.url.path}"
        return JSONResponse({"error": sentence}, refused.http_status)
    return JSONResponse(refused.as_json(), refused.http_status)


async def _internal(_: HttpRequest, __: Exception) -> JSONResponse:
    refused = ApiError(RpcStatus(errors.INTERNAL, "Internal error encountered."))
    return JSONResponse(refused.as_json(), refused.http_status)


# Google answers an unknown method and an unsupported verb in the same way.
EXCEPTION_HANDLERS = {404: _unknown_path, 405: _unknown_path, 500: _internal}


def _handler(
    service: Service, method: str, answer: Answer, query: tuple[str, ...]
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
            call.check_query(query)
            shown = answer(call)
            service.settle()
            if trouble is not None:
                raise trouble
            return JSONResponse(shown)
        except ApiError as refused:
            return JSONResponse(refused.as_json(), refused.http_status)

    return handle


def _changes(method: str) -> bool:
    return method.rpartition(".")[2] in _CHANGES


def _may_pass(service: Service, trouble: ApiError) -> bool:
    # A call over the rate limit was never executed; any other failing call may have been.
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
