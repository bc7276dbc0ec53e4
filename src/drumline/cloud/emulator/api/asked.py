"""Reads and validates what a caller sent: from the JSON of the API to the values of `fleet`.

Field names may be camelCase or snake_case, and enums names or numbers, as protobuf's JSON allows;
a field that does not exist is refused, as by Google.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from drumline.chips import LOCAL_ZONES, Slice, UnknownName, slice_of, slices, zone_offers
from drumline.cloud.model.errors import Json, invalid
from drumline.cloud.model.resources import NodeSpec, RequestSpec, Tier

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
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


def _plain_type(given: object) -> object:
    return CHIP_TYPES[given][0] if isinstance(given, int) and given in CHIP_TYPES else given


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)

    def plain(self) -> Json:
        """The JSON that the API would return: only what was set."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class _SchedulingConfig(_Message):
    preemptible: bool = False
    reserved: bool = False
    spot: bool = False


class _AcceleratorConfig(_Message):
    type: Annotated[str, BeforeValidator(_plain_type)]
    topology: str


class _Node(_Message):
    """The fields of a node. Those that only the service sets are accepted and ignored."""

    name: str = ""
    description: str = ""
    accelerator_type: str = ""
    accelerator_config: _AcceleratorConfig | None = None
    runtime_version: str = ""
    network_config: Json | None = None
    network_configs: list[Json] = []
    cidr_block: str = ""
    service_account: Json | None = None
    scheduling_config: _SchedulingConfig = Field(default_factory=_SchedulingConfig)
    labels: dict[str, str] = {}
    metadata: dict[str, str] = {}
    tags: list[str] = []
    data_disks: list[Json] = []
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


_SERVICE_SETS = {
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
    reserved: bool = False


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
    """A queued resource to create under `projects/p/locations/z`."""
    _check_id(request_id, "queued_resource_id")
    given = _read(_QueuedResource, body, "queued_resource")
    if given.spot is not None and given.guaranteed is not None:
        raise invalid("Only one of spot and guaranteed may be set", "queued_resource.tier")
    tier = Tier.ON_DEMAND
    if given.spot is not None:
        tier = Tier.SPOT
    elif given.reservation_name or (given.guaranteed is not None and given.guaranteed.reserved):
        tier = Tier.RESERVED
    nodes: list[NodeSpec] = []
    for index, spec in enumerate(given.tpu.node_spec):
        where = f"queued_resource.tpu.node_spec[{index}]"
        if spec.parent != parent:
            raise invalid(f"{where}.parent must be '{parent}'", f"{where}.parent")
        identities = _node_ids(spec, request_id, where)
        nodes += [_node_spec(parent, identity, spec.node, tier) for identity in identities]
    shown = given.plain()
    for field in ("name", "createTime", "state"):
        shown.pop(field, None)
    return RequestSpec(f"{parent}/queuedResources/{request_id}", tier, tuple(nodes), shown)


def node_spec(parent: str, node_id: str, body: object) -> NodeSpec:
    """A node to create under `projects/p/locations/z`, without a queue."""
    given = _read(_Node, body, "node")
    config = given.scheduling_config
    tier = Tier.ON_DEMAND
    if config.spot or config.preemptible:
        tier = Tier.SPOT
    elif config.reserved:
        tier = Tier.RESERVED
    return _node_spec(parent, node_id, given, tier)


def check_labels(labels: Mapping[str, str], field: str) -> None:
    """Refuse labels that Google would refuse."""
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise invalid(f"Invalid label key '{key}': must match {_LABEL_KEY.pattern}", field)
        if not _LABEL_VALUE.fullmatch(value):
            message = f"Invalid value '{value}' of label '{key}': must match {_LABEL_VALUE.pattern}"
            raise invalid(message, field)


def _node_ids(spec: _NodeSpec, request_id: str, where: str) -> list[str]:
    many = spec.multislice_params
    if bool(spec.node_id) == (many is not None):
        raise invalid(f"{where}: set one of node_id and multislice_params", where)
    if many is None:
        return [spec.node_id]
    return [f"{many.node_id_prefix or request_id}-{index}" for index in range(many.node_count)]


def _node_spec(parent: str, node_id: str, given: _Node, tier: Tier) -> NodeSpec:
    _check_id(node_id, "node_id")
    check_labels(given.labels, "node.labels")
    zone = parent.rpartition("/")[2]
    wanted = _accelerator(given, zone)
    if not _RUNTIME.fullmatch(given.runtime_version):
        named = given.runtime_version
        message = f"Runtime version '{named}' was not found in zone {zone}"
        raise invalid(
            message if named else "Required field node.runtime_version is missing",
            "node.runtime_version",
        )
    shown = {key: value for key, value in given.plain().items() if key not in _SERVICE_SETS}
    return NodeSpec(
        name=f"{parent}/nodes/{node_id}",
        slice=wanted,
        tier=tier,
        labels=given.labels,
        metadata=given.metadata,
        shown=shown,
    )


def _accelerator(given: _Node, zone: str) -> Slice:
    if given.accelerator_config is not None:
        if given.accelerator_type:
            raise invalid("Only one of accelerator_type and accelerator_config may be set", "node")
        name = f"{given.accelerator_config.type} {given.accelerator_config.topology}"
        found = _of_topology(given.accelerator_config)
    else:
        name = given.accelerator_type
        if not name:
            raise invalid("Required field node.accelerator_type is missing", "node")
        try:
            found = slice_of(name)
        except UnknownName as wrong:
            raise invalid(f"Accelerator type '{name}' is invalid: {wrong}", "node") from wrong
        # `v5e-16` is the common name; the API has only `v5litepod-16`.
        found = found if found.name == name else None
    sold = found is not None and found.runtime_image is not None
    here = found is not None and (
        zone in LOCAL_ZONES or any(offer.zone == zone for offer in zone_offers(found))
    )
    if found is None or not sold or not here:
        message = (
            f"Cloud TPU received a bad request. The accelerator {name} was not found in zone {zone}"
        )
        raise invalid(message, "node.accelerator_type")
    return found


def _of_topology(config: _AcceleratorConfig) -> Slice | None:
    generation = dict(CHIP_TYPES.values()).get(config.type)
    for candidate in slices():
        if (
            candidate.generation == generation
            and "x".join(map(str, candidate.topology)) == config.topology
        ):
            return candidate
    return None


def _check_id(given: str, field: str) -> None:
    if not _ID.fullmatch(given):
        raise invalid(f"Invalid {field} '{given}': must match {_ID.pattern}", field)


def _read(model: type[M], body: object, root: str) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as wrong:
        problem = wrong.errors()[0]
        *path, last = problem["loc"] or ("",)
        where = root
        for part in path:
            where += f"[{part}]" if isinstance(part, int) else f".{part}"
        if problem["type"] == "extra_forbidden":
            message = (
                f'Invalid JSON payload received. Unknown name "{last}" at '
                f"'{where}': Cannot find field."
            )
        elif problem["type"] == "missing":
            message = f"Required field {where}.{last} is missing"
        else:
            message = f"Invalid value at '{where}.{last}': {problem['msg']}"
        raise invalid(message, f"{where}.{last}") from wrong


def read_json_object(body: Any) -> Json:
    """The body of a call as an object; anything else is refused."""
    if not isinstance(body, dict):
        raise invalid("Invalid JSON payload received. Expected an object.")
    return body
