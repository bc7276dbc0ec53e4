"""The cloud as the job manager sees it, with Google's habits: slow, late, forgetful, and wrong.

What becomes of requests and nodes is the emulator's own model, `drumline.cloud.model`. Here is what
lies between it and the caller: calls that fail before or after they had their effect, listings that
lag or lose entries, a login that expires.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from drumline.chips import slice_of
from drumline.cloud.google import placements
from drumline.cloud.google.errors import refusal
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError
from drumline.cloud.model.errors import ApiError, RpcStatus
from drumline.cloud.model.fleet import Fleet
from drumline.cloud.model.resources import (
    CloudTiming,
    EndHosts,
    HostAddress,
    Initiator,
    Limits,
    Node,
    NodeSpec,
    Request,
    RequestSpec,
    RequestState,
    RestartHosts,
    StartHosts,
    Tier,
)
from drumline.cloud.protocol import CloudError, OperationState, PlacementRequest
from drumline.hosts.values import Address
from drumline.observed import Endpoint, ListedPlacement, Refusal
from tests.simulation.environment import Environment
from tests.simulation.hosts import Host

PROJECT = "lab-tpu-1"

UNAVAILABLE = CloudError("The service is currently unavailable.", 14)
TOO_MANY = CloudError("Quota exceeded for quota metric 'CreateNode requests per minute'", 8)
INTERNAL = CloudError("an internal error has occurred", 13)
NO_ANSWER = CloudError("no answer from tpu.googleapis.com: ReadTimeout", None)
LOGIN = CloudError("Request had invalid authentication credentials.", 16)
CONFLICT = CloudError("unable to queue the operation", 10)
PASSING = (UNAVAILABLE, TOO_MANY, INTERNAL, NO_ANSWER, CONFLICT)
REFUSALS = (
    CloudError('There is no more capacity in the zone "x"; you can try in another zone', 8),
    CloudError("Quota 'TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI' exhausted. Limit 32", 8),
    CloudError("Resource has been exhausted (e.g. check quota).", 8),
    CloudError("Insufficient reserved capacity", 9),
)


DELETE_SECONDS = 60.0
NEVER = 1e9
CREATION_ERRORS = (*REFUSALS, UNAVAILABLE, INTERNAL)
"""Errors with which an accepted creation ends. None of them ends a job."""


@dataclass
class Weather:
    """How badly the cloud behaves now; faults raise these for a while."""

    failing: float = 0.01
    """The share of calls that fail, half of them after they had their effect."""
    lag: float = 0.0
    """Seconds by which listings are old."""
    holes: float = 0.0
    """The share of entries that a listing leaves out."""
    logged_in: bool = True
    refuses: float = 0.0
    """The share of requests that are refused with a text of Google's."""
    deaf: float = 0.0
    """The share of deletes that are not queued."""
    slow: float = 0.3
    """Seconds that a call usually takes."""
    unsure: float = 0.0
    """The share of lookups by name that fail."""
    creates_nothing: float = 0.0
    """The share of requests that are accepted, and whose creation fails later."""
    hides: float = 0.0
    """Seconds for which a new request is at most missing in listings and lookups."""
    boots_nothing: float = 0.0
    """The share of slices that are granted and never become READY."""


@dataclass
class Bill:
    """The time for which a slice is paid."""

    node: Node
    began: float
    ended: float | None = None

    def seconds(self, now: float) -> float:
        """Until it was gone, or now."""
        return (now if self.ended is None else self.ended) - self.began


class SimulatedCloud:
    """An implementation of `cloud.protocol.Cloud`."""

    def __init__(self, environment: Environment, zones: Sequence[str], chips: int) -> None:
        """`chips` of each generation in each zone."""
        self._environment = environment
        self._dice = environment.streams["cloud"]
        limits = Limits(capacity={zone: {"v4": chips, "v5e": chips} for zone in zones})
        timing = CloudTiming(waiting=20.0, provision=90.0, delete=DELETE_SECONDS)
        self.fleet = Fleet(environment.now, limits, timing, seed=self._dice.getrandbits(32))
        self.weather = Weather()
        self.zones = tuple(zones)
        self.calls: dict[str, list[float]] = {"ask": [], "release": [], "list": []}
        self._numbers = iter(range(1, 1 << 30))
        self._hosts_of: dict[int, list[Host]] = {}
        self._history: list[tuple[float, tuple[ListedPlacement, ...]]] = []
        self._stirred = asyncio.Event()
        self.bills: list[Bill] = []
        """Every slice that was ready, from then on."""
        self._operations: dict[str, OperationState] = {}
        self._hidden_until: dict[str, float] = {}
        self.asking: list[Callable[[str], None]] = []
        """Told of every request before it is made."""

    # What goes on there --------------------------------------------------------------------------

    async def live(self) -> None:
        """Let time do its work, for ever."""
        while True:
            self.fleet.advance()
            self._carry_out()
            self._remember()
            due = self.fleet.next_change_at()
            self._stirred.clear()
            wait = 3600.0 if due is None else max(0.01, due - self._environment.now())
            try:
                async with asyncio.timeout(wait):
                    await self._stirred.wait()
            except TimeoutError:
                pass

    def lag(self, seconds: float) -> None:
        """From now on listings are so old."""
        self.weather.lag = seconds
        self._remember()

    def stir(self) -> None:
        """Something changed."""
        self._stirred.set()

    def _carry_out(self) -> None:
        while self.fleet.orders:
            for order in self._taken_orders():
                match order:
                    case StartHosts(node):
                        self._environment.spawn(self._boot(node))
                    case EndHosts(node, keep_disks):
                        for host in self._hosts_of.pop(node.uid, []):
                            host.end()
                        for bill in self.bills:
                            if bill.node is node and bill.ended is None:
                                bill.ended = self._environment.now()
                        self.fleet.hosts_ended(node, disks_kept=keep_disks)
                    case RestartHosts(node):
                        for host in self._hosts_of.get(node.uid, []):
                            host.reboot(self._dice.delay(60.0))
            self.fleet.advance()

    def _taken_orders(self) -> list[StartHosts | RestartHosts | EndHosts]:
        orders, self.fleet.orders = self.fleet.orders, []
        return orders

    async def _boot(self, node: Node) -> None:
        hosts = []
        for index in range(node.spec.slice.hosts):
            number = next(self._numbers)
            address = Address(f"34.0.{number >> 8}.{number & 255}", 22, f"10.0.0.{number}")
            skew = self._dice.choice((0.0, 0.0, 0.1, -0.2, 240.0, -300.0))
            name = f"{_short(node.spec.name)}/{index}"
            hosts.append(Host(self._environment, name, address, skew, node.machines))
        self._hosts_of[node.uid] = hosts
        self._environment.note("booting", _short(node.spec.name), len(hosts))
        for host in hosts:
            self._environment.hosts[host.address.ssh_ip] = host
        if self.weather.boots_nothing and self._dice.chance(self.weather.boots_nothing):
            self._environment.note("never boots", _short(node.spec.name))
            return
        await asyncio.sleep(self._dice.delay(40.0, 400.0, 0.05))
        if self._hosts_of.get(node.uid) is not hosts:
            return
        for host in hosts:
            # The cloud calls a slice READY before its last host lets one in.
            self._environment.spawn(self._boot_host(host, self._dice.delay(5.0, 240.0, 0.1)))
        addresses = tuple(HostAddress(h.address.ssh_ip, 22, h.address.internal_ip) for h in hosts)
        self.fleet.hosts_booted(node, addresses)
        self.bills.append(Bill(node, self._environment.now()))
        self.stir()

    async def _boot_host(self, host: Host, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._environment.hosts.get(host.address.ssh_ip) is host:
            host.up = True

    # What is done to it --------------------------------------------------------------------------

    def ready_nodes(self, zone: str | None = None) -> list[Node]:
        """Nodes that hosts stand for."""
        return [
            node
            for node in self.fleet.nodes.values()
            if node.uid in self._hosts_of and zone in {None, node.spec.zone}
        ]

    def hosts_of(self, node: Node) -> list[Host]:
        """The hosts of a node."""
        return self._hosts_of.get(node.uid, [])

    def preempt(self, node: Node, notice: float) -> None:
        """Take a node, after a notice to its hosts."""
        self._environment.taken.add(_short(node.spec.name))
        self._environment.note("preempt", _short(node.spec.name), notice)
        if notice:
            for host in self.hosts_of(node):
                host.announce_shutdown("preempted")
        self.fleet.preempt(node, notice)
        self.stir()

    def hang_deletions(self, hang: bool) -> None:
        """Whether deletions that begin from now on have no end before the faults stop."""
        delete = NEVER if hang else DELETE_SECONDS
        self.fleet.timing = replace(self.fleet.timing, delete=delete)

    def end_deletions(self) -> None:
        """End all deletions that hang."""
        self.hang_deletions(False)
        soon = self._environment.now() + DELETE_SECONDS
        for node in self.fleet.nodes.values():
            node.gone_at = min(node.gone_at, soon)
        for request in self.fleet.requests.values():
            request.due_at = min(request.due_at, soon)
        self.stir()

    async def maintain(self, node: Node, seconds: float) -> None:
        """Maintain the machines of a node, whose hosts answer nothing meanwhile."""
        name = _short(node.spec.name)
        self._environment.note("maintenance", name, seconds)
        # Nobody is to blame if the job gives it up.
        self._environment.taken.add(name)
        hosts = self.hosts_of(node)
        node.health = "UNHEALTHY_MAINTENANCE"
        for host in hosts:
            host.hung_until = max(host.hung_until, self._environment.now() + seconds)
        await asyncio.sleep(seconds)
        node.health = ""

    def fail_request(self, request: Request, error: RpcStatus | None) -> None:
        """The cloud gives up a request that waits."""
        if request.state in {RequestState.CREATING, RequestState.WAITING}:
            self._environment.note("request fails", _short(request.spec.name))
            self._environment.taken.add(_short(request.spec.name))
            request.state, request.initiator = RequestState.FAILED, Initiator.SERVICE
            request.error = error
            self.stir()

    # What the job manager calls ------------------------------------------------------------------

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """A listing, as old as the weather has it and with its holes."""
        await self._call("list")
        listed = [p for p in self._as_listed() if p.zone == zone]
        if self.weather.holes:
            listed = [p for p in listed if not self._dice.chance(self.weather.holes)]
        await self._answer()
        return listed

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """A get knows what is now."""
        await self._call("list")
        if self._dice.chance(self.weather.unsure):
            raise UNAVAILABLE
        placement = next((p for p in self._listed() if p.zone == zone and p.name == name), None)
        await self._answer()
        return placement

    async def operation(self, name: str) -> OperationState | None:
        """The state of the operation that creates a request."""
        await self._call("list")
        state = self._operations.get(name)
        await self._answer()
        return state

    async def ask(self, request: PlacementRequest) -> str:
        """Queue a request."""
        for check in self.asking:
            check(request.name)
        await self._call("ask")
        if self._dice.chance(self.weather.refuses):
            raise self._dice.choice(REFUSALS)
        parent = f"projects/{PROJECT}/locations/{request.zone}"
        operation = f"{parent}/operations/{request.name}-{len(self._operations)}"
        if self._dice.chance(self.weather.creates_nothing):
            return await self._create_nothing(request, operation)
        names = [request.name]
        if request.slices > 1:
            names = [f"{request.name}-{n}" for n in range(request.slices)]
        tier = Tier(request.tier)
        nodes = tuple(
            NodeSpec(
                f"{parent}/nodes/{name}", slice_of(request.accelerator), tier,
                request.labels, request.metadata, {},
            )
            for name in names
        )  # fmt: skip
        spec = RequestSpec(f"{parent}/queuedResources/{request.name}", tier, nodes, {})
        self._environment.note("asked", request.name, request.zone)
        try:
            self.fleet.create_request(spec)
        except ApiError as error:
            if error.status.code != 6:
                raise CloudError(error.status.message, error.status.code) from None
            operation = ""
        else:
            self._operations[operation] = OperationState(True)
            if self.weather.hides:
                shown_at = self._environment.now() + self.weather.hides * self._dice.random()
                self._hidden_until.setdefault(request.name, shown_at)
        self.stir()
        await self._answer()
        return operation

    async def _create_nothing(self, request: PlacementRequest, operation: str) -> str:
        """Accept a request that comes to nothing: its operation fails, or is lost."""
        self._environment.note("creates nothing", request.name, request.zone)
        if self._dice.chance(0.3):
            # Nobody can tell why it is not there.
            self._environment.taken.add(request.name)
        else:
            self._operations[operation] = OperationState(False)
            self._environment.spawn(self._fail_creation(operation))
        await self._answer()
        return operation

    async def _fail_creation(self, operation: str) -> None:
        await asyncio.sleep(self._dice.delay(10.0, 600.0))
        self._operations[operation] = OperationState(True, self._dice.choice(CREATION_ERRORS))

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a request and its nodes."""
        await self._call("release")
        if self._dice.chance(self.weather.deaf):
            raise CONFLICT
        parent = f"projects/{PROJECT}/locations/{zone}"
        self._environment.note("released", name)
        try:
            self.fleet.delete_request(f"{parent}/queuedResources/{name}", force=True)
        except ApiError:
            for node in slices:
                if f"{parent}/nodes/{node}" in self.fleet.nodes:
                    self.fleet.delete_node(f"{parent}/nodes/{node}")
        self.stir()
        await self._answer()

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """None is published."""
        await self._call("list")
        return [None] * len(placement.endpoints)

    async def check_login(self) -> None:
        """Always valid."""

    async def instance_names(self, placement: ListedPlacement) -> list[str | None]:
        """None is published."""
        return [None] * len(placement.endpoints)

    async def bucket_location(self, bucket: str) -> str | None:
        """Everywhere."""
        del bucket
        return None

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """As Google's room does."""
        return refusal(error.code, str(error), zone)

    async def close(self) -> None:
        """Nothing is open."""

    # Between the two -----------------------------------------------------------------------------

    async def _call(self, kind: str) -> None:
        self.calls[kind].append(self._environment.now())
        await asyncio.sleep(self._dice.delay(self.weather.slow, 30.0, 0.005))
        if not self.weather.logged_in:
            raise LOGIN
        if self._dice.chance(self.weather.failing / 2):
            raise self._dice.choice(PASSING)

    async def _answer(self) -> None:
        """What was asked for is done; its answer may be lost."""
        await asyncio.sleep(self._dice.delay(0.05))
        if self._dice.chance(self.weather.failing / 2):
            raise NO_ANSWER

    def _as_listed(self) -> Iterable[ListedPlacement]:
        """What listings show now: what is, or what was so many seconds ago."""
        if not self.weather.lag:
            return self._listed()
        moment = self._environment.now() - self.weather.lag
        # Before it began to lag, a listing stands still for a while.
        known = [seen for at, seen in self._history if at <= moment]
        return known[-1] if known else self._history[0][1]

    def _remember(self) -> None:
        if not self.weather.lag:
            self._history.clear()
            return
        listed = tuple(self._listed())
        if not self._history or self._history[-1][1] != listed:
            self._history.append((self._environment.now(), listed))

    def _listed(self) -> Iterator[ListedPlacement]:
        """All there is, in the words of the API."""
        requests = [_request(request) for request in self.fleet.requests.values()]
        nodes = [_node(node) for node in self.fleet.nodes.values()]
        now = self._environment.now()
        for placement in placements.combine_listings(requests, nodes):
            if now >= self._hidden_until.get(placement.name, 0.0):
                yield placement

    def resources(self) -> set[str]:
        """The names of all that exists, or may cost."""
        requests = {_short(name) for name in self.fleet.requests}
        return requests | {_short(name) for name in self.fleet.nodes}


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _request(request: Request) -> ListedRequest:
    spec = request.spec
    error = request.error
    return ListedRequest(
        _short(spec.name), spec.zone, request.state.value, spec.nodes[0].slice.name,
        spec.nodes[0].labels, RpcError(error.code, error.message) if error else None,
        tuple(_short(node.name) for node in spec.nodes),
    )  # fmt: skip


def _node(node: Node) -> ListedNode:
    spec = node.spec
    ends = tuple(Endpoint(host.host_key, host.ip) for host in node.hosts)
    return ListedNode(
        _short(spec.name), spec.zone, node.state.value, spec.slice.name, spec.labels, ends,
        request=_short(node.request or ""), health=node.health,
    )  # fmt: skip
