"""The cloud from the job manager's view, with the failures of Google Cloud.

Requests and nodes follow the emulator's model, `drumline.cloud.model`. This module simulates the
calls to it: calls that fail before or after they took effect, listings that lag or omit entries, a
login that expires.
"""

import asyncio
import math
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
    NodeState,
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
EQUAL_BOOT = 90.0
LATE_DELETION = (60.0, 900.0)
"""The seconds after which a deletion begins, if deletions begin late."""
CREATION_ERRORS = (*REFUSALS, UNAVAILABLE, INTERNAL)
"""Errors of the operation of an accepted creation. None of them ends a job."""


@dataclass
class Conditions:
    """The current failure rates of the cloud; faults raise these for a while."""

    failure_rate: float = 0.01
    """The share of calls that fail, half of them after they had their effect."""
    lag: float = 0.0
    """The age of listings in seconds."""
    missing_entries: float = 0.0
    """The share of entries that a listing leaves out."""
    logged_in: bool = True
    refusal_rate: float = 0.0
    """The share of requests that are refused with an error of Google Cloud."""
    lost_deletes: float = 0.0
    """The share of deletes that are not queued."""
    latency: float = 0.3
    """Seconds that a call usually takes."""
    lookup_failures: float = 0.0
    """The share of lookups by name that fail."""
    failed_creations: float = 0.0
    """The share of requests that are accepted, and whose creation fails later."""
    visibility_delay: float = 0.0
    """The longest time in seconds for which a new request is missing in listings and lookups."""
    failed_boots: float = 0.0
    """The share of slices that are granted and never become READY."""
    equal_boots: bool = False
    """True if all slices boot in the same time, so that several are READY in the same second."""
    late_deletions: bool = False
    """True if the deletion of a request begins minutes after it was accepted. The request may be
    granted meanwhile."""
    endless_deletions: bool = False
    """True if a slice that is deleted now stays DELETING for ever. Its hosts do not respond, and
    its program runs on."""


@dataclass
class EndlessDeletion:
    """A slice that stays DELETING for ever."""

    began_at: float
    contacted: bool
    """True if a server has ever connected to one of its hosts."""


@dataclass
class BilledSlice:
    """The time for which a slice is billed, from READY on."""

    node: Node
    began_at: float
    ended: float | None = None

    def seconds(self, now: float) -> float:
        """Return the seconds until the slice was deleted, or until now."""
        return max(0.0, (now if self.ended is None else self.ended) - self.began_at)


class SimulatedCloud:
    """An implementation of `cloud.protocol.Cloud`."""

    def __init__(self, environment: Environment, zones: Sequence[str], chips: int) -> None:
        """`chips` is the capacity of each zone, for each generation."""
        self._environment = environment
        self._stream = environment.streams["cloud"]
        limits = Limits(capacity={zone: {"v4": chips, "v5e": chips} for zone in zones})
        timing = CloudTiming(waiting=20.0, provision=90.0, delete=DELETE_SECONDS)
        self.fleet = Fleet(environment.now, limits, timing, seed=self._stream.getrandbits(32))
        self.conditions = Conditions()
        self.zones = tuple(zones)
        self.calls: dict[str, list[float]] = {"ask": [], "release": [], "list": []}
        self._numbers = iter(range(1, 1 << 30))
        self._hosts_of: dict[int, list[Host]] = {}
        self._history: list[tuple[float, tuple[ListedPlacement, ...]]] = []
        self._notified = asyncio.Event()
        self.billed_slices: list[BilledSlice] = []
        """Every slice that became ready."""
        self.endless_deletions: dict[str, EndlessDeletion] = {}
        """The slices that stay DELETING for ever, by name."""
        self.deletes: dict[str, list[float]] = {}
        """The times of the first and the last call to delete each slice, also if they failed."""
        self.undeletable: set[str] = set()
        """Slices that will stay DELETING for ever once they are deleted."""
        self._late_deletions: set[str] = set()
        """The placements whose deletion has been accepted and begins late."""
        self._operations: dict[str, OperationState] = {}
        self._hidden_until: dict[str, float] = {}
        self.request_checks: list[Callable[[str], None]] = []
        """Callbacks that are called before every request."""

    # The cloud itself ----------------------------------------------------------------------------

    async def live(self) -> None:
        """Advance the fleet as time passes, without end."""
        while True:
            self.fleet.advance()
            self._carry_out()
            self._remember()
            due = self.fleet.next_change_at()
            self._notified.clear()
            wait = 3600.0 if due is None else max(0.01, due - self._environment.now())
            try:
                async with asyncio.timeout(wait):
                    await self._notified.wait()
            except TimeoutError:
                pass

    def lag(self, seconds: float) -> None:
        """Make listings this many seconds old."""
        self.conditions.lag = seconds
        self._remember()

    def notify(self) -> None:
        """Wake up the loop that advances the fleet."""
        self._notified.set()

    def _carry_out(self) -> None:
        while self.fleet.orders:
            for order in self._take_orders():
                match order:
                    case StartHosts(node):
                        self._environment.spawn(self._boot(node))
                    case EndHosts(node) if _short(node.spec.name) in self.endless_deletions:
                        pass
                    case EndHosts(node, keep_disks):
                        for host in self._hosts_of.pop(node.uid, []):
                            host.end()
                        for billed in self.billed_slices:
                            if billed.node is node and billed.ended is None:
                                billed.ended = self._environment.now()
                        self.fleet.hosts_ended(node, disks_kept=keep_disks)
                    case RestartHosts(node):
                        for host in self._hosts_of.get(node.uid, []):
                            host.reboot(self._stream.delay(60.0))
            self.fleet.advance()

    def _take_orders(self) -> list[StartHosts | RestartHosts | EndHosts]:
        orders, self.fleet.orders = self.fleet.orders, []
        return orders

    async def _boot(self, node: Node) -> None:
        hosts = []
        for index in range(node.spec.slice.hosts):
            number = next(self._numbers)
            address = Address(f"34.0.{number >> 8}.{number & 255}", 22, f"10.0.0.{number}")
            skew = self._stream.choice((0.0, 0.0, 0.1, -0.2, 240.0, -300.0))
            name = f"{_short(node.spec.name)}/{index}"
            hosts.append(Host(self._environment, name, address, skew, node.machines))
        self._hosts_of[node.uid] = hosts
        self._environment.note("booting", _short(node.spec.name), len(hosts))
        for host in hosts:
            self._environment.hosts[host.address.ssh_ip] = host
        if self.conditions.failed_boots and self._stream.bernoulli(self.conditions.failed_boots):
            self._environment.note("never boots", _short(node.spec.name))
            return
        seconds = self._stream.delay(40.0, 400.0, 0.05)
        await asyncio.sleep(EQUAL_BOOT if self.conditions.equal_boots else seconds)
        if self._hosts_of.get(node.uid) is not hosts:
            return
        for host in hosts:
            # The cloud lists a slice as READY before its last host accepts logins.
            self._environment.spawn(self._boot_host(host, self._stream.delay(5.0, 240.0, 0.1)))
        addresses = tuple(HostAddress(h.address.ssh_ip, 22, h.address.internal_ip) for h in hosts)
        self.fleet.hosts_booted(node, addresses)
        ready_at = max(node.ready_at, self._environment.now())
        self.billed_slices.append(BilledSlice(node, ready_at))
        self.notify()

    async def _boot_host(self, host: Host, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._environment.hosts.get(host.address.ssh_ip) is host:
            host.up = True

    # Faults --------------------------------------------------------------------------------------

    def ready_nodes(self, zone: str | None = None) -> list[Node]:
        """Return the nodes that have hosts."""
        return [
            node
            for node in self.fleet.nodes.values()
            if node.uid in self._hosts_of and zone in {None, node.spec.zone}
        ]

    def hosts_of(self, node: Node) -> list[Host]:
        """Return the hosts of a node."""
        return self._hosts_of.get(node.uid, [])

    def preempt(self, node: Node, notice: float) -> None:
        """Preempt a node, after a notice to its hosts."""
        self._environment.interrupted_slices.add(_short(node.spec.name))
        self._environment.note("preempt", _short(node.spec.name), notice)
        if notice:
            for host in self.hosts_of(node):
                host.announce_shutdown("preempted")
        self.fleet.preempt(node, notice)
        self.notify()

    def hang_deletions(self, hang: bool) -> None:
        """Let new deletions hang until the faults stop, or end this."""
        delete = NEVER if hang else DELETE_SECONDS
        self.fleet.timing = replace(self.fleet.timing, delete=delete)

    def end_deletions(self) -> None:
        """End all deletions that hang."""
        self.hang_deletions(False)
        soon = self._environment.now() + DELETE_SECONDS
        for node in self.fleet.nodes.values():
            if _short(node.spec.name) not in self.endless_deletions:
                node.gone_at = min(node.gone_at, soon)
        for request in self.fleet.requests.values():
            if _short(request.spec.name) not in self.endless_deletions:
                request.due_at = min(request.due_at, soon)
        self.notify()

    async def maintain(self, node: Node, seconds: float) -> None:
        """Run maintenance on the machines of a node. Its hosts do not respond meanwhile."""
        name = _short(node.spec.name)
        self._environment.note("maintenance", name, seconds)
        # The job may give the slice up: that is no mistake of its own.
        self._environment.interrupted_slices.add(name)
        hosts = self.hosts_of(node)
        node.health = "UNHEALTHY_MAINTENANCE"
        for host in hosts:
            host.hung_until = max(host.hung_until, self._environment.now() + seconds)
        await asyncio.sleep(seconds)
        # A longer maintenance may still be in progress.
        if all(host.hung_until <= self._environment.now() for host in hosts):
            node.health = ""

    def fail_request(self, request: Request, error: RpcStatus | None) -> None:
        """Let a waiting request fail."""
        if request.state in {RequestState.CREATING, RequestState.WAITING}:
            self._environment.note("request fails", _short(request.spec.name))
            self._environment.interrupted_slices.add(_short(request.spec.name))
            request.state, request.initiator = RequestState.FAILED, Initiator.SERVICE
            request.error = error
            self.notify()

    # The calls of the job manager ----------------------------------------------------------------

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """List a zone, with the current lag and missing entries."""
        await self._call("list")
        listed = [p for p in self._as_listed() if p.zone == zone]
        if self.conditions.missing_entries:
            listed = [
                p for p in listed if not self._stream.bernoulli(self.conditions.missing_entries)
            ]
        await self._answer()
        return listed

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """Return the current placement. A lookup by name has no lag."""
        await self._call("list")
        if self._stream.bernoulli(self.conditions.lookup_failures):
            raise UNAVAILABLE
        placement = next((p for p in self._listed() if p.zone == zone and p.name == name), None)
        await self._answer()
        return placement

    async def operation(self, name: str) -> OperationState | None:
        """Return the state of the operation that creates a request."""
        await self._call("list")
        state = self._operations.get(name)
        await self._answer()
        return state

    async def ask(self, request: PlacementRequest) -> str:
        """Queue a request."""
        for check in self.request_checks:
            check(request.name)
        await self._call("ask")
        if self._stream.bernoulli(self.conditions.refusal_rate):
            raise self._stream.choice(REFUSALS)
        parent = f"projects/{PROJECT}/locations/{request.zone}"
        operation = f"{parent}/operations/{request.name}-{len(self._operations)}"
        if self._stream.bernoulli(self.conditions.failed_creations):
            return await self._create_nothing(request, operation)
        names = [request.name]
        if request.slices > 1:
            names = [f"{request.name}-{n}" for n in range(request.slices)]
        tier = Tier(request.tier)
        nodes = tuple(
            NodeSpec(
                f"{parent}/nodes/{name}", slice_of(request.accelerator), tier,
                request.labels, {}, {},
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
            if self.conditions.visibility_delay:
                shown_at = (
                    self._environment.now()
                    + self.conditions.visibility_delay * self._stream.random()
                )
                self._hidden_until.setdefault(request.name, shown_at)
        self.notify()
        await self._answer()
        return operation

    async def _create_nothing(self, request: PlacementRequest, operation: str) -> str:
        """Accept a request that is never created: its operation fails, or is lost."""
        self._environment.note("creates nothing", request.name, request.zone)
        if self._stream.bernoulli(0.3):
            # The server has no way to learn the reason.
            self._environment.interrupted_slices.add(request.name)
        else:
            self._operations[operation] = OperationState(False)
            self._environment.spawn(self._fail_creation(operation))
        await self._answer()
        return operation

    async def _fail_creation(self, operation: str) -> None:
        await asyncio.sleep(self._stream.delay(10.0, 600.0))
        self._operations[operation] = OperationState(True, self._stream.choice(CREATION_ERRORS))

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a request and its nodes."""
        self.deletes[name] = [*self.deletes.get(name, [])[:1], self._environment.now()]
        await self._call("release")
        if self._stream.bernoulli(self.conditions.lost_deletes):
            raise CONFLICT
        self._environment.note("released", name)
        node = self.fleet.nodes.get(f"projects/{PROJECT}/locations/{zone}/nodes/{name}")
        if self.conditions.late_deletions and (node is None or node.state is not NodeState.READY):
            if name not in self._late_deletions:
                self._late_deletions.add(name)
                self._environment.spawn(self._delete_late(zone, name, slices))
        else:
            self._delete(zone, name, slices)
        await self._answer()

    async def _delete_late(self, zone: str, name: str, slices: Sequence[str]) -> None:
        await asyncio.sleep(self._stream.uniform(*LATE_DELETION))
        self._environment.note("deletion begins", name)
        self._delete(zone, name, slices)

    def _delete(self, zone: str, name: str, slices: Sequence[str]) -> None:
        parent = f"projects/{PROJECT}/locations/{zone}"
        self._begin_endless_deletion(f"{parent}/nodes/{name}")
        try:
            self.fleet.delete_request(f"{parent}/queuedResources/{name}", force=True)
        except ApiError:
            for node in slices:
                if f"{parent}/nodes/{node}" in self.fleet.nodes:
                    self.fleet.delete_node(f"{parent}/nodes/{node}")
        self.notify()

    def _begin_endless_deletion(self, node_name: str) -> None:
        """Let the deletion of a node with hosts never end, if this is a current fault."""
        name, now = _short(node_name), self._environment.now()
        node = self.fleet.nodes.get(node_name)
        is_endless = self.conditions.endless_deletions or name in self.undeletable
        if not is_endless or node is None or node.state is not NodeState.READY:
            return
        hosts = self.hosts_of(node)
        contacted = any(host.contacted for host in hosts)
        self._environment.note("never deleted", name)
        self.endless_deletions[name] = EndlessDeletion(now, contacted)
        for host in hosts:
            host.hang(math.inf)

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """Return None for every host: no host keys are published."""
        await self._call("list")
        return [None] * len(placement.endpoints)

    async def check_login(self) -> None:
        """Accept the login."""

    async def instance_names(self, placement: ListedPlacement) -> list[str | None]:
        """Return None for every host: no instance names are published."""
        return [None] * len(placement.endpoints)

    async def bucket_location(self, bucket: str) -> str | None:
        """Return None: the bucket has no fixed location."""
        del bucket
        return None

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """Classify an error by the table for Google Cloud."""
        return refusal(error.code, str(error), zone)

    async def close(self) -> None:
        """Do nothing: there is no connection to close."""

    # Shared parts --------------------------------------------------------------------------------

    async def _call(self, kind: str) -> None:
        self.calls[kind].append(self._environment.now())
        await asyncio.sleep(self._stream.delay(self.conditions.latency, 30.0, 0.005))
        if not self.conditions.logged_in:
            raise LOGIN
        if self._stream.bernoulli(self.conditions.failure_rate / 2):
            raise self._stream.choice(PASSING)

    async def _answer(self) -> None:
        """Finish a call that has taken effect. Its response may be lost."""
        await asyncio.sleep(self._stream.delay(0.05))
        if self._stream.bernoulli(self.conditions.failure_rate / 2):
            raise NO_ANSWER

    def _as_listed(self) -> Iterable[ListedPlacement]:
        """Return the placements that listings show now: the current ones, or those of `lag` seconds
        ago.
        """
        if not self.conditions.lag:
            return self._listed()
        listed_at = self._environment.now() - self.conditions.lag
        # A listing does not change for a while after it began to lag.
        older_listings = [seen for at, seen in self._history if at <= listed_at]
        return older_listings[-1] if older_listings else self._history[0][1]

    def _remember(self) -> None:
        if not self.conditions.lag:
            self._history.clear()
            return
        listed = tuple(self._listed())
        if not self._history or self._history[-1][1] != listed:
            self._history.append((self._environment.now(), listed))

    def _listed(self) -> Iterator[ListedPlacement]:
        """Yield all placements in the format of the API."""
        requests = [_request(request) for request in self.fleet.requests.values()]
        nodes = [_node(node) for node in self.fleet.nodes.values()]
        now = self._environment.now()
        for placement in placements.combine_listings(requests, nodes):
            if now >= self._hidden_until.get(placement.name, 0.0):
                yield placement

    def resources(self) -> set[str]:
        """Return the names of all resources that exist or may be billed."""
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
