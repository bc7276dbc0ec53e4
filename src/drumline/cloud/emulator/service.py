"""The running emulated cloud: its state, hosts and faults, and the loop that advances it."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from drumline.clock import SteadyClock
from drumline.cloud.emulator.config import EmulatorConfig, Faults
from drumline.cloud.emulator.machines import MachineFolders
from drumline.cloud.emulator.running_hosts import HostSettings, RunningHosts
from drumline.cloud.model.errors import ApiError, Json, transient_errors
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
from drumline.errors import UserError

JOB_LABEL = "drumline-job"


@dataclass
class Calls:
    """The number of API calls since the start. Benchmarks read it."""

    by_method: Counter[str] = field(default_factory=Counter)
    by_zone: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, method: str, zone: str) -> None:
        """Count a call."""
        self.by_method[method] += 1
        self.by_zone.setdefault(zone, Counter())[method] += 1


class Service:
    """The state of the emulated cloud, and the loop that changes it."""

    def __init__(
        self,
        config: EmulatorConfig,
        settings: HostSettings,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start with an empty cloud. Its clock does not step when the machine's clock does."""
        clock = clock or SteadyClock()
        self.config = config
        self.faults: Faults = config.faults
        self.calls = Calls()
        self.clock = clock
        self.settings = settings
        self.started = clock()
        self.machines = MachineFolders(settings.home)
        self.hosts = RunningHosts(settings, self.machines)
        self.fleet = Fleet(clock, config.limits(), config.timing(), config.seed)
        self._random = random.Random(config.seed)  # noqa: S311, it decides which calls fail
        self._failed = 0
        self._changed = asyncio.Event()

    # Advancing

    def carry_out_orders(self) -> None:
        """Advance the fleet to the current time and carry out its orders."""
        self.fleet.advance()
        orders, self.fleet.orders = self.fleet.orders, []
        for order in orders:
            match order:
                case StartHosts(node):
                    self.hosts.start(node, self._on_hosts_booted)
                case RestartHosts(node):
                    self.hosts.restart(node, self._on_hosts_booted)
                case EndHosts(node, keep_disks):
                    self.hosts.end(node, self._on_hosts_ended, keep_disks=keep_disks)
        self._changed.set()

    async def run(self) -> None:
        """Advance the fleet whenever a change is due, until cancelled."""
        while True:
            self._changed.clear()
            self.fleet.advance()
            if self.fleet.orders:
                self.carry_out_orders()
                continue
            change_at = self.fleet.next_change_at()
            timeout = None if change_at is None else max(0.0, change_at - self.clock())
            try:
                await asyncio.wait_for(self._changed.wait(), timeout)
            except TimeoutError:
                self.carry_out_orders()

    def _on_hosts_booted(self, node: Node, hosts: tuple[HostAddress, ...]) -> None:
        if hosts:
            self.fleet.hosts_booted(node, hosts)
        else:
            self.fleet.preempt(node)
        self.carry_out_orders()

    def _on_hosts_ended(self, node: Node, disks_kept: bool) -> None:
        self.fleet.hosts_ended(node, disks_kept=disks_kept)
        self.carry_out_orders()

    # Injected faults

    def injected_error(self) -> ApiError | None:
        """Return the error with which this call fails, or None."""
        if self._random.random() >= self.faults.fail:
            return None
        self._failed += 1
        errors = transient_errors()
        return errors[self._failed % len(errors)]

    def takes_effect(self) -> bool:
        """Return True if a failing change takes effect nevertheless, as it may at Google."""
        return self._failed % 2 == 0

    def delay(self) -> float:
        """Return the additional seconds that this call takes."""
        delayed = self._random.random() < self.faults.delay
        return self.faults.seconds if delayed else 0.0

    # Controls that a real cloud does not have

    def find(self, target: str) -> Request | Node:
        """Return a request or a node by its name or full name, or by its job.

        Of several, return the running one, or else the newest.
        """
        matches: list[Request | Node] = []
        for request in self.fleet.requests.values():
            names = [request.spec.name, *(node.name for node in request.spec.nodes)]
            labels = [node.labels.get(JOB_LABEL, "") for node in request.spec.nodes]
            if _matches(target, names, labels):
                matches.append(request)
        for node in self.fleet.nodes.values():
            has_request = node.request in self.fleet.requests
            if not has_request and _matches(
                target, [node.spec.name], [node.spec.labels.get(JOB_LABEL, "")]
            ):
                matches.append(node)
        if not matches:
            raise UserError(
                f"nothing is called {target!r}; drumline emulator resources lists all names"
            )
        return max(
            matches, key=lambda resource: (resource.state in {"ACTIVE", "READY"}, resource.created)
        )

    async def preempt(self, target: str, notice: float = 0.0) -> str:
        """Preempt a request or node `notice` seconds after SIGTERM. Return its name."""
        subject = self.find(target)
        name = target.rpartition("/")[2]
        if isinstance(subject, Request):
            # If the target names a node of the request, preempt that node.
            for node in self.fleet.nodes_under(subject):
                if node.spec.name.rpartition("/")[2] == name:
                    subject = node
        if subject.state in {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING"} | {
            NodeState.PREEMPTED,
            NodeState.TERMINATED,
            NodeState.STOPPING,
            NodeState.STOPPED,
        }:
            raise UserError(f"{target} has no chips: it is {subject.state}")
        self.fleet.preempt(subject, notice)
        if notice:
            nodes = [subject] if isinstance(subject, Node) else self.fleet.nodes_under(subject)
            for node in nodes:
                await self.hosts.give_notice(node)
        self.carry_out_orders()
        return subject.spec.name.rpartition("/")[2]

    def resources(self) -> Json:
        """Return all requests, nodes and hosts as JSON."""
        requests = [
            {
                "name": request.spec.name.rpartition("/")[2],
                "zone": request.spec.zone,
                "state": request.state,
                "initiator": request.initiator,
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
            name = node.spec.name.rpartition("/")[2]
            nodes.append(
                {
                    "name": name,
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
                zip(self.hosts.pids(node), node.hosts, node.machines, strict=False)
            ):
                address_json = {
                    "ip": address.ip,
                    "port": address.port,
                    "host_key": address.host_key,
                }
                hosts.append(
                    {"node": name, "index": index, "pid": pid, **address_json, "machine": machine}
                )
        return {"requests": requests, "nodes": nodes, "hosts": hosts}


def _matches(target: str, names: list[str], jobs: list[str]) -> bool:
    if any(target in {name, name.rpartition("/")[2]} for name in names):
        return True
    return target.isdigit() and any(job.isdigit() and int(job) == int(target) for job in jobs)
