"""The running emulated cloud: state, hosts, faults, and the loop that drives them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from drumline.clock import SteadyClock
from drumline.cloud.emulator.config import EmulatorConfig, Faults
from drumline.cloud.emulator.hosts.running import Hosts, HostSettings
from drumline.cloud.emulator.machines import MachineFolders
from drumline.cloud.model.errors import ApiError, Json, passing_troubles
from drumline.cloud.model.fleet import Fleet
from drumline.cloud.model.resources import (
    EndHosts,
    HostAddress,
    Node,
    NodeState,
    Request,
    RestartHosts,
    StartHosts,
)

JOB_LABEL = "drumline-job"


class ControlMistake(ValueError):
    """A control call cannot be fulfilled; the text is the whole sentence."""


@dataclass
class Calls:
    """How often the API was called since the start. Benchmarks read it."""

    by_method: Counter[str] = field(default_factory=Counter)
    by_zone: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, method: str, zone: str) -> None:
        """Count a call."""
        self.by_method[method] += 1
        self.by_zone.setdefault(zone, Counter())[method] += 1


class Service:
    """The state behind the routes, and the loop that changes it."""

    def __init__(
        self,
        config: EmulatorConfig,
        settings: HostSettings,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """An empty cloud. Its clock does not step when the machine's does."""
        clock = clock or SteadyClock()
        self.config = config
        self.faults: Faults = config.faults
        self.calls = Calls()
        self.clock = clock
        self.settings = settings
        self.started = clock()
        self.machines = MachineFolders(settings.home)
        self.hosts = Hosts(settings, self.machines)
        self.fleet = Fleet(clock, config.limits(), config.timing(), config.seed)
        self._chance = random.Random(config.seed)  # noqa: S311, it decides which calls fail
        self._failed = 0
        self._changed = asyncio.Event()

    # The loop.

    def settle(self) -> None:
        """Advance the fleet to this moment and carry out its orders."""
        self.fleet.advance()
        orders, self.fleet.orders = self.fleet.orders, []
        for order in orders:
            match order:
                case StartHosts(node):
                    self.hosts.start(node, self._hosts_up)
                case RestartHosts(node):
                    self.hosts.restart(node, self._hosts_up)
                case EndHosts(node, keep_disks):
                    self.hosts.end(node, self._hosts_gone, keep_disks=keep_disks)
        self._changed.set()

    async def run(self) -> None:
        """Advance the fleet whenever something is due, until cancelled."""
        while True:
            self._changed.clear()
            self.fleet.advance()
            if self.fleet.orders:
                self.settle()
                continue
            due = self.fleet.next_due()
            wait = None if due is None else max(0.0, due - self.clock())
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                self.settle()

    def _hosts_up(self, node: Node, hosts: tuple[HostAddress, ...]) -> None:
        if hosts:
            self.fleet.hosts_up(node, hosts)
        else:
            self.fleet.preempt(node)
        self.settle()

    def _hosts_gone(self, node: Node, disks_kept: bool) -> None:
        self.fleet.hosts_gone(node, disks_kept=disks_kept)
        self.settle()

    # Faults.

    def trouble(self) -> ApiError | None:
        """The error that this call is to fail with, if it is to fail."""
        if self._chance.random() >= self.faults.fail:
            return None
        self._failed += 1
        kinds = passing_troubles()
        return kinds[self._failed % len(kinds)]

    def takes_effect(self) -> bool:
        """Whether a failing change takes effect nevertheless: the caller cannot know."""
        return self._failed % 2 == 0

    def delay(self) -> float:
        """The extra seconds that this call takes."""
        delayed = self._chance.random() < self.faults.delay
        return self.faults.seconds if delayed else 0.0

    # Controls, which a real cloud does not have.

    def find(self, target: str) -> Request | Node:
        """A request or a node by its name, short or full, or by its job.

        If there are several, the running one is found, else the newest.
        """
        found: list[Request | Node] = []
        for request in self.fleet.requests.values():
            names = [request.spec.name, *(node.name for node in request.spec.nodes)]
            labels = [node.labels.get(JOB_LABEL, "") for node in request.spec.nodes]
            if _matches(target, names, labels):
                found.append(request)
        for node in self.fleet.nodes.values():
            alone = node.request not in self.fleet.requests
            if alone and _matches(target, [node.spec.name], [node.spec.labels.get(JOB_LABEL, "")]):
                found.append(node)
        if not found:
            raise ControlMistake(
                f"nothing here is called {target!r}; drumline emulator resources lists all"
            )
        return max(
            found, key=lambda resource: (resource.state in {"ACTIVE", "READY"}, resource.created)
        )

    async def preempt(self, target: str, notice: float = 0.0) -> str:
        """Preempt a request or node, `notice` seconds after its programs got SIGTERM.

        Returns its name.
        """
        subject = self.find(target)
        short = target.rpartition("/")[2]
        if isinstance(subject, Request):
            # Of a request with several nodes, the named node is preempted first.
            for node in self.fleet.nodes_under(subject):
                if node.spec.name.rpartition("/")[2] == short:
                    subject = node
        if subject.state in {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING"} | {
            NodeState.PREEMPTED,
            NodeState.TERMINATED,
            NodeState.STOPPING,
            NodeState.STOPPED,
        }:
            raise ControlMistake(f"{target} holds no chips: it is {subject.state}")
        self.fleet.preempt(subject, notice)
        if notice:
            nodes = [subject] if isinstance(subject, Node) else self.fleet.nodes_under(subject)
            for node in nodes:
                await self.hosts.give_notice(node)
        self.settle()
        return subject.spec.name.rpartition("/")[2]

    def resources(self) -> Json:
        """All requests, nodes and hosts."""
        requests = [
            {
                "name": request.spec.name.rpartition("/")[2],
                "zone": request.spec.zone,
                "state": request.state,
                "initiator": request.by,
                "accelerator": request.spec.nodes[0].slice.name,
                "chips": sum(node.slice.chips for node in request.spec.nodes),
                "tier": request.spec.tier,
                "job": request.spec.nodes[0].labels.get(JOB_LABEL),
                "error": request.error.message if request.error else None,
                "created": request.created,
            }
            for request in self.fleet.requests.values()
        ]
        nodes: list[Json] = []
        hosts: list[Json] = []
        for node in self.fleet.nodes.values():
            short = node.spec.name.rpartition("/")[2]
            nodes.append(
                {
                    "name": short,
                    "zone": node.spec.zone,
                    "state": node.state,
                    "accelerator": node.spec.slice.name,
                    "chips": node.spec.slice.chips,
                    "tier": node.spec.tier,
                    "job": node.spec.labels.get(JOB_LABEL),
                    "request": node.request and node.request.rpartition("/")[2],
                    "created": node.created,
                }
            )
            for index, (pid, address, machine) in enumerate(
                zip(self.hosts.listing(node), node.hosts, node.machines, strict=False)
            ):
                where = {"ip": address.ip, "port": address.port, "host_key": address.host_key}
                hosts.append(
                    {"node": short, "index": index, "pid": pid, **where, "machine": machine}
                )
        return {"requests": requests, "nodes": nodes, "hosts": hosts}


def _matches(target: str, names: list[str], jobs: list[str]) -> bool:
    if any(target in {name, name.rpartition("/")[2]} for name in names):
        return True
    return target.isdigit() and any(job.isdigit() and int(job) == int(target) for job in jobs)
