"""Conversion between the JSON of the Cloud TPU API (v2) and our values. Pure.

Reading is lenient where a field is optional and strict where a guess would hurt: an entry without
a state stays in the listing, because a slice that is missing there counts as lost; a missing
address makes the whole list of hosts unknown, because the hosts after a gap would get wrong
numbers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from drumline.cloud.google.answers import Rpc, error_text
from drumline.cloud.google.resources import ListedNode, ListedRequest, Trouble
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.observed import Endpoint

_log = logging.getLogger(__name__)

UNSPECIFIED = "STATE_UNSPECIFIED"
"""The API's name of a state that it leaves out."""
HOST_KEY = "ssh-ed25519"
_MOST_SLICES = 1000

Read = TypeVar("Read")


def queued_resource(request: PlacementRequest, parent: str) -> dict[str, Any]:
    """The body of a request for a placement.

    A queued resource of v2 has no labels of its own: it takes those of its node.
    """
    node: dict[str, Any] = {
        "acceleratorType": request.accelerator,
        "runtimeVersion": request.image,
        "networkConfig": {"enableExternalIps": True},
        "labels": dict(request.labels),
        "metadata": dict(request.metadata),
    }
    wanted: dict[str, Any] = {"parent": parent, "node": node}
    if request.slices == 1:
        wanted["nodeId"] = request.name
    else:
        wanted["multisliceParams"] = {"nodeCount": request.slices, "nodeIdPrefix": request.name}
    body: dict[str, Any] = {"tpu": {"nodeSpec": [wanted]}}
    match request.tier:
        case "spot":
            body["spot"] = {}
        case "reserved":
            # `guaranteed.reserved` is of v2alpha1; v2 has the flag on the node.
            body["guaranteed"] = {}
            node["schedulingConfig"] = {"reserved": True}
        case "on-demand":
            pass
        case other:
            raise CloudError(
                f"tier: {other!r} is none; there are spot, on-demand and reserved",
                Rpc.INVALID_ARGUMENT.value,
            )
    return body


def read_requests(entries: Sequence[object], zone: str) -> list[ListedRequest]:
    """The queued resources of a listing."""
    return _read_all(entries, lambda entry: _request(entry, zone))


def read_nodes(entries: Sequence[object], zone: str, ssh_port: int | None) -> list[ListedNode]:
    """The nodes of a listing; `ssh_port` None takes the port that each endpoint publishes."""
    return _read_all(entries, lambda entry: _node(entry, zone, ssh_port))


def read_trouble(error: object) -> Trouble | None:
    """The trouble in a google.rpc.Status; None where there is none."""
    if not isinstance(error, Mapping) or not error:
        return None
    code = error.get("code")
    return Trouble(
        code if isinstance(code, int) and code > 0 else Rpc.UNKNOWN.value,
        error_text(error) or "the cloud gave no reason",
    )


def read_host_keys(answer: Mapping[str, Any], hosts: int) -> list[str | None]:
    """The key of each host, from its guest attributes.

    The entries have no worker id, only their order. If there are fewer or more than hosts, a key
    might be assigned to the wrong host, whose connection would then fail: then none is used.
    """
    attributes = _sequence(answer.get("guestAttributes"))
    if len(attributes) != hosts:
        return [None] * hosts
    return [_host_key(attribute) for attribute in attributes]


def count_hosts(node: Mapping[str, Any]) -> int:
    """How many hosts a node has, with or without an address."""
    return len(_sequence(node.get("networkEndpoints")))


def _read_all(
    entries: Sequence[object], read: Callable[[Mapping[str, Any]], Read | None]
) -> list[Read]:
    found = []
    for entry in entries:
        resource = read(entry) if isinstance(entry, Mapping) else None
        if resource is None:
            _log.warning("left out of a listing, because it has no name: %.200r", entry)
        else:
            found.append(resource)
    return found


def _request(entry: Mapping[str, Any], zone: str) -> ListedRequest | None:
    name = _last(entry.get("name"))
    if not name:
        return None
    specs = _sequence(_mapping(entry.get("tpu")).get("nodeSpec"))
    node = _mapping(_mapping(specs[0]).get("node")) if specs else {}
    state = _mapping(entry.get("state"))
    return ListedRequest(
        name=name,
        zone=_zone(entry.get("name")) or zone,
        state=_text(state.get("state")) or UNSPECIFIED,
        accelerator=_last(node.get("acceleratorType")),
        labels=_labels(node),
        trouble=read_trouble(_mapping(state.get("failedData")).get("error")),
        by_user=state.get("stateInitiator") == "USER",
        nodes=tuple(node for spec in specs for node in _node_names(_mapping(spec), name)),
    )


def _node_names(spec: Mapping[str, Any], request: str) -> list[str]:
    several = _mapping(spec.get("multisliceParams"))
    count = several.get("nodeCount")
    if isinstance(count, int) and 0 < count <= _MOST_SLICES:
        prefix = _text(several.get("nodeIdPrefix")) or request
        return [f"{prefix}-{number}" for number in range(count)]
    return [_text(spec.get("nodeId"))] if spec.get("nodeId") else []


def _node(entry: Mapping[str, Any], zone: str, ssh_port: int | None) -> ListedNode | None:
    name = _last(entry.get("name"))
    if not name:
        return None
    health = _text(entry.get("health"))
    return ListedNode(
        name=name,
        zone=_zone(entry.get("name")) or zone,
        state=_text(entry.get("state")) or UNSPECIFIED,
        accelerator=_last(entry.get("acceleratorType")),
        labels=_labels(entry),
        endpoints=_endpoints(_sequence(entry.get("networkEndpoints")), ssh_port),
        health=None if health in {"", "HEALTH_UNSPECIFIED"} else health,
        request=_last(entry.get("queuedResource")),
    )


def _endpoints(entries: Sequence[object], ssh_port: int | None) -> tuple[Endpoint, ...]:
    """All hosts in worker order, or none while any of them has no address yet."""
    found = []
    for entry in map(_mapping, entries):
        internal = _text(entry.get("ipAddress"))
        external = _text(_mapping(entry.get("accessConfig")).get("externalIp"))
        port = ssh_port if ssh_port is not None else entry.get("port")
        if not internal or not isinstance(port, int) or port <= 0:
            return ()
        found.append(Endpoint(internal, external or internal, port))
    return tuple(found)


def _host_key(attributes: object) -> str | None:
    items = _sequence(_mapping(_mapping(attributes).get("queryValue")).get("items"))
    for item in map(_mapping, items):
        value = _text(item.get("value"))
        if item.get("key") == HOST_KEY and value:
            # Some images publish the whole line with its comment, most only the key.
            key = value.removeprefix(HOST_KEY).split()
            return f"{HOST_KEY} {key[0]}" if key else None
    return None


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in _mapping(node.get("labels")).items()}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _last(value: object) -> str:
    """`NAME` of `projects/P/locations/Z/nodes/NAME`."""
    return _text(value).rpartition("/")[2]


def _zone(value: object) -> str:
    parts = _text(value).split("/")
    return parts[3] if len(parts) > 4 and parts[2] == "locations" else ""
