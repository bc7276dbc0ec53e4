"""The life of requests and nodes. Pure: no I/O, the clock and the random seed are arguments.

`Fleet` holds all resources. Calls change it, `advance` applies what is due, and both leave orders
(`StartHosts`, `RestartHosts`, `EndHosts`) for the module that runs the hosts, which reports back
with `hosts_up` and `hosts_gone`.

    request   CREATING → WAITING_FOR_RESOURCES → PROVISIONING → ACTIVE → SUSPENDING → SUSPENDED
                                  └──────────────────┴→ FAILED            any → DELETING → gone
    node                                         CREATING → READY → PREEMPTED, TERMINATED
                              READY → STOPPING → STOPPED → STARTING → READY
                                        READY → RESTARTING → READY        any → DELETING → gone

A request that FAILED or is SUSPENDED stays, is never filled again, and holds its quota until it is
deleted. A preempted node stays too, without hosts, and holds no chips. A stopped node keeps the
physical machines that its hosts are on.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from drumline.cloud.model.capacity import check_quota, fits
from drumline.cloud.model.errors import (
    FAILED_PRECONDITION,
    ApiError,
    RpcStatus,
    already_exists,
    node_in_the_way,
    not_allowed_now,
    not_found,
    not_supported,
    preempted_while_created,
    stockout,
)
from drumline.cloud.model.machines import Machines
from drumline.cloud.model.operations import Operations
from drumline.cloud.model.resources import (
    COMING_UP,
    ENDED,
    LOST,
    By,
    CloudTiming,
    EndHosts,
    HostAddress,
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
        """An empty cloud."""
        self.limits = limits or Limits()
        self.timing = timing or CloudTiming()
        self.requests: dict[str, Request] = {}
        self.nodes: dict[str, Node] = {}
        self.orders: list[Order] = []
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311, it decides what is preempted
        self.operations = Operations(clock, self._chance)
        self.machines = Machines()

    # Calls of users.

    def create_request(self, spec: RequestSpec) -> Operation:
        """Queue a request for one or more nodes."""
        for name in (spec.name, *(node.name for node in spec.nodes)):
            if name in self.requests or name in self.nodes or self._is_promised(name):
                raise already_exists(name)
        check_quota(spec.nodes, self._holding_quota(), self.limits)
        self.machines.provide(spec.nodes)
        now = self._clock()
        request = Request(spec, created=now, due=now)
        self.requests[spec.name] = request
        return self.operations.begin("create", request)

    def create_node(self, spec: NodeSpec) -> Operation:
        """Create a node at once, or fail at once: there is no queue."""
        if spec.name in self.nodes or self._is_promised(spec.name):
            raise already_exists(spec.name)
        check_quota((spec,), self._holding_quota(), self.limits)
        self.machines.provide((spec,))
        if not fits((spec,), self.nodes.values(), self.limits):
            absent = Node(
                spec, uid=0, created=self._clock(), ready_at=0.0, has_hosts=False, has_disks=False
            )
            return self.operations.begin("create", absent, _stockout(spec))
        return self.operations.begin("create", self._make_node(spec, None))

    def delete_request(self, name: str, *, force: bool) -> Operation:
        """Delete a request and, with force, the nodes under it."""
        request = self.request(name)
        if request.state is RequestState.DELETING:
            return self.operations.begin("delete", request)
        nodes = self.nodes_under(request)
        if nodes and not force:
            raise node_in_the_way(name, [node.spec.name for node in nodes])
        self._enter(request, RequestState.DELETING, By.USER, self.timing.delete)
        for node in nodes:
            self._delete(node)
        return self.operations.begin("delete", request)

    def delete_node(self, name: str) -> Operation:
        """Delete a node; its request, if any, becomes SUSPENDED."""
        node = self.node(name)
        self._delete(node)
        return self.operations.begin("delete", node)

    def stop_node(self, name: str) -> Operation:
        """Stop a node, which keeps its name and its disks, and frees its chips."""
        node = self.node(name)
        _check_stoppable(node, "stop")
        if node.state is not NodeState.READY:
            raise not_allowed_now(name, "stop", node.state, NodeState.READY)
        node.state = NodeState.STOPPING
        node.preempt_at = None
        self.orders.append(EndHosts(node, keep_disks=True))
        return self.operations.begin("stop", node)

    def start_node(self, name: str) -> Operation:
        """Start a node that was stopped, if there are chips for it."""
        node = self.node(name)
        _check_stoppable(node, "start")
        if node.state is not NodeState.STOPPED:
            raise not_allowed_now(name, "start", node.state, NodeState.STOPPED)
        if not fits((node.spec,), self.nodes.values(), self.limits):
            return self.operations.begin("start", node, _stockout(node.spec))
        node.state = NodeState.STARTING
        node.has_hosts = True
        node.ready_at = self._clock() + self.timing.provision
        self.orders.append(StartHosts(node))
        return self.operations.begin("start", node)

    def reset_request(self, name: str) -> Operation:
        """Reset the hosts of a request: they reboot, with their disks and without programs."""
        request = self.request(name)
        if request.state is not RequestState.ACTIVE:
            raise not_allowed_now(name, "reset", request.state, RequestState.ACTIVE)
        nodes = tuple(self.nodes_under(request))
        for node in nodes:
            node.state = NodeState.RESTARTING
            node.answers = False
            self.orders.append(RestartHosts(node))
        operation = self.operations.begin("reset", request)
        operation.nodes = nodes
        return operation

    def relabel(self, name: str, labels: Mapping[str, str]) -> Operation:
        """Replace a node's labels, which is allowed only while it is READY."""
        node = self.node(name)
        if node.state is not NodeState.READY:
            raise ApiError(
                RpcStatus(
                    FAILED_PRECONDITION, f"update is not supported while in state {node.state}"
                )
            )
        shown = node.spec.shown | {"labels": dict(labels)}
        node.spec = replace(node.spec, labels=dict(labels), shown=shown)
        return self.operations.begin("update", node)

    def request(self, name: str) -> Request:
        """The request of that full name."""
        if name not in self.requests:
            raise not_found(name)
        return self.requests[name]

    def node(self, name: str) -> Node:
        """The node of that full name."""
        if name not in self.nodes:
            raise not_found(name)
        return self.nodes[name]

    def nodes_under(self, request: Request) -> list[Node]:
        """The nodes of a request, in the order in which it named them."""
        return [
            self.nodes[spec.name]
            for spec in request.spec.nodes
            if spec.name in self.nodes and self.nodes[spec.name].request == request.spec.name
        ]

    # What the cloud does on its own.

    def preempt(self, subject: Request | Node, after: float = 0.0) -> None:
        """Preempt a node, or a request in any state."""
        nodes = [subject] if isinstance(subject, Node) else self.nodes_under(subject)
        for node in nodes:
            if node.state is NodeState.READY or node.state in COMING_UP:
                node.preempt_at = self._clock() + after
        waits = {RequestState.CREATING, RequestState.WAITING}
        if isinstance(subject, Request) and subject.state in waits:
            self._enter(subject, RequestState.SUSPENDING, By.SERVICE)

    def hosts_up(self, node: Node, hosts: tuple[HostAddress, ...]) -> None:
        """Note that all hosts of a node have booted and accept logins."""
        node.hosts = hosts
        node.answers = True

    def hosts_gone(self, node: Node, *, disks_kept: bool = False) -> None:
        """Note that nothing is left of the node's hosts, or only their disks."""
        node.has_hosts = False
        node.has_disks = node.has_disks and disks_kept
        if not disks_kept:
            self.machines.give_back(node.machines)
            node.machines = ()
        node.hosts = ()
        node.answers = False

    def advance(self) -> None:
        """Apply everything that is due at this moment."""
        now = self._clock()
        moved = True
        while moved:
            moved = False
            for node in list(self.nodes.values()):
                moved |= self._advance_node(node, now)
            for request in list(self.requests.values()):
                moved |= self._advance_request(request, now)
        self.operations.close_done()

    def next_due(self) -> float | None:
        """When `advance` will next have something to do, if that depends on time alone."""
        return min(self._dues(), default=None)

    def _dues(self) -> Iterator[float]:
        now = self._clock()
        for request in self.requests.values():
            if request.due > now:
                yield request.due
        for node in self.nodes.values():
            if node.state in COMING_UP and node.ready_at > now:
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
            self._take(node)
            return True
        if node.state is NodeState.STOPPING and not node.has_hosts:
            node.state = NodeState.STOPPED
            return True
        if node.state in COMING_UP and node.answers and now >= node.ready_at:
            node.state = NodeState.READY
            mean = self.timing.preempt_every
            if mean is not None and node.spec.tier is Tier.SPOT and node.preempt_at is None:
                node.preempt_at = now + self._chance.expovariate(1 / mean)
            return True
        return False

    def _advance_request(self, request: Request, now: float) -> bool:
        if now < request.due:
            return False
        nodes = self.nodes_under(request)
        match request.state:
            case RequestState.CREATING:
                self._enter(request, RequestState.WAITING, By.SERVICE, self.timing.waiting)
            case RequestState.WAITING:
                return self._try_to_fill(request)
            case RequestState.PROVISIONING if any(node.state in LOST for node in nodes):
                self._fail(request, preempted_while_created())
            case RequestState.PROVISIONING if _all_ready(request, nodes):
                self._enter(request, RequestState.ACTIVE, By.SERVICE)
            case RequestState.ACTIVE | RequestState.PROVISIONING if any(
                node.state in LOST for node in nodes
            ):
                self._suspend(request, nodes, By.SERVICE)
            case RequestState.ACTIVE | RequestState.PROVISIONING if len(nodes) < len(
                request.spec.nodes
            ):
                self._suspend(request, nodes, By.USER)
            case RequestState.SUSPENDING if not any(node.has_hosts for node in nodes):
                self._enter(request, RequestState.SUSPENDED, request.by)
            case RequestState.DELETING if not nodes:
                request.gone = True
                del self.requests[request.spec.name]
            case _:
                return False
        return True

    def _try_to_fill(self, request: Request) -> bool:
        if fits(request.spec.nodes, self.nodes.values(), self.limits):
            self._enter(request, RequestState.PROVISIONING, By.SERVICE)
            for spec in request.spec.nodes:
                self._make_node(spec, request.spec.name)
            return True
        if self.limits.fail_when_short:
            self._fail(request, _stockout(request.spec))
            return True
        return False

    def _enter(self, request: Request, state: RequestState, by: By, stay: float = 0.0) -> None:
        request.state, request.by, request.due = state, by, self._clock() + stay

    def _fail(self, request: Request, error: RpcStatus) -> None:
        self._enter(request, RequestState.FAILED, By.SERVICE)
        request.error = error
        for node in self.nodes_under(request):
            if node.state not in LOST:
                self._take(node)

    def _suspend(self, request: Request, nodes: list[Node], by: By) -> None:
        # The nodes of a request run one program: the others are preempted with the first.
        self._enter(request, RequestState.SUSPENDING, by)
        for node in nodes:
            if node.state not in LOST and node.state is not NodeState.DELETING:
                self._take(node)

    def _make_node(self, spec: NodeSpec, request: str | None) -> Node:
        now = self._clock()
        node = Node(
            spec,
            uid=self._chance.getrandbits(62),
            created=now,
            ready_at=now + self.timing.provision,
            request=request,
            machines=self.machines.take(spec),
        )
        self.nodes[spec.name] = node
        self.orders.append(StartHosts(node))
        return node

    def _take(self, node: Node) -> None:
        # Nodes that are not spot are not preempted; they are terminated by a failure.
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

    # Capacity and quota.

    def _is_promised(self, name: str) -> bool:
        return any(
            name == spec.name
            for request in self.requests.values()
            if request.state not in ENDED
            for spec in request.spec.nodes
        )

    def _holding_quota(self) -> Iterator[NodeSpec]:
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
    """Refuse unless the node has one host and was created without a queue."""
    if node.request is not None:
        raise not_supported(node.spec.name, verb, "it was created through a queued resource")
    if node.spec.slice.hosts > 1:
        raise not_supported(node.spec.name, verb, "it has more than one host")
