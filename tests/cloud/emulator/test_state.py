"""Requests and nodes over time, with a clock that is turned by hand and hosts that are imagined."""

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
class World:
    """A fleet whose hosts come up and go down as ordered, unless told to dawdle."""

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
        """A node without a queue; returns its full name."""
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
    world = World(timing=CloudTiming(waiting=5, provision=10, delete=3))
    world.ask("a")
    assert world.state("a") == "WAITING_FOR_RESOURCES"
    world.later(4)
    assert world.state("a") == "WAITING_FOR_RESOURCES"
    world.later(1)
    assert (world.state("a"), world.node_state("a")) == ("PROVISIONING", "CREATING")
    world.later(10)
    assert (world.state("a"), world.node_state("a")) == ("ACTIVE", "READY")
    world.delete("a")
    assert (world.state("a"), world.node_state("a")) == ("DELETING", "DELETING")
    world.later(3)
    assert not world.fleet.requests
    assert not world.fleet.nodes


def test_the_time_of_the_next_change_is_known() -> None:
    world = World(timing=CloudTiming(waiting=5, provision=10))
    assert world.fleet.next_change_at() is None
    world.ask("a")
    assert world.fleet.next_change_at() == 1005
    world.later(5)
    assert world.fleet.next_change_at() == 1015
    world.later(10)
    assert world.fleet.next_change_at() is None


def test_a_node_is_ready_only_when_its_hosts_have_booted() -> None:
    world = World(hosts_obey=False)
    world.ask("a")
    world.later(100)
    assert world.node_state("a") == "CREATING"
    world.hosts_obey = True
    world.settle()
    assert world.node_state("a") == "READY"


def test_a_request_waits_for_chips_and_gets_them_when_another_is_released() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v4": 4}}))
    world.ask("first")
    world.ask("second")
    world.later(1000)
    assert (world.state("first"), world.state("second")) == ("ACTIVE", "WAITING_FOR_RESOURCES")
    world.delete("first")
    assert world.state("second") == "ACTIVE"


def test_capacity_of_one_size_leaves_the_others_alone() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v4-8": 0}}))
    world.ask("small")
    world.ask("large", "v4-16")
    assert (world.state("small"), world.state("large")) == ("WAITING_FOR_RESOURCES", "ACTIVE")


def test_a_request_without_chips_fails_if_configured() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v4": 0}}, fail_when_short=True))
    world.ask("a")
    request = world.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("FAILED", "SERVICE")
    assert request.error is not None
    assert request.error.code == 8
    assert request.error.message.startswith('There is no more capacity in the zone "local-a";')


def test_a_node_without_a_queue_fails_at_once_when_there_are_no_chips() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v4": 0}}))
    operation = world.fleet.create_node(node_spec("n"))
    world.settle()
    assert operation.ended is not None
    assert operation.error is not None
    assert operation.error.code == 8
    assert not world.fleet.nodes


def test_a_preempted_request_is_suspended_and_stays() -> None:
    world = World()
    world.ask("a")
    world.preempt("a")
    request = world.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("SUSPENDED", "SERVICE")
    assert world.node_state("a") == "PREEMPTED"
    world.later(1e6)
    assert world.state("a") == "SUSPENDED"


def test_a_request_is_suspending_until_its_hosts_have_ended() -> None:
    world = World()
    world.ask("a")
    world.hosts_obey = False
    world.preempt("a")
    assert (world.state("a"), world.node_state("a")) == ("SUSPENDING", "PREEMPTED")
    world.hosts_obey = True
    world.settle()
    assert world.state("a") == "SUSPENDED"


def test_preempted_while_being_created_it_fails_with_code_3() -> None:
    world = World(timing=CloudTiming(provision=10))
    world.ask("a")
    world.preempt("a")
    error = world.fleet.request(f"{ZONE}/queuedResources/a").error
    assert world.state("a") == "FAILED"
    assert error is not None
    assert error.code == 3
    assert "update is not supported while in state PREEMPTED" in error.message


def test_preempted_while_it_waits_it_is_suspended_without_a_node() -> None:
    world = World(timing=CloudTiming(waiting=10))
    world.ask("a")
    world.preempt("a")
    world.later(100)
    assert world.state("a") == "SUSPENDED"
    assert not world.fleet.nodes


def test_a_node_that_is_not_spot_is_terminated() -> None:
    world = World()
    world.ask("a", tier=Tier.ON_DEMAND)
    world.preempt("a")
    assert (world.state("a"), world.node_state("a")) == ("SUSPENDED", "TERMINATED")


def test_the_nodes_of_a_request_are_preempted_together() -> None:
    world = World()
    world.ask("a", nodes=2)
    assert world.state("a") == "ACTIVE"
    world.fleet.preempt(world.fleet.node(f"{ZONE}/nodes/a-1"))
    world.settle()
    assert world.node_state("a-0") == world.node_state("a-1") == "PREEMPTED"
    assert world.state("a") == "SUSPENDED"


def test_only_spot_nodes_are_preempted_at_random() -> None:
    world = World(timing=CloudTiming(preempt_every=60))
    world.ask("spot")
    world.ask("firm", tier=Tier.ON_DEMAND)
    world.later(60 * 50)
    assert (world.state("spot"), world.state("firm")) == ("SUSPENDED", "ACTIVE")


def test_a_request_with_a_node_is_deleted_with_force_only() -> None:
    world = World()
    world.ask("a")
    with pytest.raises(ApiError, match="force=true") as refused:
        world.delete("a", force=False)
    assert refused.value.status.code == 9
    assert world.state("a") == "ACTIVE"
    world.delete("a")
    assert not world.fleet.requests


def test_deleting_the_node_suspends_the_request_by_the_user() -> None:
    world = World()
    world.ask("a")
    world.fleet.delete_node(f"{ZONE}/nodes/a")
    world.settle()
    request = world.fleet.request(f"{ZONE}/queuedResources/a")
    assert (request.state, request.initiator) == ("SUSPENDED", "USER")
    world.delete("a", force=False)
    assert not world.fleet.requests


def test_deleted_while_the_hosts_start_nothing_is_left() -> None:
    world = World(hosts_obey=False)
    world.ask("a")
    world.delete("a")
    assert world.state("a") == "DELETING"
    world.hosts_obey = True
    world.settle()
    assert not world.fleet.requests
    assert not world.fleet.nodes


@pytest.mark.parametrize("place", ["local-a", "local"])
def test_a_suspended_request_holds_its_quota_until_it_is_deleted(place: str) -> None:
    world = World(limits=Limits(quota={place: {Tier.SPOT: 4}}))
    world.ask("a")
    world.preempt("a")
    with pytest.raises(ApiError) as refused:
        world.ask("b")
    status = refused.value.status
    assert status.code == 8
    assert "ForTPUAPI" in status.message
    assert status.details[0]["@type"].endswith("QuotaFailure")
    world.ask("firm", tier=Tier.ON_DEMAND)
    world.delete("a")
    world.ask("b")
    assert world.state("b") == "ACTIVE"


def test_a_name_is_in_use_until_the_resource_is_deleted() -> None:
    world = World(timing=CloudTiming(delete=5))
    world.ask("a")
    with pytest.raises(ApiError, match="already exists"):
        world.ask("a")
    world.delete("a")
    with pytest.raises(ApiError, match="already exists"):
        world.ask("a")
    world.later(5)
    world.ask("a")
    assert world.state("a") == "ACTIVE"


def test_operations_end_with_their_change() -> None:
    world = World(timing=CloudTiming(waiting=5, provision=10, delete=3))
    assert world.ask("a").ended == 1000
    node = world.fleet.create_node(node_spec("n"))
    world.later(9)
    ends = [node.ended]
    world.later(1)
    ends.append(node.ended)
    assert (ends, node.error) == ([None, 1010], None)
    deleted = world.fleet.delete_node(f"{ZONE}/nodes/n")
    world.later(2)
    ends = [deleted.ended]
    world.later(1)
    ends.append(deleted.ended)
    assert ends == [None, 1013]


def test_a_stopped_node_frees_its_chips_and_keeps_its_disk() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v4": 4}}))
    name = world.node("a")
    stop = world.fleet.stop_node(name)
    assert world.node_state("a") == "STOPPING"
    world.settle()
    assert (world.node_state("a"), stop.ended is not None) == ("STOPPED", True)
    assert (world.fleet.node(name).has_disks, world.fleet.node(name).hosts) == (True, ())
    world.node("b")
    short = world.fleet.start_node(name)
    assert short.error is not None
    assert "There is no more capacity" in short.error.message
    assert world.node_state("a") == "STOPPED"
    world.fleet.delete_node(world.node_name("b"))
    world.settle()
    start = world.fleet.start_node(name)
    assert world.node_state("a") == "STARTING"
    world.settle()
    assert (world.node_state("a"), start.error) == ("READY", None)


def test_a_stopped_node_is_deleted_with_its_disk() -> None:
    world = World()
    name = world.node("a")
    world.fleet.stop_node(name)
    world.settle()
    world.hosts_obey = False
    world.fleet.delete_node(name)
    world.settle()
    assert world.node_state("a") == "DELETING"
    assert [type(order) for order in world.fleet.orders] == [EndHosts]
    world.hosts_obey = True
    world.settle()
    assert not world.fleet.nodes


def test_calls_in_the_wrong_state_are_errors() -> None:
    world = World(limits=Limits(capacity={"local-a": {"v6e": 0}}))
    queued, pod = f"{ZONE}/nodes/queued", world.node("pod", "v4-16")
    world.ask("queued")
    world.ask("waits", "v6e-8")
    ready = world.node("ready")
    fleet = world.fleet
    for call, name, says in (
        (fleet.stop_node, queued, "created through a queued resource"),
        (fleet.stop_node, pod, "it has more than one host"),
        (fleet.start_node, ready, "start is not supported while in state READY"),
        (fleet.reset_request, f"{ZONE}/queuedResources/waits", "must be ACTIVE"),
        (fleet.stop_node, f"{ZONE}/nodes/none", "was not found"),
    ):
        with pytest.raises(ApiError, match=says):
            call(name)
    world.fleet.stop_node(ready)
    with pytest.raises(ApiError, match="stop is not supported while in state STOPPING"):
        world.fleet.stop_node(ready)


def test_a_reset_request_stays_active_while_its_hosts_boot() -> None:
    world = World()
    world.ask("a")
    reset = world.fleet.reset_request(f"{ZONE}/queuedResources/a")
    world.fleet.advance()
    assert (world.state("a"), world.node_state("a"), reset.ended) == ("ACTIVE", "RESTARTING", None)
    world.settle()
    assert (world.node_state("a"), reset.error) == ("READY", None)
    assert reset.ended is not None
