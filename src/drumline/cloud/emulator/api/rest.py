"""The routes of Cloud TPU REST v2, and the call of Cloud Storage for the location of a bucket.

A list comes in pages. The token of a page is the last name on the page before, not a count, so a
deletion between two pages neither hides nor repeats a resource.
"""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from drumline.cloud.emulator.api import control, request_bodies, responses
from drumline.cloud.emulator.config import known_zones
from drumline.cloud.emulator.service import Service
from drumline.cloud.model import errors
from drumline.cloud.model.errors import ApiError, Json, RpcStatus, invalid

LOCATION = "/v2/projects/{project}/locations/{zone}"

T = TypeVar("T")
ANY_ZONE = "-"
# The parameters of every Google API.
_STANDARD_PARAMETERS = frozenset(
    {
        "$.xgafv", "$alt", "access_token", "alt", "callback", "fields", "key", "oauth_token",
        "prettyPrint", "quotaUser", "uploadType", "upload_protocol", "userIp",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call: its path, its parameters and its body."""

    service: Service
    http: HttpRequest
    body: object

    def path(self, key: str) -> str:
        """Return a parameter of the path."""
        return str(self.http.path_params.get(key, ""))

    def query(self, key: str) -> str:
        """Return a query parameter, whose name may be in camelCase or snake_case."""
        return self.http.query_params.get(key) or self.http.query_params.get(_snake(key)) or ""

    def check_query(self, names: Iterable[str]) -> None:
        """Raise ApiError for unknown query parameters, as Google does."""
        accepted = _STANDARD_PARAMETERS.union(*({key, _snake(key)} for key in names))
        for key in self.http.query_params:
            if key not in accepted:
                raise invalid(
                    f'Invalid JSON payload received. Unknown name "{key}": Cannot bind query '
                    f"parameter. Field '{key}' could not be found in request message."
                )

    @property
    def request_id(self) -> str:
        """The id with which a caller may repeat the call, if it has one."""
        value = self.query("requestId")
        try:
            return str(UUID(value)) if value else ""
        except ValueError:
            raise invalid(f"Invalid request_id '{value}': must be a UUID", "request_id") from None

    @property
    def zone(self) -> str:
        """The zone in the path."""
        return self.path("zone")

    @property
    def parent(self) -> str:
        """`projects/p/locations/z`."""
        return f"projects/{self.path('project')}/locations/{self.zone}"

    def name(self, collection: str) -> str:
        """Return the full name of the resource in the path."""
        return f"{self.parent}/{collection}/{self.path('id')}"

    def in_location(self, resources: Mapping[str, T]) -> dict[str, T]:
        """Return the resources in the project and zone of the call."""
        selected = {}
        for name, resource in resources.items():
            _, project, _, zone, *_ = name.split("/")
            if project == self.path("project") and self.zone in {zone, ANY_ZONE}:
                selected[name] = resource
        return selected

    def page(
        self, collection: str, resources: Mapping[str, T], to_json: Callable[[T], Json]
    ) -> Json:
        """Return one page of resources."""
        size = _size(self.query("pageSize"), self.service.config.page_size)
        names = sorted(resources)
        if token := self.query("pageToken"):
            last = _read_token(token)
            names = [name for name in names if name > last]
        # A list of thousands is read page by page, so only the resources of this page become JSON.
        page: Json = {collection: [to_json(resources[name]) for name in names[:size]]}
        if len(names) > size:
            page["nextPageToken"] = _token(names[size - 1])
        return page


def _size(requested: str, maximum: int) -> int:
    try:
        size = int(requested or 0)
    except ValueError:
        size = -1
    if size < 0:
        raise invalid(f"Invalid page_size '{requested}'", "page_size")
    return min(size or maximum, maximum)


def _token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except ValueError:
        raise invalid("The page token is invalid", "page_token") from None


def _snake(key: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)


# Queued resources


def create_request(call: Call) -> Json:
    """Queue a request."""
    request_id = call.query("queuedResourceId")
    fleet = call.service.fleet
    operation = fleet.operations.start_once(
        call.request_id,
        f"create {call.parent}/{request_id} {json.dumps(call.body, sort_keys=True)}",
        lambda: fleet.create_request(
            request_bodies.request_spec(call.parent, request_id, call.body)
        ),
    )
    return responses.operation_json(operation)


def list_requests(call: Call) -> Json:
    """List all requests, in any state."""
    requests = call.in_location(call.service.fleet.requests)
    return call.page("queuedResources", requests, responses.request_json)


def get_request(call: Call) -> Json:
    """Return a request."""
    return responses.request_json(call.service.fleet.request(call.name("queuedResources")))


def delete_request(call: Call) -> Json:
    """Delete a request."""
    force = call.query("force").lower() == "true"
    name = call.name("queuedResources")
    fleet = call.service.fleet
    operation = fleet.operations.start_once(
        call.request_id, f"delete {name}", lambda: fleet.delete_request(name, force=force)
    )
    return responses.operation_json(operation)


def reset_request(call: Call) -> Json:
    """Reset the hosts of a request."""
    return responses.operation_json(call.service.fleet.reset_request(call.name("queuedResources")))


# Nodes


def create_node(call: Call) -> Json:
    """Create a node at once, or fail."""
    spec = request_bodies.node_spec(call.parent, call.query("nodeId"), call.body)
    return responses.operation_json(call.service.fleet.create_node(spec))


def list_nodes(call: Call) -> Json:
    """List all nodes, including preempted ones."""
    return call.page("nodes", call.in_location(call.service.fleet.nodes), responses.node_json)


def get_node(call: Call) -> Json:
    """Return a node."""
    return responses.node_json(call.service.fleet.node(call.name("nodes")))


def delete_node(call: Call) -> Json:
    """Delete a node."""
    return responses.operation_json(call.service.fleet.delete_node(call.name("nodes")))


def stop_node(call: Call) -> Json:
    """Stop a node."""
    return responses.operation_json(call.service.fleet.stop_node(call.name("nodes")))


def start_node(call: Call) -> Json:
    """Start a stopped node."""
    return responses.operation_json(call.service.fleet.start_node(call.name("nodes")))


def patch_node(call: Call) -> Json:
    """Change the labels of a node. Other fields cannot be changed."""
    mask = call.query("updateMask")
    labels = request_bodies.require_object(call.body).get("labels")
    if mask != "labels" or not isinstance(labels, dict):
        raise invalid(f"The field mask '{mask}' is not supported; only labels are", "update_mask")
    request_bodies.check_labels(labels, "node.labels")
    return responses.operation_json(call.service.fleet.relabel(call.name("nodes"), labels))


def guest_attributes(call: Call) -> Json:
    """Return the guest attributes of a node: the host keys of its hosts."""
    node = call.service.fleet.node(call.name("nodes"))
    body = request_bodies.require_object(call.body)
    path = body.get("queryPath") or body.get("query_path") or ""
    worker_ids = body.get("workerIds") or body.get("worker_ids") or range(len(node.hosts))
    try:
        workers = [int(worker) for worker in worker_ids]
    except (TypeError, ValueError):
        raise invalid("worker_ids must be numbers", "worker_ids") from None
    if not all(0 <= worker < len(node.hosts) for worker in workers):
        raise invalid(f"worker_ids must be below {len(node.hosts)}", "worker_ids")
    return responses.guest_attributes(node, workers, str(path))


# Operations


def get_operation(call: Call) -> Json:
    """Return an operation."""
    operation = call.service.fleet.operations.all.get(call.name("operations"))
    if operation is None:
        raise errors.not_found(call.name("operations"))
    return responses.operation_json(operation)


# Buckets


def get_bucket(call: Call) -> Json:
    """Return the location of a bucket."""
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


# The project


def test_permissions(call: Call) -> Json:
    """Return the permissions that the caller has on the project: all of them."""
    permissions = request_bodies.require_object(call.body).get("permissions")
    if not isinstance(permissions, list):
        raise invalid("permissions must be a list", "permissions")
    return {"permissions": permissions}


Handler = Callable[[Call], Json]
_PAGES = ("pageSize", "pageToken")
_QUEUED = f"{LOCATION}/queuedResources"
_NODES = f"{LOCATION}/nodes"
_OPERATIONS = f"{LOCATION}/operations"
_ROUTES: tuple[tuple[str, str, str, Handler, tuple[str, ...]], ...] = (
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
    ("POST", "/v1/projects/{project}:testIamPermissions", "projects.testIamPermissions",
     test_permissions, ()),
    ("GET", "/storage/v1/b/{id}", "buckets.get", get_bucket, ("projection",)),
)  # fmt: skip
_CHANGES = {"create", "delete", "patch", "start", "stop", "reset"}


def routes(service: Service) -> list[Route]:
    """Return the routes of the API."""
    return [
        Route(path, _endpoint(service, method, handler, query), methods=[verb])
        for verb, path, method, handler, query in _ROUTES
    ]


async def _unknown_path(http: HttpRequest, _: Exception) -> JSONResponse:
    error = errors.unknown_path()
    if http.url.path.startswith(control.PREFIX):
        message = f"there is no control {http.method} {http.url.path}"
        return JSONResponse({"error": message}, error.http_status)
    return JSONResponse(error.as_json(), error.http_status)


async def _internal(_: HttpRequest, __: Exception) -> JSONResponse:
    error = ApiError(RpcStatus(errors.INTERNAL, "Internal error encountered."))
    return JSONResponse(error.as_json(), error.http_status)


# Google gives the same response to an unknown path and to an unsupported HTTP method.
EXCEPTION_HANDLERS = {404: _unknown_path, 405: _unknown_path, 500: _internal}


def _endpoint(
    service: Service, method: str, handler: Handler, query: tuple[str, ...]
) -> Callable[[HttpRequest], Awaitable[JSONResponse]]:
    async def handle(http: HttpRequest) -> JSONResponse:
        zone = str(http.path_params.get("zone", ""))
        service.calls.count(method, zone)
        try:
            if wait := service.delay():
                await asyncio.sleep(wait)
            call = Call(service, http, await _body(http))
            _check_access(call, method)
            injected = service.injected_error()
            if injected is not None and not (
                _changes(method) and _may_take_effect(service, injected)
            ):
                raise injected
            service.fleet.advance()
            call.check_query(query)
            body = handler(call)
            service.carry_out_orders()
            if injected is not None:
                raise injected
            return JSONResponse(body)
        except ApiError as error:
            return JSONResponse(error.as_json(), error.http_status)

    return handle


def _changes(method: str) -> bool:
    return method.rpartition(".")[2] in _CHANGES


def _may_take_effect(service: Service, error: ApiError) -> bool:
    # A call over the rate limit is never executed. Any other failing call may be.
    return error.http_status >= 500 and service.takes_effect()


def _check_access(call: Call, method: str) -> None:
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
