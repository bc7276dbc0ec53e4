"""The things of the emulated cloud: requests, nodes, operations, and what there is of chips.

Values only; `fleet` decides what becomes of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from drumline.chips import Slice
from drumline.cloud.model.errors import Json, RpcStatus


class Tier(StrEnum):
    """How firmly chips are lent."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


class RequestState(StrEnum):
    """As the API calls them."""

    CREATING = "CREATING"
    WAITING = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    FAILED = "FAILED"
    DELETING = "DELETING"


class NodeState(StrEnum):
    """As the API calls them."""

    CREATING = "CREATING"
    READY = "READY"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RESTARTING = "RESTARTING"
    PREEMPTED = "PREEMPTED"
    TERMINATED = "TERMINATED"
    DELETING = "DELETING"


class By(StrEnum):
    """Who moved a request into its state."""

    USER = "USER"
    SERVICE = "SERVICE"


LOST = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED})
COMING_UP = frozenset({NodeState.CREATING, NodeState.STARTING, NodeState.RESTARTING})
"""Ready as soon as all hosts are."""
ENDED = frozenset({RequestState.SUSPENDED, RequestState.FAILED})


@dataclass(frozen=True)
class NodeSpec:
    """A node as it was asked for. `name` is the full one: projects/p/locations/z/nodes/n."""

    name: str
    slice: Slice
    tier: Tier
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    shown: Json
    """The caller's own fields, as the API shows them again."""

    @property
    def zone(self) -> str:
        """Where it stands."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class RequestSpec:
    """A queued resource as it was asked for."""

    name: str
    tier: Tier
    nodes: tuple[NodeSpec, ...]
    shown: Json

    @property
    def zone(self) -> str:
        """Where it asks."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class HostAddress:
    """Where a host answers, and the key it proves itself with (`ssh-ed25519 AAAA…`)."""

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
    hosts: tuple[HostAddress, ...] = ()
    answers: bool = False
    """Whether every host lets one in."""
    has_hosts: bool = True
    """Whether processes stand for it, or are about to."""
    has_disks: bool = True
    """Whether folders stand for it; a stopped node keeps its disks."""
    taken_at: float | None = None
    """When it will be preempted, if that is settled."""
    gone_at: float = 0.0
    gone: bool = False


@dataclass
class Request:
    """A queued resource."""

    spec: RequestSpec
    created: float
    due: float
    """Before then it does not leave its state."""
    state: RequestState = RequestState.CREATING
    by: By = By.USER
    error: RpcStatus | None = None
    gone: bool = False


@dataclass
class Operation:
    """A change under way, for callers that want to wait for its end."""

    name: str
    verb: str
    subject: Request | Node
    created: float
    ended: float | None = None
    error: RpcStatus | None = None
    nodes: tuple[Node, ...] = ()
    """Those under a request that it is about."""
    request_id: str = ""
    call: str = ""
    """What the caller asked for under that id."""


@dataclass(frozen=True)
class StartHosts:
    """The node's hosts are to be started."""

    node: Node


@dataclass(frozen=True)
class RestartHosts:
    """The node's hosts are to be reset, as with the button on the machine."""

    node: Node


@dataclass(frozen=True)
class EndHosts:
    """The node's hosts and all that runs there are to end at once."""

    node: Node
    keep_disks: bool = False


Order = StartHosts | RestartHosts | EndHosts


@dataclass
class Limits:
    """What there is to be had. Changed while it runs, by `capacity`."""

    capacity: dict[str, dict[str, int]] = field(default_factory=dict)
    """Zone → `v4` or `v4-8` → chips."""
    quota: dict[str, dict[Tier, int]] = field(default_factory=dict)
    """Zone or region → tier → chips."""
    fail_when_short: bool = False


@dataclass(frozen=True)
class CloudTiming:
    """How long things take, in seconds."""

    waiting: float = 0.0
    provision: float = 0.0
    delete: float = 0.0
    preempt_every: float | None = None
    """Mean life of a spot node."""
