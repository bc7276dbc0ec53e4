"""Which physical machine a host is on: machines outlast nodes, and come back in turn."""

from dataclasses import dataclass

import pytest

from drumline.cloud.model.resources import Tier
from tests.cloud.emulator.test_state import World, node_spec


@dataclass
class Grants(World):
    """A world that is asked on which machines its nodes are."""

    def machines(self, name: str) -> tuple[str, ...]:
        return self.fleet.node(self.node_name(name)).machines

    def grant(self, name: str, accelerator: str = "v4-16") -> list[int]:
        """Ask for a slice; the numbers of its machines."""
        self.ask(name, accelerator)
        return self.numbers(name)

    def numbers(self, name: str) -> list[int]:
        return [int(machine.rpartition("-")[2]) for machine in self.machines(name)]


def test_released_machines_are_assigned_after_the_others() -> None:
    world = Grants()
    turns = []
    for name in ("a", "b", "c", "d"):
        turns.append(world.grant(name))
        world.delete(name)
    assert turns == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_names_of_machines_have_zone_generation_and_chips() -> None:
    world = Grants()
    world.ask("a", "v4-16")
    world.ask("b", "v5litepod-8")
    world.ask("c", "v5litepod-16")
    assert world.machines("a") == ("local-a-v4-4-0", "local-a-v4-4-1")
    assert world.machines("b") == ("local-a-v5e-8-0",)
    assert world.machines("c")[0] == "local-a-v5e-4-0"


def test_there_are_machines_for_a_second_slice() -> None:
    world = Grants()
    assert world.grant("parked") == [0, 1]
    for name in ("b", "c"):
        assert world.grant(name) == [2, 3]
        world.delete(name)


def test_no_machine_has_two_hosts() -> None:
    world = Grants()
    under = [number for name in "abcd" for number in world.grant(name)]
    assert under == list(range(8))
    world.delete("c")
    assert world.grant("e") == [4, 5]


def test_unused_machines_are_assigned_first() -> None:
    world = Grants()
    world.grant("small", "v4-8")
    world.delete("small")
    assert world.grant("large", "v4-32") == [1, 2, 3, 4]


def test_there_are_machines_for_twice_the_slices_of_a_request() -> None:
    world = Grants()
    world.ask("pair", "v4-16", nodes=2)
    assert world.numbers("pair-0") + world.numbers("pair-1") == [0, 1, 2, 3]
    world.delete("pair")
    assert world.grant("next") == [4, 5]


def test_machines_are_freed_only_when_the_hosts_have_ended() -> None:
    world = Grants()
    world.grant("kept")
    world.grant("lost")
    world.hosts_obey = False
    world.preempt("lost")
    assert world.node_state("lost") == "PREEMPTED"
    assert world.numbers("lost") == [2, 3]
    assert world.grant("early") == [4, 5]
    world.hosts_obey = True
    world.settle()
    assert world.numbers("lost") == []
    assert world.grant("late") == [2, 3]


def test_a_stopped_node_keeps_its_machine_until_it_is_deleted() -> None:
    world = Grants()
    name = world.node("pause")
    world.fleet.stop_node(name)
    world.settle()
    assert world.node_state("pause") == "STOPPED"
    world.node("other")
    assert (world.numbers("pause"), world.numbers("other")) == ([0], [1])
    world.fleet.start_node(name)
    world.settle()
    assert world.numbers("pause") == [0]
    world.fleet.delete_node(name)
    world.settle()
    world.node("third")
    assert world.numbers("third") == [0]


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("local-a-v4-4-0", 4),
        ("local-b-v5e-8-1", 8),
        ("us-central2-b-v4-4-3", 4),
        ("local-b-v5e-8-2", None),  # two slices of one host are all there is
        ("local-a-v4-4-01", None),
        ("local-a-v4-4--1", None),
        ("local-a-v4-8-0", None),
        ("us-central2-b-v5e-8-0", None),  # that zone has v4 alone
        ("mars-v4-4-0", None),
        ("local-a-v4-4-" + "9" * 5000, None),
        ("local-a", None),
        ("", None),
    ],
)
def test_a_machine_is_known_before_its_first_slice(name: str, chips: int | None) -> None:
    assert World().fleet.machines.chips(name) == chips


def test_all_machines_of_a_grown_pool_are_known() -> None:
    world = Grants()
    for number in range(3):
        world.fleet.create_node(node_spec(f"n{number}", "v5litepod-8", Tier.ON_DEMAND))
    world.settle()
    assert world.fleet.machines.chips(world.machines("n2")[0]) == 8
