"""What becomes of requests and nodes. Pure: no input or output, the clock and chance come in.

`Fleet` holds everything there is. Calls change it, `advance` lets time do its work, and both leave
orders (`StartHosts`, `EndHosts`) for whoever runs the hosts, who reports back with `hosts_up` and
`hosts_gone`.

    request   CREATING → WAITING_FOR_RESOURCES → PROVISIONING → ACTIVE → SUSPENDING → SUSPENDED
                                  └──────────────────┴→ FAILED            any → DELETING → gone
    node                                         CREATING → READY → PREEMPTED, TERMINATED
                                                                          any → DELETING → gone

A request that FAILED or is SUSPENDED stays, is never filled again, and holds its quota until it is
deleted. A preempted node stays too, without hosts, and holds no chips.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from drumline.chips import region_of
from drumline.cloud.emulator.errors import (
    ABORTED,
    FAILED_PRECONDITION,
    Refused,
    Status,
    already_exists,
    node_in_the_way,
    not_found,
    preempted_while_created,
    region_quota,
    stockout,
    zone_quota,
)
from drumline.cloud.emulator.model import (
    ENDED,
    LOST,
    By,
    EndHosts,
    HostAddress,
    Limits,
    Node,
    NodeSpec,
    NodeState,
    Operation,
    Request,
    RequestSpec,
    RequestState,
    StartHosts,
    Tier,
    Timing,
)

# Callers look at an operation for a while after it ended; nobody comes back to the ten-thousandth.
_OPERATIONS_KEPT = 10_000


class Fleet:
    """All requests, nodes and operations of the emulated cloud."""

    def __init__(
        self,
        clock: Callable[[], float],
        limits: Limits | None = None,
        timing: Timing | None = None,
        seed: int = 0,
    ) -> None:
        """Begin with nothing."""
        self.limits = limits or Limits()
        self.timing = timing or Timing()
        self.requests: dict[str, Request] = {}
        self.nodes: dict[str, Node] = {}
        self.operations: dict[str, Operation] = {}
        self._open: list[Operation] = []
        self.orders: list[StartHosts | EndHosts] = []
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311, it decides who is preempted

    # What callers ask for.

    def create_request(self, spec: RequestSpec) -> Operation:
        """Queue a request for one or more nodes."""
        for name in (spec.name, *(node.name for node in spec.nodes)):
            if name in self.requests or name in self.nodes or self._is_promised(name):
                raise already_exists(name)
        self._check_quota(spec.nodes)
        now = self._clock()
        request = Request(spec, created=now, due=now)
        self.requests[spec.name] = request
        return self._begin("create", request)

    def create_node(self, spec: NodeSpec) -> Operation:
        """Create a node at once, or fail at once: nobody queues here."""
        if spec.name in self.nodes or self._is_promised(spec.name):
            raise already_exists(spec.name)
        self._check_quota((spec,))
        if not self._fits((spec,)):
            absent = Node(spec, uid=0, created=self._clock(), ready_at=0.0, has_hosts=False)
            absent.error = stockout(spec.zone, reserved=spec.tier is Tier.RESERVED)
            return self._begin("create", absent)
        return self._begin("create", self._make_node(spec, None))

    def delete_request(self, name: str, *, force: bool) -> Operation:
        """Delete a request and, with force, the nodes under it."""
        request = self.request(name)
        if request.state is RequestState.DELETING:
            return self._begin("delete", request)
        nodes = self.nodes_under(request)
        if nodes and not force:
            raise node_in_the_way(name, [node.spec.name for node in nodes])
        self._enter(request, RequestState.DELETING, By.USER, self.timing.delete)
        for node in nodes:
            self._delete(node)
        return self._begin("delete", request)

    def delete_node(self, name: str) -> Operation:
        """Delete a node; the request above it, if any, is SUSPENDED for it."""
        node = self.node(name)
        self._delete(node)
        return self._begin("delete", node)

    def relabel(self, name: str, labels: Mapping[str, str]) -> Operation:
        """Replace a node's labels, which a node that is not ready does not allow."""
        node = self.node(name)
        if node.state is not NodeState.READY:
            message = f"update is not supported while in state {node.state}"
            raise Refused(Status(FAILED_PRECONDITION, message))
        shown = node.spec.shown | {"labels": dict(labels)}
        node.spec = replace(node.spec, labels=dict(labels), shown=shown)
        return self._begin("update", node)

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
        """The nodes a request has, in the order it named them."""
        return [
            self.nodes[spec.name]
            for spec in request.spec.nodes
            if spec.name in self.nodes and self.nodes[spec.name].request == request.spec.name
        ]

    # What the cloud does on its own.

    def preempt(self, subject: Request | Node, after: float = 0.0) -> None:
        """Take the chips away: from a node, or from a request at whatever point it is."""
        nodes = [subject] if isinstance(subject, Node) else self.nodes_under(subject)
        for node in nodes:
            if node.state in {NodeState.CREATING, NodeState.READY}:
                node.taken_at = self._clock() + after
        waits = {RequestState.CREATING, RequestState.WAITING}
        if isinstance(subject, Request) and subject.state in waits:
            self._enter(subject, RequestState.SUSPENDING, By.SERVICE)

    def hosts_up(self, node: Node, hosts: tuple[HostAddress, ...]) -> None:
        """All hosts of a node have started."""
        node.hosts = hosts

    def hosts_gone(self, node: Node) -> None:
        """Nothing of the node's hosts is left."""
        node.has_hosts = False
        node.hosts = ()

    def advance(self) -> None:
        """Let happen what is due; nothing is left that could happen at this very moment."""
        now = self._clock()
        moved = True
        while moved:
            moved = False
            for node in list(self.nodes.values()):
                moved |= self._advance_node(node, now)
            for request in list(self.requests.values()):
                moved |= self._advance_request(request, now)
        for operation in [one for one in self._open if _is_done(one)]:
            operation.ended, operation.error = now, _trouble(operation)
            self._open.remove(operation)

    def next_due(self) -> float | None:
        """When `advance` will have something to do, if only time is missing."""
        return min(self._dues(), default=None)

    def _dues(self) -> Iterator[float]:
        now = self._clock()
        for request in self.requests.values():
            if request.due > now:
                yield request.due
        for node in self.nodes.values():
            if node.state is NodeState.CREATING and node.ready_at > now:
                yield node.ready_at
            if node.taken_at is not None:
                yield node.taken_at
            if node.state is NodeState.DELETING and node.gone_at > now:
                yield node.gone_at

    def _advance_node(self, node: Node, now: float) -> bool:
        if node.state is NodeState.DELETING:
            if node.has_hosts or now < node.gone_at:
                return False
            node.gone = True
            del self.nodes[node.spec.name]
            return True
        if node.taken_at is not None and now >= node.taken_at:
            self._take(node)
            return True
        if node.state is NodeState.CREATING and node.hosts and now >= node.ready_at:
            node.state = NodeState.READY
            mean = self.timing.preempt_every
            if mean is not None and node.spec.tier is Tier.SPOT and node.taken_at is None:
                node.taken_at = now + self._chance.expovariate(1 / mean)
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
        if self._fits(request.spec.nodes):
            self._enter(request, RequestState.PROVISIONING, By.SERVICE)
            for spec in request.spec.nodes:
                self._make_node(spec, request.spec.name)
            return True
        if self.limits.fail_when_short:
            reserved = request.spec.tier is Tier.RESERVED
            self._fail(request, stockout(request.spec.zone, reserved=reserved))
            return True
        return False

    def _enter(self, request: Request, state: RequestState, by: By, stay: float = 0.0) -> None:
        request.state, request.by, request.due = state, by, self._clock() + stay

    def _fail(self, request: Request, error: Status) -> None:
        self._enter(request, RequestState.FAILED, By.SERVICE)
        request.error = error
        for node in self.nodes_under(request):
            if node.state not in LOST:
                self._take(node)

    def _suspend(self, request: Request, nodes: list[Node], by: By) -> None:
        # The nodes of one request are one program: what is left of them goes with the first.
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
        )
        self.nodes[spec.name] = node
        self.orders.append(StartHosts(node))
        return node

    def _take(self, node: Node) -> None:
        # What is not spot is not preempted; it breaks down.
        spot = node.spec.tier is Tier.SPOT
        node.state = NodeState.PREEMPTED if spot else NodeState.TERMINATED
        node.taken_at = None
        self._end_hosts(node)

    def _delete(self, node: Node) -> None:
        if node.state is NodeState.DELETING:
            return
        node.state = NodeState.DELETING
        node.taken_at = None
        node.gone_at = self._clock() + self.timing.delete
        self._end_hosts(node)

    def _end_hosts(self, node: Node) -> None:
        if node.has_hosts:
            self.orders.append(EndHosts(node))

    def _begin(self, verb: str, subject: Request | Node) -> Operation:
        parent = subject.spec.name.rsplit("/", 2)[0]
        identity = f"{self._chance.getrandbits(128):032x}"
        operation = Operation(
            f"{parent}/operations/operation-{identity}", verb, subject, self._clock()
        )
        self.operations[operation.name] = operation
        self._open.append(operation)
        if len(self.operations) > _OPERATIONS_KEPT:
            del self.operations[next(iter(self.operations))]
        return operation

    # How much there is.

    def _is_promised(self, name: str) -> bool:
        return any(
            name == spec.name
            for request in self.requests.values()
            if request.state not in ENDED
            for spec in request.spec.nodes
        )

    def _fits(self, specs: tuple[NodeSpec, ...]) -> bool:
        pools = self.limits.capacity.get(specs[0].zone, {})
        for pool, chips in pools.items():
            asked = sum(spec.slice.chips for spec in specs if _draws_on(spec, pool))
            used = sum(
                node.spec.slice.chips
                for node in self.nodes.values()
                if node.has_hosts and node.spec.zone == specs[0].zone and _draws_on(node.spec, pool)
            )
            if asked and used + asked > chips:
                return False
        return True

    def _check_quota(self, specs: tuple[NodeSpec, ...]) -> None:
        first = specs[0]
        asked = sum(spec.slice.chips for spec in specs)
        region = region_of(first.zone)
        for place, says in ((first.zone, zone_quota), (region, region_quota)):
            limit = self.limits.quota.get(place, {}).get(first.tier)
            if limit is None:
                continue
            held = sum(
                spec.slice.chips
                for spec in self._holding_quota()
                if spec.tier is first.tier and place in {spec.zone, region_of(spec.zone)}
            )
            if held + asked > limit:
                raise Refused(says(first.slice.generation, first.tier, place, limit))

    def _holding_quota(self) -> Iterator[NodeSpec]:
        for request in self.requests.values():
            yield from request.spec.nodes
        for node in self.nodes.values():
            if node.request is None:
                yield node.spec


def _draws_on(spec: NodeSpec, pool: str) -> bool:
    return pool in {spec.slice.name, spec.slice.generation}


def _all_ready(request: Request, nodes: list[Node]) -> bool:
    return len(nodes) == len(request.spec.nodes) and all(
        node.state is NodeState.READY for node in nodes
    )


def _is_done(operation: Operation) -> bool:
    subject = operation.subject
    if operation.verb == "delete" or subject.gone:
        return subject.gone
    if isinstance(subject, Request):
        return subject.state is not RequestState.CREATING
    return subject.state is not NodeState.CREATING or subject.error is not None


def _trouble(operation: Operation) -> Status | None:
    subject = operation.subject
    if isinstance(subject, Request) or operation.verb != "create":
        return None
    if subject.error is not None:
        return subject.error
    if subject.state in LOST:
        return preempted_while_created()
    if subject.state is NodeState.DELETING:
        return Status(ABORTED, "The node was deleted while it was being created.")
    return None
