"""The JSON of requests, nodes and operations in Cloud TPU v2."""

from collections.abc import Sequence
from datetime import UTC, datetime

from drumline.chips import Slice
from drumline.cloud.emulator.api.request_bodies import CHIP_TYPES
from drumline.cloud.model.errors import Json
from drumline.cloud.model.resources import Node, NodeState, Operation, Request, RequestState

_TYPES = "type.googleapis.com/google.cloud.tpu.v2"
_TYPE_OF_GENERATION = {generation: name for name, generation in CHIP_TYPES.values()}
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
    """Return a time in RFC 3339, as in protobuf's JSON."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def request_json(request: Request) -> Json:
    """Return a QueuedResource."""
    state: Json = {"state": request.state, "stateInitiator": request.initiator}
    if request.state in _STATE_DATA:
        error = {"error": request.error.as_json()} if request.error else {}
        state[_STATE_DATA[request.state]] = error
    return {
        "name": request.spec.name,
        "createTime": timestamp(request.created),
        **request.spec.fields,
        "state": state,
    }


def node_json(node: Node) -> Json:
    """Return a Node."""
    spec = node.spec
    network: Json = {
        "network": "projects/local/global/networks/default",
        "subnetwork": "projects/local/regions/local/subnetworks/default",
        # Without a network, nodes have external addresses. Elsewhere the default is protobuf's.
        "enableExternalIps": not spec.fields.get("networkConfig"),
        **(spec.fields.get("networkConfig") or {}),
    }
    result: Json = {
        "name": spec.name,
        **spec.fields,
        "acceleratorType": spec.slice.name,
        "acceleratorConfig": accelerator_config(spec.slice),
        "state": node.state,
        "createTime": timestamp(node.created),
        "id": str(node.uid),
        "apiVersion": "V2",
        "cidrBlock": spec.fields.get("cidrBlock") or "127.0.0.0/8",
        "networkConfig": network,
        "schedulingConfig": _scheduling_config(node),
        "serviceAccount": spec.fields.get("serviceAccount")
        or {
            "email": "emulator@local.iam.gserviceaccount.com",
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        },
        "networkEndpoints": [
            {"ipAddress": host.ip, "port": host.port}
            | ({"accessConfig": {"externalIp": host.ip}} if network["enableExternalIps"] else {})
            for host in node.hosts
        ],
    }
    if node.state is NodeState.READY:
        result["health"] = "HEALTHY"
    if node.request is not None:
        result["queuedResource"] = node.request
    return result


def _scheduling_config(node: Node) -> Json:
    tier = {"spot": {"spot": True, "preemptible": True}, "reserved": {"reserved": True}}
    return tier.get(node.spec.tier, {}) | (node.spec.fields.get("schedulingConfig") or {})


def operation_json(operation: Operation) -> Json:
    """Return a google.longrunning.Operation."""
    metadata: Json = {
        "@type": f"{_TYPES}.OperationMetadata",
        "createTime": timestamp(operation.created),
        "target": operation.subject.spec.name,
        "verb": operation.verb,
        "cancelRequested": False,
        "apiVersion": "v2",
    }
    result: Json = {"name": operation.name, "metadata": metadata, "done": False}
    if operation.ended is None:
        return result
    metadata["endTime"] = timestamp(operation.ended)
    result["done"] = True
    if operation.error is not None:
        result["error"] = operation.error.as_json()
    elif operation.verb == "delete":
        result["response"] = {"@type": "type.googleapis.com/google.protobuf.Empty"}
    elif isinstance(operation.subject, Request):
        body = request_json(operation.subject)
        result["response"] = {"@type": f"{_TYPES}.QueuedResource", **body}
    else:
        result["response"] = {"@type": f"{_TYPES}.Node", **node_json(operation.subject)}
    return result


def accelerator_config(tpu_slice: Slice) -> Json:
    """Return the type and topology of a slice."""
    return {
        "type": _TYPE_OF_GENERATION[tpu_slice.generation],
        "topology": "x".join(map(str, tpu_slice.topology)),
    }


def guest_attributes(node: Node, workers: Sequence[int], path: str) -> Json:
    """Return the SSH host keys that the hosts publish, one entry per worker."""
    entries: list[Json] = []
    for worker in workers:
        algorithm, _, key = node.hosts[worker].host_key.partition(" ")
        node_name = node.spec.name.rpartition("/")[2]
        attributes = {algorithm: key, "hostname": f"t1v-n-{node_name}-w-{worker}"}
        items = [
            {"namespace": "hostkeys", "key": name, "value": value}
            for name, value in attributes.items()
            if not path or f"hostkeys/{name}".startswith(path)
        ]
        entries.append({"queryPath": path or "hostkeys/", "queryValue": {"items": items}})
    return {"guestAttributes": entries}
