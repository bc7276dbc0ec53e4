"""The lifecycle of requests and nodes. Pure: the clock and the random seed are arguments.

`Fleet` has all resources. API calls change it, and `advance` applies the changes that are due. Both
add orders (`StartHosts`, `RestartHosts`, `EndHosts`) for the module that runs the hosts, which
reports back with `hosts_booted` and `hosts_ended`.

    request   CREATING → WAITING_FOR_RESOURCES → PROVISIONING → ACTIVE → SUSPENDING → SUSPENDED
                                  └──────────────────┴→ FAILED            any → DELETING → gone
    node                                         CREATING → READY → PREEMPTED, TERMINATED
                              READY → STOPPING → STOPPED → STARTING → READY
                                        READY → RESTARTING → READY        any → DELETING → gone

A request that is FAILED or SUSPENDED stays, never gets nodes again, and uses its quota until it is
deleted. A preempted node stays too, without hosts and chips. A stopped node keeps its physical
machines.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from drumline.chips import region_of
from drumline.cloud.model.errors import (
    FAILED_PRECONDITION,
    ApiError,
    RpcStatus,
    already_exists,
    node_exists,
    not_found,
    not_supported,
    preempted_while_created,
    region_quota,
    stockout,
    wrong_state,
    zone_quota,
)
from drumline.cloud.model.machines import Machines
from drumline.cloud.model.operations import Operations
from drumline.cloud.model.resources import (
    FINAL_STATES,
    LOST,
    STARTING_STATES,
    CloudTiming,
    EndHosts,
    HostAddress,
    Initiator,
    Limits,
    Node,
    NodeSpec,
    NodeState,
    Operation,
    Order,
    Request,
    RequestSpec,
    RequestState,
    RestartHosts,
    StartHosts,
    Tier,
)


class Fleet:
    """All requests, nodes and operations of the emulated cloud."""

    def __init__(
        self,
        clock: Callable[[], float],
        limits: Limits | None = None,
        timing: CloudTiming | None = None,
        seed: int = 0,
    ) -> None:
        """Start with no resources."""
        self.limits = limits or Limits()
        self.timing = timing or CloudTiming()
        self.requests: dict[str, Request] = {}
        self.nodes: dict[str, Node] = {}
        self.orders: list[Order] = []
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311, it only decides about preemptions
        self.operations = Operations(clock, self._random)
        self.machines = Machines()

    # API calls

    def create_request(self, spec: RequestSpec) -> Operation:
        """Queue a request for one or more nodes."""
        for name in (spec.name, *(node.name for node in spec.nodes)):
            if name in self.requests or name in self.nodes or self._is_reserved_name(name):
                raise already_exists(name)
        check_quota(spec.nodes, self._specs_with_quota(), self.limits)
        self.machines.provide(spec.nodes)
        now = self._clock()
        request = Request(spec, created=now, due_at=now)
        self.requests[spec.name] = request
        return self.operations.start("create", request)

    def create_node(self, spec: NodeSpec) -> Operation:
        """Create a node without a queue: at once, or not at all."""
        if spec.name in self.nodes or self._is_reserved_name(spec.name):
            raise already_exists(spec.name)
        check_quota((spec,), self._specs_with_quota(), self.limits)
        self.machines.provide((spec,))
        if not fits((spec,), self.nodes.values(), self.limits):
            missing = Node(
                spec, uid=0, created=self._clock(), ready_at=0.0, has_hosts=False, has_disks=False
            )
            return self.operations.start("create", missing, _stockout(spec))
        return self.operations.start("create", self._make_node(spec, None))

    def delete_request(self, name: str, *, force: bool) -> Operation:
        """Delete a request and, with force, the nodes under it."""
        request = self.request(name)
        if request.state is RequestState.DELETING:
            return self.operations.start("delete", request)
        nodes = self.nodes_under(request)
        if nodes and not force:
            raise node_exists(name, [node.spec.name for node in nodes])
        self._set_state(request, RequestState.DELETING, Initiator.USER, self.timing.delete)
        for node in nodes:
            self._delete(node)
        return self.operations.start("delete", request)

    def delete_node(self, name: str) -> Operation:
        """Delete a node. Its request, if any, becomes SUSPENDED."""
        node = self.node(name)
        self._delete(node)
        return self.operations.start("delete", node)

    def stop_node(self, name: str) -> Operation:
        """Stop a node. It keeps its name and its disks, and frees its chips."""
        node = self.node(name)
        _check_stoppable(node, "stop")
        if node.state is not NodeState.READY:
            raise wrong_state(name, "stop", node.state, NodeState.READY)
        node.state = NodeState.STOPPING
        node.preempt_at = None
        self.orders.append(EndHosts(node, keep_disks=True))
        return self.operations.start("stop", node)

    def start_node(self, name: str) -> Operation:
        """Start a stopped node if there are chips for it."""
        node = self.node(name)
        _check_stoppable(node, "start")
        if node.state is not NodeState.STOPPED:
            raise wrong_state(name, "start", node.state, NodeState.STOPPED)
        if not fits((node.spec,), self.nodes.values(), self.limits):
            return self.operations.start("start", node, _stockout(node.spec))
        node.state = NodeState.STARTING
        node.has_hosts = True
        node.ready_at = self._clock() + self.timing.provision
        self.orders.append(StartHosts(node))
        return self.operations.start("start", node)

    def reset_request(self, name: str) -> Operation:
        """Reboot the hosts of a request. They keep their disks."""
        request = self.request(name)
        if request.state is not RequestState.ACTIVE:
            raise wrong_state(name, "reset", request.state, RequestState.ACTIVE)
        nodes = tuple(self.nodes_under(request))
        for node in nodes:
            node.state = NodeState.RESTARTING
            node.accepts_logins = False
            self.orders.append(RestartHosts(node))
        operation = self.operations.start("reset", request)
        operation.nodes = nodes
        return operation

    def relabel(self, name: str, labels: Mapping[str, str]) -> Operation:
        """Replace the labels of a node that is READY."""
        node = self.node(name)
        if node.state is not NodeState.READY:
            raise ApiError(
                RpcStatus(
                    FAILED_PRECONDITION, f"update is not supported while in state {node.state}"
                )
            )
        fields = node.spec.fields | {"labels": dict(labels)}
        node.spec = replace(node.spec, labels=dict(labels), fields=fields)
        return self.operations.start("update", node)

    def request(self, name: str) -> Request:
        """Return a request by its full name."""
        if name not in self.requests:
            raise not_found(name)
        return self.requests[name]

    def node(self, name: str) -> Node:
        """Return a node by its full name."""
        if name not in self.nodes:
            raise not_found(name)
        return self.nodes[name]

    def nodes_under(self, request: Request) -> list[Node]:
        """Return the nodes of a request in the order of its specs."""
        return [
            self.nodes[spec.name]
            for spec in request.spec.nodes
            if spec.name in self.nodes and self.nodes[spec.name].request == request.spec.name
        ]

    # Changes by the cloud

    def preempt(self, subject: Request | Node, after: float = 0.0) -> None:
        """Preempt a node, or a request in any state."""
        nodes = [subject] if isinstance(subject, Node) else self.nodes_under(subject)
        for node in nodes:
            if node.state is NodeState.READY or node.state in STARTING_STATES:
                node.preempt_at = self._clock() + after
        preemptable = {RequestState.CREATING, RequestState.WAITING}
        if isinstance(subject, Request) and subject.state in preemptable:
            self._set_state(subject, RequestState.SUSPENDING, Initiator.SERVICE)

    def hosts_booted(self, node: Node, hosts: tuple[HostAddress, ...]) -> None:
        """Record that all hosts of a node have booted and accept logins."""
        node.hosts = hosts
        node.accepts_logins = True

    def hosts_ended(self, node: Node, *, disks_kept: bool = False) -> None:
        """Record that the hosts of a node have ended, and their disks unless they are kept."""
        node.has_hosts = False
        node.has_disks = node.has_disks and disks_kept
        if not disks_kept:
            self.machines.release(node.machines)
            node.machines = ()
        node.hosts = ()
        node.accepts_logins = False

    def advance(self) -> None:
        """Apply all changes that are due."""
        now = self._clock()
        changed = True
        while changed:
            changed = False
            for node in list(self.nodes.values()):
                changed |= self._advance_node(node, now)
            for request in list(self.requests.values()):
                changed |= self._advance_request(request, now)
        self.operations.finish_done()

    def next_change_at(self) -> float | None:
        """Return the time of the next change that depends on time alone, if any."""
        return min(self._change_times(), default=None)

    def _change_times(self) -> Iterator[float]:
        now = self._clock()
        for request in self.requests.values():
            if request.due_at > now:
                yield request.due_at
        for node in self.nodes.values():
            if node.state in STARTING_STATES and node.ready_at > now:
                yield node.ready_at
            if node.preempt_at is not None:
                yield node.preempt_at
            if node.state is NodeState.DELETING and node.gone_at > now:
                yield node.gone_at

    def _advance_node(self, node: Node, now: float) -> bool:
        if node.state is NodeState.DELETING:
            if node.has_hosts or node.has_disks or now < node.gone_at:
                return False
            node.gone = True
            del self.nodes[node.spec.name]
            return True
        if node.preempt_at is not None and now >= node.preempt_at:
            self._preempt_now(node)
            return True
        if node.state is NodeState.STOPPING and not node.has_hosts:
            node.state = NodeState.STOPPED
            return True
        if node.state in STARTING_STATES and node.accepts_logins and now >= node.ready_at:
            node.state = NodeState.READY
            mean_lifetime = self.timing.preempt_every
            if (
                mean_lifetime is not None
                and node.spec.tier is Tier.SPOT
                and node.preempt_at is None
            ):
                node.preempt_at = now + self._random.expovariate(1 / mean_lifetime)
            return True
        return False

    def _advance_request(self, request: Request, now: float) -> bool:
        if now < request.due_at:
            return False
        nodes = self.nodes_under(request)
        match request.state:
            case RequestState.CREATING:
                self._set_state(
                    request, RequestState.WAITING, Initiator.SERVICE, self.timing.waiting
                )
            case RequestState.WAITING:
                return self._try_to_provision(request)
            case RequestState.PROVISIONING if any(node.state in LOST for node in nodes):
                self._fail(request, preempted_while_created())
            case RequestState.PROVISIONING if _all_ready(request, nodes):
                self._set_state(request, RequestState.ACTIVE, Initiator.SERVICE)
            case RequestState.ACTIVE | RequestState.PROVISIONING if any(
                node.state in LOST for node in nodes
            ):
                self._suspend(request, nodes, Initiator.SERVICE)
            case RequestState.ACTIVE | RequestState.PROVISIONING if len(nodes) < len(
                request.spec.nodes
            ):
                self._suspend(request, nodes, Initiator.USER)
            case RequestState.SUSPENDING if not any(node.has_hosts for node in nodes):
                self._set_state(request, RequestState.SUSPENDED, request.initiator)
            case RequestState.DELETING if not nodes:
                request.gone = True
                del self.requests[request.spec.name]
            case _:
                return False
        return True

    def _try_to_provision(self, request: Request) -> bool:
        if fits(request.spec.nodes, self.nodes.values(), self.limits):
            self._set_state(request, RequestState.PROVISIONING, Initiator.SERVICE)
            for spec in request.spec.nodes:
                self._make_node(spec, request.spec.name)
            return True
        if self.limits.fail_when_short:
            self._fail(request, _stockout(request.spec))
            return True
        return False

    def _set_state(
        self, request: Request, state: RequestState, initiator: Initiator, delay: float = 0.0
    ) -> None:
        request.state, request.initiator, request.due_at = state, initiator, self._clock() + delay

    def _fail(self, request: Request, error: RpcStatus) -> None:
        self._set_state(request, RequestState.FAILED, Initiator.SERVICE)
        request.error = error
        for node in self.nodes_under(request):
            if node.state not in LOST:
                self._preempt_now(node)

    def _suspend(self, request: Request, nodes: list[Node], initiator: Initiator) -> None:
        # The nodes of a request run one program, so all of them are preempted together.
        self._set_state(request, RequestState.SUSPENDING, initiator)
        for node in nodes:
            if node.state not in LOST and node.state is not NodeState.DELETING:
                self._preempt_now(node)

    def _make_node(self, spec: NodeSpec, request: str | None) -> Node:
        now = self._clock()
        node = Node(
            spec,
            uid=self._random.getrandbits(62),
            created=now,
            ready_at=now + self.timing.provision,
            request=request,
            machines=self.machines.assign(spec),
        )
        self.nodes[spec.name] = node
        self.orders.append(StartHosts(node))
        return node

    def _preempt_now(self, node: Node) -> None:
        # Only spot nodes are preempted. Others are terminated by a failure.
        spot = node.spec.tier is Tier.SPOT
        node.state = NodeState.PREEMPTED if spot else NodeState.TERMINATED
        node.preempt_at = None
        self._end_hosts(node)

    def _delete(self, node: Node) -> None:
        if node.state is NodeState.DELETING:
            return
        node.state = NodeState.DELETING
        node.preempt_at = None
        node.gone_at = self._clock() + self.timing.delete
        self._end_hosts(node)

    def _end_hosts(self, node: Node) -> None:
        if node.has_hosts or node.has_disks:
            self.orders.append(EndHosts(node))

    # Names and quota

    def _is_reserved_name(self, name: str) -> bool:
        return any(
            name == spec.name
            for request in self.requests.values()
            if request.state not in FINAL_STATES
            for spec in request.spec.nodes
        )

    def _specs_with_quota(self) -> Iterator[NodeSpec]:
        for request in self.requests.values():
            yield from request.spec.nodes
        for node in self.nodes.values():
            if node.request is None:
                yield node.spec


def _all_ready(request: Request, nodes: list[Node]) -> bool:
    return len(nodes) == len(request.spec.nodes) and all(
        node.state is NodeState.READY for node in nodes
    )


def _stockout(spec: NodeSpec | RequestSpec) -> RpcStatus:
    return stockout(spec.zone, reserved=spec.tier is Tier.RESERVED)


def _check_stoppable(node: Node, verb: str) -> None:
    """Raise ApiError unless the node has one host and was created without a queue."""
    if node.request is not None:
        raise not_supported(node.spec.name, verb, "it was created through a queued resource")
    if node.spec.slice.hosts > 1:
        raise not_supported(node.spec.name, verb, "it has more than one host")


# Capacity and quota -----------------------------------------------------------------------------


def fits(specs: Sequence[NodeSpec], nodes: Iterable[Node], limits: Limits) -> bool:
    """Return True if a zone has the chips for these nodes, in addition to those that run."""
    zone = specs[0].zone
    running = [node.spec for node in nodes if node.has_hosts and node.spec.zone == zone]
    for pool, chips in limits.capacity.get(zone, {}).items():
        requested = sum(spec.slice.chips for spec in specs if _uses_pool(spec, pool))
        used = sum(spec.slice.chips for spec in running if _uses_pool(spec, pool))
        if requested and used + requested > chips:
            return False
    return True


def check_quota(specs: Sequence[NodeSpec], existing: Iterable[NodeSpec], limits: Limits) -> None:
    """Raise ApiError if the nodes exceed, with the existing ones, the quota of a zone or region."""
    first = specs[0]
    requested = sum(spec.slice.chips for spec in specs)
    same_tier = [spec for spec in existing if spec.tier is first.tier]
    for location, error in ((first.zone, zone_quota), (region_of(first.zone), region_quota)):
        limit = limits.quota.get(location, {}).get(first.tier)
        if limit is None:
            continue
        used = sum(
            spec.slice.chips for spec in same_tier if location in {spec.zone, region_of(spec.zone)}
        )
        if used + requested > limit:
            raise ApiError(error(first.slice.generation, first.tier, location, limit))


def _uses_pool(spec: NodeSpec, pool: str) -> bool:
    return pool in {spec.slice.name, spec.slice.generation}
