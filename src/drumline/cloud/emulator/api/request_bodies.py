"""Parses and validates the bodies of calls: from the JSON of the API to the values of `fleet`.

As in protobuf's JSON, field names may be camelCase or snake_case, and enums names or numbers. As at
Google, an unknown field is an error.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from drumline.chips import LOCAL_ZONES, Slice, UnknownName, slice_of, slices, zone_offers
from drumline.cloud.model.errors import Json, invalid
from drumline.cloud.model.resources import NodeSpec, RequestSpec, Tier

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_NETWORK = re.compile(r"([^\s]+/networks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBNETWORK = re.compile(r"([^\s]+/subnetworks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_DISK = re.compile(
    r"projects/[^/\s]+/zones/(?P<zone>[^/\s]+)/disks/[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
)
_RESERVATION = re.compile(
    r"(projects|folders|organizations)/[^/\s]+/locations/(?P<zone>[^/\s]+)"
    r"/reservations/(-|[a-z]([a-z0-9-]{0,61}[a-z0-9])?)"
)
_DISK_MODES = {0: "DISK_MODE_UNSPECIFIED", 1: "READ_WRITE", 2: "READ_ONLY"}
_RUNTIME = re.compile(r"(tpu-(vm|ubuntu[0-9]{4})-|v2-(alpha|nightly|tpu))[a-z0-9.-]*")
CHIP_TYPES = {
    2: ("V2", "v2"),
    4: ("V3", "v3"),
    7: ("V4", "v4"),
    9: ("V5LITE_POD", "v5e"),
    10: ("V5P", "v5p"),
    11: ("V6E", "v6e"),
}


M = TypeVar("M", bound="_Message")


def _type_name(value: object) -> object:
    return CHIP_TYPES[value][0] if isinstance(value, int) and value in CHIP_TYPES else value


def _mode_name(value: object) -> object:
    return _DISK_MODES.get(value, value) if isinstance(value, int) else value


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)

    def as_json(self) -> Json:
        """Return the JSON that the API returns: the fields that were set."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class _SchedulingConfig(_Message):
    preemptible: bool = False
    reserved: bool = False
    spot: bool = False


class _AcceleratorConfig(_Message):
    type: Annotated[str, BeforeValidator(_type_name)]
    topology: str


class _NetworkConfig(_Message):
    network: str = ""
    subnetwork: str = ""
    enable_external_ips: bool = False
    can_ip_forward: bool = False
    queue_count: int = 0


class _ServiceAccount(_Message):
    email: str = ""
    scope: list[str] = []


class _AttachedDisk(_Message):
    source_disk: str
    mode: Annotated[
        Literal["DISK_MODE_UNSPECIFIED", "READ_WRITE", "READ_ONLY"], BeforeValidator(_mode_name)
    ] = "DISK_MODE_UNSPECIFIED"


class _Node(_Message):
    """The fields of a node. Output-only fields are accepted and ignored."""

    name: str = ""
    description: str = ""
    accelerator_type: str = ""
    accelerator_config: _AcceleratorConfig | None = None
    runtime_version: str = ""
    network_config: _NetworkConfig | None = None
    network_configs: list[_NetworkConfig] = []
    cidr_block: str = ""
    service_account: _ServiceAccount | None = None
    scheduling_config: _SchedulingConfig = Field(default_factory=_SchedulingConfig)
    labels: dict[str, str] = {}
    metadata: dict[str, str] = {}
    tags: list[str] = []
    data_disks: list[_AttachedDisk] = []
    shielded_instance_config: Json | None = None
    state: str | int = ""
    health: str | int = ""
    id: str | int = ""
    create_time: str = ""
    network_endpoints: list[Json] = []
    health_description: str = ""
    api_version: str | int = ""
    symptoms: list[Json] = []
    queued_resource: str = ""
    multislice_node: bool = False


_OUTPUT_ONLY = {
    "name", "state", "health", "id", "createTime", "networkEndpoints", "healthDescription",
    "apiVersion", "symptoms", "queuedResource", "multisliceNode",
}  # fmt: skip


class _Multislice(_Message):
    node_count: int = Field(ge=2)
    node_id_prefix: str = ""
    workload_type: str | int = ""


class _NodeSpec(_Message):
    parent: str
    node_id: str = ""
    multislice_params: _Multislice | None = None
    node: _Node


class _Tpu(_Message):
    node_spec: list[_NodeSpec] = Field(min_length=1)


class _Guaranteed(_Message):
    min_duration: str = ""


class _QueuedResource(_Message):
    name: str = ""
    create_time: str = ""
    tpu: _Tpu
    spot: Json | None = None
    guaranteed: _Guaranteed | None = None
    queueing_policy: Json | None = None
    reservation_name: str = ""
    state: Json | None = None
    encryption_spec: Json | None = None


def request_spec(parent: str, request_id: str, body: object) -> RequestSpec:
    """Parse a queued resource to create under `projects/p/locations/z`."""
    _check_id(request_id, "queued_resource_id")
    message = _parse(_QueuedResource, body, "queued_resource")
    guaranteed = message.guaranteed
    if message.spot is not None and guaranteed is not None:
        raise invalid("Only one of spot and guaranteed may be set", "queued_resource.tier")
    if message.spot is not None and message.reservation_name:
        raise invalid("A spot request has no reservation", "queued_resource.reservation_name")
    tier = Tier.ON_DEMAND
    if message.spot is not None:
        tier = Tier.SPOT
    elif message.reservation_name:
        _check_place(message.reservation_name, _RESERVATION, parent, "reservation_name")
        tier = Tier.RESERVED
    nodes: list[NodeSpec] = []
    for index, spec in enumerate(message.tpu.node_spec):
        path = f"queued_resource.tpu.node_spec[{index}]"
        if spec.parent != parent:
            raise invalid(f"{path}.parent must be '{parent}'", f"{path}.parent")
        node_ids = _node_ids(spec, request_id, path)
        nodes += [_node_spec(parent, node_id, spec.node, tier) for node_id in node_ids]
    fields = message.as_json()
    for field in ("name", "createTime", "state"):
        fields.pop(field, None)
    return RequestSpec(f"{parent}/queuedResources/{request_id}", tier, tuple(nodes), fields)


def node_spec(parent: str, node_id: str, body: object) -> NodeSpec:
    """Parse a node to create without a queue under `projects/p/locations/z`."""
    node = _parse(_Node, body, "node")
    config = node.scheduling_config
    tier = Tier.ON_DEMAND
    if config.spot or config.preemptible:
        tier = Tier.SPOT
    elif config.reserved:
        tier = Tier.RESERVED
    return _node_spec(parent, node_id, node, tier)


def check_labels(labels: Mapping[str, str], field: str) -> None:
    """Raise ApiError for labels that Google rejects."""
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise invalid(f"Invalid label key '{key}': must match {_LABEL_KEY.pattern}", field)
        if not _LABEL_VALUE.fullmatch(value):
            message = f"Invalid value '{value}' of label '{key}': must match {_LABEL_VALUE.pattern}"
            raise invalid(message, field)


def _node_ids(spec: _NodeSpec, request_id: str, path: str) -> list[str]:
    multislice = spec.multislice_params
    if bool(spec.node_id) == (multislice is not None):
        raise invalid(f"{path}: set one of node_id and multislice_params", path)
    if multislice is None:
        return [spec.node_id]
    prefix = multislice.node_id_prefix or request_id
    return [f"{prefix}-{index}" for index in range(multislice.node_count)]


def _node_spec(parent: str, node_id: str, node: _Node, tier: Tier) -> NodeSpec:
    _check_id(node_id, "node_id")
    check_labels(node.labels, "node.labels")
    zone = parent.rpartition("/")[2]
    tpu_slice = _slice_of_node(node, zone)
    _check_options(node, parent, tpu_slice)
    if not _RUNTIME.fullmatch(node.runtime_version):
        version = node.runtime_version
        message = f"Runtime version '{version}' was not found in zone {zone}"
        raise invalid(
            message if version else "Required field node.runtime_version is missing",
            "node.runtime_version",
        )
    fields = {key: value for key, value in node.as_json().items() if key not in _OUTPUT_ONLY}
    return NodeSpec(
        name=f"{parent}/nodes/{node_id}",
        slice=tpu_slice,
        tier=tier,
        labels=node.labels,
        metadata=node.metadata,
        fields=fields,
    )


def _check_options(node: _Node, parent: str, tpu_slice: Slice) -> None:
    """Raise ApiError for a network, tag, account or disk that Google rejects."""
    for config in [*([node.network_config] if node.network_config else []), *node.network_configs]:
        for name, pattern in ((config.network, _NETWORK), (config.subnetwork, _SUBNETWORK)):
            if name and not pattern.fullmatch(name):
                raise invalid(f"Invalid network '{name}'", "node.network_config")
    for tag in node.tags:
        if not _TAG.fullmatch(tag):
            raise invalid(f"Invalid tag '{tag}': must match {_TAG.pattern}", "node.tags")
    account = node.service_account
    if account is not None and account.email and not _EMAIL.fullmatch(account.email):
        raise invalid(f"Invalid service account '{account.email}'", "node.service_account")
    for disk in node.data_disks:
        _check_place(disk.source_disk, _DISK, parent, "node.data_disks")
        if disk.mode != "READ_ONLY" and tpu_slice.hosts > 1:
            message = f"A slice of {tpu_slice.hosts} workers can attach disks as READ_ONLY only"
            raise invalid(message, "node.data_disks")


def _check_place(path: str, pattern: re.Pattern[str], parent: str, field: str) -> None:
    """Raise ApiError unless a path matches, and names the zone of `parent`."""
    match = pattern.fullmatch(path)
    if match is None:
        raise invalid(f"Invalid value '{path}': must match {pattern.pattern}", field)
    zone = parent.rpartition("/")[2]
    if match["zone"] != zone:
        raise invalid(f"'{path}' is not in the zone of the request, {zone}", field)


def _slice_of_node(node: _Node, zone: str) -> Slice:
    if node.accelerator_config is not None:
        if node.accelerator_type:
            raise invalid("Only one of accelerator_type and accelerator_config may be set", "node")
        name = f"{node.accelerator_config.type} {node.accelerator_config.topology}"
        tpu_slice = _slice_of_topology(node.accelerator_config)
    else:
        name = node.accelerator_type
        if not name:
            raise invalid("Required field node.accelerator_type is missing", "node")
        try:
            tpu_slice = slice_of(name)
        except UnknownName as error:
            raise invalid(f"Accelerator type '{name}' is invalid: {error}", "node") from error
        # `v5e-16` is the common name; the API has only `v5litepod-16`.
        tpu_slice = tpu_slice if tpu_slice.name == name else None
    if (
        tpu_slice is None
        or tpu_slice.runtime_image is None
        or not (zone in LOCAL_ZONES or any(offer.zone == zone for offer in zone_offers(tpu_slice)))
    ):
        message = (
            f"Cloud TPU received a bad request. The accelerator {name} was not found in zone {zone}"
        )
        raise invalid(message, "node.accelerator_type")
    return tpu_slice


def _slice_of_topology(config: _AcceleratorConfig) -> Slice | None:
    generation = dict(CHIP_TYPES.values()).get(config.type)
    for candidate in slices():
        if (
            candidate.generation == generation
            and "x".join(map(str, candidate.topology)) == config.topology
        ):
            return candidate
    return None


def _check_id(value: str, field: str) -> None:
    if not _ID.fullmatch(value):
        raise invalid(f"Invalid {field} '{value}': must match {_ID.pattern}", field)


def _parse(model: type[M], body: object, root: str) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors()[0]
        *parents, name = details["loc"] or ("",)
        path = root
        for parent in parents:
            path += f"[{parent}]" if isinstance(parent, int) else f".{parent}"
        if details["type"] == "extra_forbidden":
            message = (
                f'Invalid JSON payload received. Unknown name "{name}" at '
                f"'{path}': Cannot find field."
            )
        elif details["type"] == "missing":
            message = f"Required field {path}.{name} is missing"
        else:
            message = f"Invalid value at '{path}.{name}': {details['msg']}"
        raise invalid(message, f"{path}.{name}") from error


def require_object(body: Any) -> Json:
    """Return the body if it is a JSON object, else raise ApiError."""
    if not isinstance(body, dict):
        raise invalid("Invalid JSON payload received. Expected an object.")
    return body
