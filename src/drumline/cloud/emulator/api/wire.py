"""What the API returns: requests, nodes and operations in the JSON of Cloud TPU v2."""

from collections.abc import Sequence
from datetime import UTC, datetime

from drumline.chips import Slice
from drumline.cloud.emulator.api.asked import CHIP_TYPES
from drumline.cloud.model.errors import Json
from drumline.cloud.model.resources import Node, NodeState, Operation, Request, RequestState

_TYPES = "type.googleapis.com/google.cloud.tpu.v2"
_CHIP_TYPE = {generation: name for name, generation in CHIP_TYPES.values()}
_STATE_DATA = {
    RequestState.CREATING: "creatingData",
    RequestState.PROVISIONING: "provisioningData",
    RequestState.ACTIVE: "activeData",
    RequestState.SUSPENDING: "suspendingData",
    RequestState.SUSPENDED: "suspendedData",
    RequestState.FAILED: "failedData",
    RequestState.DELETING: "deletingData",
}


def timestamp(seconds: float) -> str:
    """A time in RFC 3339, as in protobuf's JSON."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def request_json(request: Request) -> Json:
    """A QueuedResource."""
    state: Json = {"state": request.state, "stateInitiator": request.by}
    if request.state in _STATE_DATA:
        error = {"error": request.error.as_json()} if request.error else {}
        state[_STATE_DATA[request.state]] = error
    return {
        "name": request.spec.name,
        "createTime": timestamp(request.created),
        **request.spec.shown,
        "state": state,
    }


def node_json(node: Node) -> Json:
    """A Node."""
    spec = node.spec
    shown: Json = {
        "name": spec.name,
        **spec.shown,
        "acceleratorType": spec.slice.name,
        "acceleratorConfig": accelerator_config(spec.slice),
        "state": node.state,
        "createTime": timestamp(node.created),
        "id": str(node.uid),
        "apiVersion": "V2",
        "cidrBlock": spec.shown.get("cidrBlock") or "127.0.0.0/8",
        "networkConfig": {
            "network": "projects/local/global/networks/default",
            "subnetwork": "projects/local/regions/local/subnetworks/default",
            "enableExternalIps": True,
            **(spec.shown.get("networkConfig") or {}),
        },
        "schedulingConfig": _scheduling(node),
        "serviceAccount": spec.shown.get("serviceAccount")
        or {
            "email": "emulator@local.iam.gserviceaccount.com",
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        },
        "networkEndpoints": [
            {"ipAddress": host.ip, "port": host.port, "accessConfig": {"externalIp": host.ip}}
            for host in node.hosts
        ],
    }
    if node.state is NodeState.READY:
        shown["health"] = "HEALTHY"
    if node.request is not None:
        shown["queuedResource"] = node.request
    return shown


def _scheduling(node: Node) -> Json:
    tier = {"spot": {"spot": True, "preemptible": True}, "reserved": {"reserved": True}}
    return tier.get(node.spec.tier, {}) | (node.spec.shown.get("schedulingConfig") or {})


def operation_json(operation: Operation) -> Json:
    """A google.longrunning.Operation."""
    metadata: Json = {
        "@type": f"{_TYPES}.OperationMetadata",
        "createTime": timestamp(operation.created),
        "target": operation.subject.spec.name,
        "verb": operation.verb,
        "cancelRequested": False,
        "apiVersion": "v2",
    }
    shown: Json = {"name": operation.name, "metadata": metadata, "done": False}
    if operation.ended is None:
        return shown
    metadata["endTime"] = timestamp(operation.ended)
    shown["done"] = True
    if operation.error is not None:
        shown["error"] = operation.error.as_json()
    elif operation.verb == "delete":
        shown["response"] = {"@type": "type.googleapis.com/google.protobuf.Empty"}
    elif isinstance(operation.subject, Request):
        body = request_json(operation.subject)
        shown["response"] = {"@type": f"{_TYPES}.QueuedResource", **body}
    else:
        shown["response"] = {"@type": f"{_TYPES}.Node", **node_json(operation.subject)}
    return shown


def accelerator_config(tpu_slice: Slice) -> Json:
    """Type and topology of a slice."""
    return {
        "type": _CHIP_TYPE[tpu_slice.generation],
        "topology": "x".join(map(str, tpu_slice.topology)),
    }


def guest_attributes(node: Node, workers: Sequence[int], path: str) -> Json:
    """What the hosts published: their SSH host keys, one entry per worker."""
    entries: list[Json] = []
    for worker in workers:
        algorithm, _, key = node.hosts[worker].host_key.partition(" ")
        items = [{"namespace": "hostkeys", "key": algorithm, "value": key}]
        wanted = not path or f"hostkeys/{algorithm}".startswith(path)
        entries.append(
            {"queryPath": path or "hostkeys/", "queryValue": {"items": items if wanted else []}}
        )
    return {"guestAttributes": entries}
