"""The resources of the emulated cloud: requests, nodes, operations, and limits on chips.

They are plain values. `fleet` changes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from drumline.chips import Slice
from drumline.cloud.model.errors import Json, RpcStatus


class Tier(StrEnum):
    """The capacity tiers."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


class RequestState(StrEnum):
    """The states of a queued resource, as the API names them."""

    CREATING = "CREATING"
    WAITING = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    FAILED = "FAILED"
    DELETING = "DELETING"


class NodeState(StrEnum):
    """The states of a node, as the API names them."""

    CREATING = "CREATING"
    READY = "READY"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RESTARTING = "RESTARTING"
    PREEMPTED = "PREEMPTED"
    TERMINATED = "TERMINATED"
    DELETING = "DELETING"


class Initiator(StrEnum):
    """The party that changed the state of a request."""

    USER = "USER"
    SERVICE = "SERVICE"


LOST = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED})
STARTING_STATES = frozenset({NodeState.CREATING, NodeState.STARTING, NodeState.RESTARTING})
"""The states of a node that becomes READY once all its hosts accept logins."""
FINAL_STATES = frozenset({RequestState.SUSPENDED, RequestState.FAILED})


@dataclass(frozen=True)
class NodeSpec:
    """A node as it was requested. `name` is the full name: projects/p/locations/z/nodes/n."""

    name: str
    slice: Slice
    tier: Tier
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    fields: Json
    """The fields that the caller set and that the API returns."""

    @property
    def zone(self) -> str:
        """The zone of the node."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class RequestSpec:
    """A queued resource as it was requested."""

    name: str
    tier: Tier
    nodes: tuple[NodeSpec, ...]
    fields: Json

    @property
    def zone(self) -> str:
        """The zone of the request."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class HostAddress:
    """The address of a host, and its host key (`ssh-ed25519 AAAA…`)."""

    ip: str
    port: int
    host_key: str


@dataclass
class Node:
    """A slice that exists."""

    spec: NodeSpec
    uid: int
    created: float
    ready_at: float
    request: str | None = None
    state: NodeState = NodeState.CREATING
    machines: tuple[str, ...] = ()
    """The physical machine under each host, as long as the node has disks."""
    hosts: tuple[HostAddress, ...] = ()
    accepts_logins: bool = False
    """True if every host accepts logins."""
    has_hosts: bool = True
    """True if its hosts run as processes or are starting."""
    has_disks: bool = True
    """True if the folders of its hosts exist. A stopped node keeps its disks."""
    preempt_at: float | None = None
    """The time of its preemption, if it is decided."""
    health: str = ""
    """Its health as the API names it; empty if the API leaves it out."""
    gone_at: float = 0.0
    gone: bool = False


@dataclass
class Request:
    """A queued resource."""

    spec: RequestSpec
    created: float
    due_at: float
    """The earliest time at which the request leaves its state."""
    state: RequestState = RequestState.CREATING
    initiator: Initiator = Initiator.USER
    error: RpcStatus | None = None
    gone: bool = False


@dataclass
class Operation:
    """A change that callers can wait for."""

    name: str
    verb: str
    subject: Request | Node
    created: float
    ended: float | None = None
    error: RpcStatus | None = None
    nodes: tuple[Node, ...] = ()
    """The nodes of a request that is being reset."""
    request_id: str = ""
    call: str = ""
    """The call of this request id."""


@dataclass(frozen=True)
class StartHosts:
    """An order to start the hosts of a node."""

    node: Node


@dataclass(frozen=True)
class RestartHosts:
    """An order to reboot the hosts of a node."""

    node: Node


@dataclass(frozen=True)
class EndHosts:
    """An order to kill the hosts of a node and all their processes."""

    node: Node
    keep_disks: bool = False


Order = StartHosts | RestartHosts | EndHosts


@dataclass
class Limits:
    """Capacity and quota, which the `capacity` control can change."""

    capacity: dict[str, dict[str, int]] = field(default_factory=dict)
    """The number of chips, by zone and by `v4` or `v4-8`."""
    quota: dict[str, dict[Tier, int]] = field(default_factory=dict)
    """The number of chips a project may use, by zone or region and by tier."""
    fail_when_short: bool = False


@dataclass(frozen=True)
class CloudTiming:
    """The delays of the cloud, in seconds."""

    waiting: float = 0.0
    provision: float = 0.0
    delete: float = 0.0
    preempt_every: float | None = None
    """The mean lifetime of a spot node; None means no preemption."""
