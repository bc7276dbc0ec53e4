"""Converts between the JSON of the Cloud TPU API (v2) and Drumline's values. Pure functions.

Optional fields are parsed leniently. Where a guess would do harm, parsing is strict: an entry
without a state stays in the listing, because a slice that is not listed counts as lost. If one
address is missing, the list of hosts is empty, because the hosts after the gap would get wrong
indices.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from drumline.chips import slice_of
from drumline.cloud.google.errors import Rpc
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError
from drumline.cloud.google.responses import error_text
from drumline.cloud.protocol import (
    CloudError,
    DataDisk,
    OperationState,
    PlacementRequest,
    SliceOptions,
    SshLogin,
)
from drumline.observed import Endpoint

_log = logging.getLogger(__name__)

UNSPECIFIED = "STATE_UNSPECIFIED"
"""The API's name for a state that it leaves out."""
HOST_KEY = "ssh-ed25519"
INSTANCE_NAME = "hostname"
"""The guest attributes with the key and the name of a host."""
_MAX_SLICES = 1000

Resource = TypeVar("Resource")


def queued_resource(request: PlacementRequest, parent: str) -> dict[str, Any]:
    """Return the body of a request for a placement.

    A queued resource of v2 has no labels of its own. It has those of its node.
    """
    node: dict[str, Any] = {
        "acceleratorType": request.accelerator,
        "runtimeVersion": slice_of(request.accelerator).runtime_image or "",
        "labels": dict(request.labels),
        "metadata": _login_metadata(request.login),
        **_node_options(request.options, parent),
    }
    node_spec: dict[str, Any] = {"parent": parent, "node": node}
    if request.slices == 1:
        node_spec["nodeId"] = request.name
    else:
        node_spec["multisliceParams"] = {
            "nodeCount": request.slices,
            "nodeIdPrefix": request.name,
        }
    body: dict[str, Any] = {"tpu": {"nodeSpec": [node_spec]}}
    match request.tier:
        case "spot":
            body["spot"] = {}
        case "reserved":
            # As gcloud sends it. `guaranteed.reserved` exists in v2alpha1 only.
            body["reservationName"] = _reservation_path(request.options.reservation, parent)
        case "on-demand":
            pass
        case tier:
            raise CloudError(
                f"tier: {tier!r} does not exist; use spot, on-demand or reserved",
                Rpc.INVALID_ARGUMENT.value,
            )
    return body


def _login_metadata(login: SshLogin | None) -> dict[str, str]:
    """Return the metadata of hosts that accept a login."""
    if login is None:
        return {}
    # With OS Login, the hosts would ignore the key in the metadata.
    return {"ssh-keys": f"{login.user}:{login.public_key}", "enable-oslogin": "FALSE"}


def _node_options(options: SliceOptions, parent: str) -> dict[str, Any]:
    """Return the fields of a node for its network, account and disks."""
    network: dict[str, Any] = {"enableExternalIps": options.external_ip}
    if options.network:
        network["network"] = options.network
    if options.subnetwork:
        network["subnetwork"] = options.subnetwork
    fields: dict[str, Any] = {"networkConfig": network}
    if options.tags:
        fields["tags"] = [*options.tags]
    if options.service_account or options.scopes:
        email = {"email": options.service_account} if options.service_account else {}
        scope = {"scope": [*options.scopes]} if options.scopes else {}
        fields["serviceAccount"] = email | scope
    if options.data_disks:
        fields["dataDisks"] = [_data_disk(disk, parent) for disk in options.data_disks]
    return fields


def _data_disk(disk: DataDisk, parent: str) -> dict[str, str]:
    zone = parent.replace("/locations/", "/zones/")
    source = disk.source if "/" in disk.source else f"{zone}/disks/{disk.source}"
    return {"sourceDisk": source, "mode": disk.mode.upper().replace("-", "_")}


def _reservation_path(reservation: str | None, parent: str) -> str:
    """Return the path of a reservation in the zone of `parent`; `-` is any of the project."""
    if reservation and "/" in reservation:
        return reservation
    return f"{parent}/reservations/{reservation or '-'}"


def parse_requests(entries: Sequence[object], zone: str) -> list[ListedRequest]:
    """Parse the queued resources of a listing."""
    return _parse_all(entries, lambda entry: _parse_request(entry, zone))


def parse_nodes(entries: Sequence[object], zone: str, ssh_port: int | None) -> list[ListedNode]:
    """Parse the nodes of a listing. Without `ssh_port`, each endpoint has its own port."""
    return _parse_all(entries, lambda entry: _parse_node(entry, zone, ssh_port))


def parse_rpc_error(error: object) -> RpcError | None:
    """Parse a google.rpc.Status. Return None if it is empty."""
    if not isinstance(error, Mapping) or not error:
        return None
    code = error.get("code")
    return RpcError(
        code if isinstance(code, int) and code > 0 else Rpc.UNKNOWN.value,
        error_text(error) or "the cloud gave no reason",
    )


def parse_operation(response: Mapping[str, Any]) -> OperationState:
    """Parse a google.longrunning.Operation."""
    error = parse_rpc_error(response.get("error"))
    if error is not None:
        return OperationState(True, CloudError(error.message, error.code))
    return OperationState(response.get("done") is True)


def operation_name(response: Mapping[str, Any]) -> str:
    """Return the full name of an operation; empty if the response has none."""
    name = _text(response.get("name"))
    return name if "/operations/" in name else ""


def parse_host_keys(response: Mapping[str, Any], hosts: int) -> list[str | None]:
    """Return the key of each host from its guest attributes.

    The entries have no worker id, only their order. If their number differs from the number of
    hosts, no key is used: a key of another host would make the connection fail.
    """
    attributes = _sequence(response.get("guestAttributes"))
    if len(attributes) != hosts:
        return [None] * hosts
    return [_host_key(attribute) for attribute in attributes]


def parse_instance_names(response: Mapping[str, Any], hosts: int) -> list[str | None]:
    """Return the name of the instance of each host from its guest attributes."""
    attributes = _sequence(response.get("guestAttributes"))
    if len(attributes) != hosts:
        return [None] * hosts
    return [_attribute(attribute, INSTANCE_NAME) or None for attribute in attributes]


def count_hosts(node: Mapping[str, Any]) -> int:
    """Return the number of hosts of a node, with or without addresses."""
    return len(_sequence(node.get("networkEndpoints")))


def _parse_all(
    entries: Sequence[object], parse: Callable[[Mapping[str, Any]], Resource | None]
) -> list[Resource]:
    resources = []
    for entry in entries:
        resource = parse(entry) if isinstance(entry, Mapping) else None
        if resource is None:
            _log.warning("an entry of a listing is ignored because it has no name: %.200r", entry)
        else:
            resources.append(resource)
    return resources


def _parse_request(entry: Mapping[str, Any], zone: str) -> ListedRequest | None:
    name = _short_name(entry.get("name"))
    if not name:
        return None
    specs = _sequence(_mapping(entry.get("tpu")).get("nodeSpec"))
    node = _mapping(_mapping(specs[0]).get("node")) if specs else {}
    state = _mapping(entry.get("state"))
    return ListedRequest(
        name=name,
        zone=_zone(entry.get("name")) or zone,
        state=_text(state.get("state")) or UNSPECIFIED,
        accelerator=_short_name(node.get("acceleratorType")),
        labels=_labels(node),
        error=parse_rpc_error(_mapping(state.get("failedData")).get("error")),
        nodes=tuple(node for spec in specs for node in _node_names(_mapping(spec), name)),
    )


def _node_names(spec: Mapping[str, Any], request: str) -> list[str]:
    multislice = _mapping(spec.get("multisliceParams"))
    count = multislice.get("nodeCount")
    if isinstance(count, int) and 0 < count <= _MAX_SLICES:
        prefix = _text(multislice.get("nodeIdPrefix")) or request
        return [f"{prefix}-{index}" for index in range(count)]
    return [_text(spec.get("nodeId"))] if spec.get("nodeId") else []


def _parse_node(entry: Mapping[str, Any], zone: str, ssh_port: int | None) -> ListedNode | None:
    name = _short_name(entry.get("name"))
    if not name:
        return None
    return ListedNode(
        name=name,
        zone=_zone(entry.get("name")) or zone,
        state=_text(entry.get("state")) or UNSPECIFIED,
        accelerator=_short_name(entry.get("acceleratorType")),
        labels=_labels(entry),
        endpoints=_endpoints(_sequence(entry.get("networkEndpoints")), ssh_port),
        request=_short_name(entry.get("queuedResource")),
        health=_text(entry.get("health")).removeprefix("HEALTH_UNSPECIFIED"),
        in_maintenance=_is_in_maintenance(_mapping(entry.get("upcomingMaintenance"))),
    )


def _is_in_maintenance(maintenance: Mapping[str, Any]) -> bool:
    return _text(maintenance.get("maintenanceStatus")) == "ONGOING"


def _endpoints(entries: Sequence[object], ssh_port: int | None) -> tuple[Endpoint, ...]:
    """Return all hosts in worker order, or none while one of them has no address."""
    endpoints = []
    for entry in map(_mapping, entries):
        internal = _text(entry.get("ipAddress"))
        external = _text(_mapping(entry.get("accessConfig")).get("externalIp"))
        port = ssh_port if ssh_port is not None else entry.get("port")
        if not internal or not isinstance(port, int) or port <= 0:
            return ()
        endpoints.append(Endpoint(internal, external or internal, port))
    return tuple(endpoints)


def _host_key(attributes: object) -> str | None:
    # Some images publish the whole line with its comment, most only the key.
    key = _attribute(attributes, HOST_KEY).removeprefix(HOST_KEY).split()
    return f"{HOST_KEY} {key[0]}" if key else None


def _attribute(attributes: object, key: str) -> str:
    """Return the first value of a guest attribute; empty if there is none."""
    items = _sequence(_mapping(_mapping(attributes).get("queryValue")).get("items"))
    values = (_text(item.get("value")) for item in map(_mapping, items) if item.get("key") == key)
    return next(filter(None, values), "")


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in _mapping(node.get("labels")).items()}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _short_name(value: object) -> str:
    """Return `NAME` of `projects/P/locations/Z/nodes/NAME`."""
    return _text(value).rpartition("/")[2]


def _zone(value: object) -> str:
    components = _text(value).split("/")
    return components[3] if len(components) > 4 and components[2] == "locations" else ""
