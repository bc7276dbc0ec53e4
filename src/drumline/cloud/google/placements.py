"""Combines the queued resources and nodes that the API lists into placements. Pure functions.

A queued resource and the nodes under it are one placement. A node without a request, created by
hand or left over, is a placement of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drumline.cloud.google.errors import refusal
from drumline.observed import (
    Endpoint,
    Fault,
    FaultType,
    ListedPlacement,
    ListedSlice,
    PlacementState,
    Refusal,
    Scope,
)


@dataclass(frozen=True)
class RpcError:
    """An error that the cloud reports: a google.rpc code and its text."""

    code: int
    message: str


@dataclass(frozen=True)
class ListedRequest:
    """A queued resource. Its state has the API's name, such as WAITING_FOR_RESOURCES."""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    error: RpcError | None = None
    nodes: tuple[str, ...] = ()
    """The names of the requested nodes. If there are none, the only node has the same name."""


@dataclass(frozen=True)
class ListedNode:
    """A node: a slice that exists."""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    endpoints: tuple[Endpoint, ...] = ()
    """The hosts in worker order."""
    request: str = ""
    """The queued resource of the node, if the API lists it."""
    health: str = ""
    """The API's name of its health, such as UNHEALTHY_MAINTENANCE."""
    in_maintenance: bool = False
    """True if the API lists a maintenance that is in progress."""


# A node in these states runs no program any more. STOPPED and the HIDDEN states come from
# maintenance. Drumline cannot undo them, so they count as preempted.
_NODE_OFF = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "HIDDEN"})
_NODE_ENDING = frozenset({"DELETING", "STOPPING", "HIDING"})
_REQUEST_ENDING = frozenset({"SUSPENDING", "SUSPENDED", "DELETING"})
_REQUEST_GRANTED = frozenset({"PROVISIONING", "ACTIVE"})
# A request in these states may have nodes. One that is SUSPENDED or FAILED has none that run.
_REQUEST_WITH_NODES = _REQUEST_GRANTED | {"SUSPENDING", "DELETING"}
_UNEXPLAINED = Fault(FaultType.UNKNOWN, Scope.ZONE)


def combine_listings(
    requests: Iterable[ListedRequest], nodes: Iterable[ListedNode]
) -> list[ListedPlacement]:
    """Return all placements of a zone from its two listings."""
    requests_by_name = {request.name: request for request in requests}
    request_of_node = {
        node: request.name for request in requests_by_name.values() for node in request.nodes
    }
    nodes_by_request: dict[str, list[ListedNode]] = {name: [] for name in requests_by_name}
    # By name, because a listing may have an entry twice when its pages shift.
    for name, node in {node.name: node for node in nodes}.items():
        default = name if name in requests_by_name else request_of_node.get(name, name)
        nodes_by_request.setdefault(node.request or default, []).append(node)
    return [
        combine(requests_by_name.get(name), request_nodes)
        for name, request_nodes in nodes_by_request.items()
    ]


def combine(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> ListedPlacement:
    """Return the placement of a request, its nodes, or both."""
    order = {name: index for index, name in enumerate(request.nodes if request else ())}
    nodes = sorted(nodes, key=lambda node: (order.get(node.name, len(order)), node.name))
    # The state of a node is more specific than that of its request. A node that is not READY
    # counts before the others.
    source = next((node for node in nodes if node.state != "READY"), nodes[0]) if nodes else request
    assert source is not None
    why_lost = _why_lost(request, nodes)
    return ListedPlacement(
        name=request.name if request else nodes[0].request or nodes[0].name,
        zone=source.zone,
        state=_state(request, nodes) if why_lost is None else PlacementState.LOST,
        accelerator=source.accelerator,
        labels=source.labels,
        cloud_state=source.state,
        slices=tuple(ListedSlice(node.name, node.endpoints) for node in nodes),
        lost_reason=why_lost or "",
        refusal=None if why_lost is None or request is None else _refusal(request),
        being_deleted=source.state == "DELETING",
        may_run=_may_run(request, nodes),
        maintenance=next(filter(None, map(_maintenance, nodes)), ""),
    )


def _may_run(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> bool:
    """Return True if a node may run a program, also one that the listing of nodes left out."""
    if any(node.state not in _NODE_OFF for node in nodes):
        return True
    expected = len(request.nodes) or 1 if request else 0
    has_nodes = request is not None and request.state in _REQUEST_WITH_NODES
    return has_nodes and len(nodes) < expected


def _maintenance(node: ListedNode) -> str:
    """Return the reason why a node's hosts may be silent, if that is a maintenance."""
    if "MAINTENANCE" in node.health:
        return node.health
    return "maintenance in progress" if node.in_maintenance else ""


def _why_lost(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> str | None:
    """Return the reason why the placement is lost, or None if it is not."""
    for node in nodes:
        if node.state in _NODE_OFF | _NODE_ENDING:
            return f"node {node.state}"
    if request is not None and request.state in _REQUEST_ENDING:
        return f"request {request.state}"
    if request is not None and request.state == "FAILED":
        return request.error.message if request.error else "request FAILED"
    return None


def _refusal(request: ListedRequest) -> Refusal | None:
    """Return the refusal of a request that the cloud itself ended."""
    if request.error is not None:
        return refusal(request.error.code, request.error.message, request.zone)
    if request.state == "FAILED":
        message = f"{request.zone}: the request failed and no reason was given"
        return Refusal(_UNEXPLAINED, message)
    return None


def _state(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> PlacementState:
    expected = len(request.nodes) if request and request.nodes else 1
    if len(nodes) >= expected and all(node.state == "READY" for node in nodes):
        return PlacementState.READY
    if nodes or request is None or request.state in _REQUEST_GRANTED:
        return PlacementState.BOOTING
    return PlacementState.QUEUED
