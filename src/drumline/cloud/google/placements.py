"""What the states of queued resources and nodes mean for a placement. Pure.

A queued resource and the nodes under it are one placement. A node without a request, created by
hand or left behind, is a placement of its own.
"""

from collections.abc import Iterable, Sequence

from drumline.cloud.google.faults import refusal
from drumline.cloud.google.resources import ListedNode, ListedRequest
from drumline.observed import (
    Fault,
    FaultKind,
    ListedPlacement,
    ListedSlice,
    PlacementState,
    Refusal,
    Scope,
)

# A node in these states runs nothing of ours any more. STOPPED and the hiding states come from
# maintenance and cannot be undone by us, so they count as preempted.
_NODE_OFF = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "HIDDEN"})
_NODE_GOING = frozenset({"DELETING", "STOPPING", "HIDING"})
_REQUEST_TAKEN = frozenset({"SUSPENDING", "SUSPENDED", "DELETING"})
_REQUEST_FILLED = frozenset({"PROVISIONING", "ACTIVE"})
_UNEXPLAINED = Fault(FaultKind.UNKNOWN, Scope.ZONE)


def listed(requests: Iterable[ListedRequest], nodes: Iterable[ListedNode]) -> list[ListedPlacement]:
    """Every placement of a zone's two listings; a node without a request has its own."""
    by_name = {request.name: request for request in requests}
    asked_by = {node: request.name for request in by_name.values() for node in request.nodes}
    under: dict[str, list[ListedNode]] = {name: [] for name in by_name}
    # By name: where pages shift, a listing has an entry twice.
    for name, node in {node.name: node for node in nodes}.items():
        own = name if name in by_name else asked_by.get(name, name)
        under.setdefault(node.request or own, []).append(node)
    return [combined(by_name.get(name), found) for name, found in under.items()]


def combined(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> ListedPlacement:
    """The placement of a request, its nodes, or both."""
    order = {name: place for place, name in enumerate(request.nodes if request else ())}
    nodes = sorted(nodes, key=lambda node: (order.get(node.name, len(order)), node.name))
    # A node says more than the request, and a node in trouble more than its siblings.
    source = next((n for n in nodes if n.state != "READY"), nodes[0]) if nodes else request
    assert source is not None
    lost = _why_lost(request, nodes)
    return ListedPlacement(
        name=request.name if request else nodes[0].request or nodes[0].name,
        zone=source.zone,
        state=_state(request, nodes) if lost is None else PlacementState.LOST,
        accelerator=source.accelerator,
        labels=source.labels,
        cloud_state=source.state,
        slices=tuple(ListedSlice(node.name, node.endpoints) for node in nodes),
        lost_reason=lost or "",
        refusal=None if lost is None or request is None else _refusal(request),
        being_deleted=source.state == "DELETING",
        may_run=any(node.state not in _NODE_OFF for node in nodes),
    )


def _why_lost(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> str | None:
    """Why the placement is lost, None while it is not."""
    for node in nodes:
        if node.state in _NODE_OFF | _NODE_GOING:
            return f"node {node.state}"
    if request is not None and request.state in _REQUEST_TAKEN:
        return f"request {request.state}"
    if request is not None and request.state == "FAILED":
        return request.trouble.message if request.trouble else "request FAILED"
    return None


def _refusal(request: ListedRequest) -> Refusal | None:
    """Why a request failed, if the cloud itself gave it up."""
    trouble = request.trouble
    if trouble is not None:
        return refusal(trouble.code, trouble.message, request.zone)
    if request.state == "FAILED":
        said = f"{request.zone}: the request failed and no reason was given"
        return Refusal(_UNEXPLAINED, said)
    return None


def _state(request: ListedRequest | None, nodes: Sequence[ListedNode]) -> PlacementState:
    wanted = len(request.nodes) if request and request.nodes else 1
    if len(nodes) >= wanted and all(node.state == "READY" for node in nodes):
        return PlacementState.READY
    if nodes or request is None or request.state in _REQUEST_FILLED:
        return PlacementState.BOOTING
    return PlacementState.QUEUED
