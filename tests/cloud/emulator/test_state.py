"""Requests and nodes over time, with a manual clock and simulated hosts."""

from dataclasses import dataclass, field

import pytest

from drumline.chips import slice_of
from drumline.cloud.model.errors import ApiError
from drumline.cloud.model.fleet import Fleet
from drumline.cloud.model.resources import (
    CloudTiming,
    EndHosts,
    HostAddress,
    Limits,
    NodeSpec,
    Operation,
    RequestSpec,
    Tier,
)

ZONE = "projects/p/locations/local-a"


@dataclass
class FleetHarness:
    """A fleet whose hosts start and stop as ordered, unless a test holds them up."""

    limits: Limits = field(default_factory=Limits)
    timing: CloudTiming = field(default_factory=CloudTiming)
    now: float = 1000.0
    hosts_obey: bool = True

    def __post_init__(self) -> None:
        self.fleet = Fleet(lambda: self.now, self.limits, self.timing)

    def settle(self) -> None:
        self.fleet.advance()
        while self.hosts_obey and self.fleet.orders:
            for order in self.fleet.orders[:]:
                self.fleet.orders.remove(order)
                if isinstance(order, EndHosts):
                    self.fleet.hosts_ended(order.node, disks_kept=order.keep_disks)
                else:
                    self.fleet.hosts_booted(order.node, (HostAddress("127.0.0.1", 1, "key"),))
            self.fleet.advance()

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    def ask(
        self, name: str, accelerator: str = "v4-8", tier: Tier = Tier.SPOT, nodes: int = 1
    ) -> Operation:
        specs = tuple(
            node_spec(name if nodes == 1 else f"{name}-{index}", accelerator, tier)
            for index in range(nodes)
        )
        spec = RequestSpec(f"{ZONE}/queuedResources/{name}", tier, specs, {})
        operation = self.fleet.create_request(spec)
        self.settle()
        return operation

    def node_name(self, name: str) -> str:
        return f"{ZONE}/nodes/{name}"

    def node(self, name: str, accelerator: str = "v4-8") -> str:
        """Create a node without a queue, and return its full name."""
        self.fleet.create_node(node_spec(name, accelerator, Tier.ON_DEMAND))
        self.settle()
        return self.node_name(name)

    def state(self, name: str) -> str:
        return self.fleet.request(f"{ZONE}/queuedResources/{name}").state

    def node_state(self, name: str) -> str:
        return self.fleet.node(f"{ZONE}/nodes/{name}").state

    def preempt(self, name: str) -> None:
        self.fleet.preempt(self.fleet.request(f"{ZONE}/queuedResources/{name}"))
        self.settle()

    def delete(self, name: str, force: bool = True) -> None:
        self.fleet.delete_request(f"{ZONE}/queuedResources/{name}", force=force)
        self.settle()


def node_spec(name: str, accelerator: str = "v4-8", tier: Tier = Tier.SPOT) -> NodeSpec:
    return NodeSpec(f"{ZONE}/nodes/{name}", slice_of(accelerator), tier, {}, {}, {})


def test_a_request_passes_through_every_state_in_its_time() -> None:
    harness = FleetHarness(timing=CloudTiming(waiting=5, provision=10, delete=3))
    harness.ask("a")
    assert harness.state("a") == "WAITING_FOR_RESOURCES"
    harness.later(4)
    assert harness.state("a") == "WAITING_FOR_RESOURCES"
    harness.later(1)
    assert (harness.state("a"), harness.node_state("a")) == ("PROVISIONING", "CREATING")
    harness.later(10)
    assert (harness.state("a"), harness.node_state("a")) == ("ACTIVE", "READY")
    harness.delete("a")
    assert (harness.state("a"), harness.node_state("a")) == ("DELETING", "DELETING")
    harness.later(3)
    assert not harness.fleet.requests
    assert not harness.fleet.nodes


def test_the_time_of_the_next_change_is_known() -> None:
    harness = FleetHarness(timing=CloudTiming(waiting=5, provision=10))
    assert harness.fleet.next_change_at() is None
    harness.ask("a")
    assert harness.fleet.next_change_at() == 1005
    harness.later(5)
    assert harness.fleet.next_change_at() == 1015
    harness.later(10)
    assert harness.fleet.next_change_at() is None


def test_a_node_is_ready_only_when_its_hosts_have_booted() -> None:
    harness = FleetHarness(hosts_obey=False)
    harness.ask("a")
    harness.later(100)
    assert harness.node_state("a") == "CREATING"
    harness.hosts_obey = True
    harness.settle()
    assert harness.node_state("a") == "READY"


def test_a_request_waits_for_chips_and_gets_them_when_another_is_released() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v4": 4}}))
    harness.ask("first")
    harness.ask("second")
    harness.later(1000)
    assert (harness.state("first"), harness.state("second")) == ("ACTIVE", "WAITING_FOR_RESOURCES")
    harness.delete("first")
    assert harness.state("second") == "ACTIVE"


def test_capacity_of_one_size_leaves_the_others_alone() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v4-8": 0}}))
    harness.ask("small")
    harness.ask("large", "v4-16")
    assert (harness.state("small"), harness.state("large")) == ("WAITING_FOR_RESOURCES", "ACTIVE")


def test_a_request_without_chips_fails_if_configured() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v4": 0}}, fail_when_short=True))
    harness.ask("a")
    request = harness.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("FAILED", "SERVICE")
    assert request.error is not None
    assert request.error.code == 8
    assert request.error.message.startswith('There is no more capacity in the zone "local-a";')


def test_a_node_without_a_queue_fails_at_once_when_there_are_no_chips() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v4": 0}}))
    operation = harness.fleet.create_node(node_spec("n"))
    harness.settle()
    assert operation.ended is not None
    assert operation.error is not None
    assert operation.error.code == 8
    assert not harness.fleet.nodes


def test_a_preempted_request_is_suspended_and_stays() -> None:
    harness = FleetHarness()
    harness.ask("a")
    harness.preempt("a")
    request = harness.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("SUSPENDED", "SERVICE")
    assert harness.node_state("a") == "PREEMPTED"
    harness.later(1e6)
    assert harness.state("a") == "SUSPENDED"


def test_a_request_is_suspending_until_its_hosts_have_ended() -> None:
    harness = FleetHarness()
    harness.ask("a")
    harness.hosts_obey = False
    harness.preempt("a")
    assert (harness.state("a"), harness.node_state("a")) == ("SUSPENDING", "PREEMPTED")
    harness.hosts_obey = True
    harness.settle()
    assert harness.state("a") == "SUSPENDED"


def test_preempted_while_being_created_it_fails_with_code_3() -> None:
    harness = FleetHarness(timing=CloudTiming(provision=10))
    harness.ask("a")
    harness.preempt("a")
    error = harness.fleet.request(f"{ZONE}/queuedResources/a").error
    assert harness.state("a") == "FAILED"
    assert error is not None
    assert error.code == 3
    assert "update is not supported while in state PREEMPTED" in error.message


def test_preempted_while_it_waits_it_is_suspended_without_a_node() -> None:
    harness = FleetHarness(timing=CloudTiming(waiting=10))
    harness.ask("a")
    harness.preempt("a")
    harness.later(100)
    assert harness.state("a") == "SUSPENDED"
    assert not harness.fleet.nodes


def test_a_node_that_is_not_spot_is_terminated() -> None:
    harness = FleetHarness()
    harness.ask("a", tier=Tier.ON_DEMAND)
    harness.preempt("a")
    assert (harness.state("a"), harness.node_state("a")) == ("SUSPENDED", "TERMINATED")


def test_the_nodes_of_a_request_are_preempted_together() -> None:
    harness = FleetHarness()
    harness.ask("a", nodes=2)
    assert harness.state("a") == "ACTIVE"
    harness.fleet.preempt(harness.fleet.node(f"{ZONE}/nodes/a-1"))
    harness.settle()
    assert harness.node_state("a-0") == harness.node_state("a-1") == "PREEMPTED"
    assert harness.state("a") == "SUSPENDED"


def test_only_spot_nodes_are_preempted_at_random() -> None:
    harness = FleetHarness(timing=CloudTiming(preempt_every=60))
    harness.ask("spot")
    harness.ask("firm", tier=Tier.ON_DEMAND)
    harness.later(60 * 50)
    assert (harness.state("spot"), harness.state("firm")) == ("SUSPENDED", "ACTIVE")


def test_a_request_with_a_node_is_deleted_with_force_only() -> None:
    harness = FleetHarness()
    harness.ask("a")
    with pytest.raises(ApiError, match="force=true") as refused:
        harness.delete("a", force=False)
    assert refused.value.status.code == 9
    assert harness.state("a") == "ACTIVE"
    harness.delete("a")
    assert not harness.fleet.requests


def test_deleting_the_node_suspends_the_request_by_the_user() -> None:
    harness = FleetHarness()
    harness.ask("a")
    harness.fleet.delete_node(f"{ZONE}/nodes/a")
    harness.settle()
    request = harness.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("SUSPENDED", "USER")
    harness.delete("a", force=False)
    assert not harness.fleet.requests


def test_a_delete_while_the_hosts_start_leaves_no_resource() -> None:
    harness = FleetHarness(hosts_obey=False)
    harness.ask("a")
    harness.delete("a")
    assert harness.state("a") == "DELETING"
    harness.hosts_obey = True
    harness.settle()
    assert not harness.fleet.requests
    assert not harness.fleet.nodes


@pytest.mark.parametrize("place", ["local-a", "local"])
def test_a_suspended_request_holds_its_quota_until_it_is_deleted(place: str) -> None:
    harness = FleetHarness(limits=Limits(quota={place: {Tier.SPOT: 4}}))
    harness.ask("a")
    harness.preempt("a")
    with pytest.raises(ApiError) as refused:
        harness.ask("b")
    status = refused.value.status
    assert status.code == 8
    assert "ForTPUAPI" in status.message
    assert status.details[0]["@type"].endswith("QuotaFailure")
    harness.ask("firm", tier=Tier.ON_DEMAND)
    harness.delete("a")
    harness.ask("b")
    assert harness.state("b") == "ACTIVE"


def test_a_name_is_in_use_until_the_resource_is_deleted() -> None:
    harness = FleetHarness(timing=CloudTiming(delete=5))
    harness.ask("a")
    with pytest.raises(ApiError, match="already exists"):
        harness.ask("a")
    harness.delete("a")
    with pytest.raises(ApiError, match="already exists"):
        harness.ask("a")
    harness.later(5)
    harness.ask("a")
    assert harness.state("a") == "ACTIVE"


def test_operations_end_with_their_change() -> None:
    harness = FleetHarness(timing=CloudTiming(waiting=5, provision=10, delete=3))
    assert harness.ask("a").ended == 1000
    node = harness.fleet.create_node(node_spec("n"))
    harness.later(9)
    ends = [node.ended]
    harness.later(1)
    ends.append(node.ended)
    assert (ends, node.error) == ([None, 1010], None)
    deleted = harness.fleet.delete_node(f"{ZONE}/nodes/n")
    harness.later(2)
    ends = [deleted.ended]
    harness.later(1)
    ends.append(deleted.ended)
    assert ends == [None, 1013]


def test_a_stopped_node_frees_its_chips_and_keeps_its_disk() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v4": 4}}))
    name = harness.node("a")
    stop = harness.fleet.stop_node(name)
    assert harness.node_state("a") == "STOPPING"
    harness.settle()
    assert (harness.node_state("a"), stop.ended is not None) == ("STOPPED", True)
    assert (harness.fleet.node(name).has_disks, harness.fleet.node(name).hosts) == (True, ())
    harness.node("b")
    short = harness.fleet.start_node(name)
    assert short.error is not None
    assert "There is no more capacity" in short.error.message
    assert harness.node_state("a") == "STOPPED"
    harness.fleet.delete_node(harness.node_name("b"))
    harness.settle()
    start = harness.fleet.start_node(name)
    assert harness.node_state("a") == "STARTING"
    harness.settle()
    assert (harness.node_state("a"), start.error) == ("READY", None)


def test_a_stopped_node_is_deleted_with_its_disk() -> None:
    harness = FleetHarness()
    name = harness.node("a")
    harness.fleet.stop_node(name)
    harness.settle()
    harness.hosts_obey = False
    harness.fleet.delete_node(name)
    harness.settle()
    assert harness.node_state("a") == "DELETING"
    assert [type(order) for order in harness.fleet.orders] == [EndHosts]
    harness.hosts_obey = True
    harness.settle()
    assert not harness.fleet.nodes


def test_calls_in_the_wrong_state_are_errors() -> None:
    harness = FleetHarness(limits=Limits(capacity={"local-a": {"v6e": 0}}))
    queued, pod = f"{ZONE}/nodes/queued", harness.node("pod", "v4-16")
    harness.ask("queued")
    harness.ask("waits", "v6e-8")
    ready = harness.node("ready")
    fleet = harness.fleet
    for call, name, says in (
        (fleet.stop_node, queued, "created through a queued resource"),
        (fleet.stop_node, pod, "it has more than one host"),
        (fleet.start_node, ready, "start is not supported while in state READY"),
        (fleet.reset_request, f"{ZONE}/queuedResources/waits", "must be ACTIVE"),
        (fleet.stop_node, f"{ZONE}/nodes/none", "was not found"),
    ):
        with pytest.raises(ApiError, match=says):
            call(name)
    harness.fleet.stop_node(ready)
    with pytest.raises(ApiError, match="stop is not supported while in state STOPPING"):
        harness.fleet.stop_node(ready)


def test_a_reset_request_stays_active_while_its_hosts_boot() -> None:
    harness = FleetHarness()
    harness.ask("a")
    reset = harness.fleet.reset_request(f"{ZONE}/queuedResources/a")
    harness.fleet.advance()
    assert (harness.state("a"), harness.node_state("a"), reset.ended) == (
        "ACTIVE",
        "RESTARTING",
        None,
    )
    harness.settle()
    assert (harness.node_state("a"), reset.error) == ("READY", None)
    assert reset.ended is not None
