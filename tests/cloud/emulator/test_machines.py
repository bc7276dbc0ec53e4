"""The physical machines of hosts outlast nodes and are reused in turn."""

from dataclasses import dataclass

import pytest

from drumline.cloud.model.resources import Tier
from tests.cloud.emulator.test_state import FleetHarness, node_spec


@dataclass
class Grants(FleetHarness):
    """A fleet that reports the machines of its nodes."""

    def machines(self, name: str) -> tuple[str, ...]:
        return self.fleet.node(self.node_name(name)).machines

    def grant(self, name: str, accelerator: str = "v4-16") -> list[int]:
        """Request a slice and return the numbers of its machines."""
        self.ask(name, accelerator)
        return self.numbers(name)

    def numbers(self, name: str) -> list[int]:
        return [int(machine.rpartition("-")[2]) for machine in self.machines(name)]


def test_released_machines_are_assigned_after_the_others() -> None:
    harness = Grants()
    turns = []
    for name in ("a", "b", "c", "d"):
        turns.append(harness.grant(name))
        harness.delete(name)
    assert turns == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_names_of_machines_have_zone_generation_and_chips() -> None:
    harness = Grants()
    harness.ask("a", "v4-16")
    harness.ask("b", "v5litepod-8")
    harness.ask("c", "v5litepod-16")
    assert harness.machines("a") == ("local-a-v4-4-0", "local-a-v4-4-1")
    assert harness.machines("b") == ("local-a-v5e-8-0",)
    assert harness.machines("c")[0] == "local-a-v5e-4-0"


def test_there_are_machines_for_a_second_slice() -> None:
    harness = Grants()
    assert harness.grant("parked") == [0, 1]
    for name in ("b", "c"):
        assert harness.grant(name) == [2, 3]
        harness.delete(name)


def test_no_machine_has_two_hosts() -> None:
    harness = Grants()
    under = [number for name in "abcd" for number in harness.grant(name)]
    assert under == list(range(8))
    harness.delete("c")
    assert harness.grant("e") == [4, 5]


def test_unused_machines_are_assigned_first() -> None:
    harness = Grants()
    harness.grant("small", "v4-8")
    harness.delete("small")
    assert harness.grant("large", "v4-32") == [1, 2, 3, 4]


def test_there_are_machines_for_twice_the_slices_of_a_request() -> None:
    harness = Grants()
    harness.ask("pair", "v4-16", nodes=2)
    assert harness.numbers("pair-0") + harness.numbers("pair-1") == [0, 1, 2, 3]
    harness.delete("pair")
    assert harness.grant("next") == [4, 5]


def test_machines_are_freed_only_when_the_hosts_have_ended() -> None:
    harness = Grants()
    harness.grant("kept")
    harness.grant("lost")
    harness.hosts_obey = False
    harness.preempt("lost")
    assert harness.node_state("lost") == "PREEMPTED"
    assert harness.numbers("lost") == [2, 3]
    assert harness.grant("early") == [4, 5]
    harness.hosts_obey = True
    harness.settle()
    assert harness.numbers("lost") == []
    assert harness.grant("late") == [2, 3]


def test_a_stopped_node_keeps_its_machine_until_it_is_deleted() -> None:
    harness = Grants()
    name = harness.node("pause")
    harness.fleet.stop_node(name)
    harness.settle()
    assert harness.node_state("pause") == "STOPPED"
    harness.node("other")
    assert (harness.numbers("pause"), harness.numbers("other")) == ([0], [1])
    harness.fleet.start_node(name)
    harness.settle()
    assert harness.numbers("pause") == [0]
    harness.fleet.delete_node(name)
    harness.settle()
    harness.node("third")
    assert harness.numbers("third") == [0]


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("local-a-v4-4-0", 4),
        ("local-b-v5e-8-1", 8),
        ("us-central2-b-v4-4-3", 4),
        ("local-b-v5e-8-2", None),  # the zone has only two slices of one host
        ("local-a-v4-4-01", None),
        ("local-a-v4-4--1", None),
        ("local-a-v4-8-0", None),
        ("us-central2-b-v5e-8-0", None),  # this zone has only v4
        ("mars-v4-4-0", None),
        ("local-a-v4-4-" + "9" * 5000, None),
        ("local-a", None),
        ("", None),
    ],
)
def test_a_machine_is_known_before_its_first_slice(name: str, chips: int | None) -> None:
    assert FleetHarness().fleet.machines.chips(name) == chips


def test_all_machines_of_a_grown_pool_are_known() -> None:
    harness = Grants()
    for number in range(3):
        harness.fleet.create_node(node_spec(f"n{number}", "v5litepod-8", Tier.ON_DEMAND))
    harness.settle()
    assert harness.fleet.machines.chips(harness.machines("n2")[0]) == 8
