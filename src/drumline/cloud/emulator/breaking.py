"""`break`: what can go wrong with a host, and with the physical machine that it is on.

A host that hangs or reboots is well again as a new host. What is wrong with a machine stays with
it: the next node that gets the machine has the fault too, until the machine is healed.
"""

import zlib
from dataclasses import dataclass, replace

from drumline.cloud.emulator.hosts.terms import SOUND, ChipFault, MachineFaults
from drumline.cloud.emulator.service import ControlMistake, Service
from drumline.cloud.model.errors import Json
from drumline.cloud.model.resources import Node

_OF_A_CHIP = ("lies", "nan", "bad-link", "missing-chip")
_WITH_STEPS = ("lies", "nan")
_OF_A_HOST = ("silent", "reboot")
HOWS = (*_OF_A_CHIP, "slow", "vfio", *_OF_A_HOST)
HEAL = "heal"


@dataclass(frozen=True)
class Breakage:
    """What a user asks for; None is what was not said."""

    target: str
    """A job, a node or a request, of which `host` is meant; or a machine."""
    how: str
    host: int | None = None
    from_step: int | None = None
    chip: int | None = None


@dataclass(frozen=True)
class _Place:
    """A machine, and the host on it, if a node has the machine now."""

    machine: str
    node: Node | None = None
    index: int | None = None


async def break_host(service: Service, asked: Breakage) -> Json:
    """Break or heal a host or its machine; the answer says which, and how."""
    _check(asked)
    place = _place(service, asked)
    chip = _chip(service, place, asked)
    if asked.how in _OF_A_HOST:
        if not await _order(service, place, asked.how):
            raise ControlMistake(f"no host runs on {place.machine} now, so none can break")
    else:
        faults = _broken(service.machines.faults(place.machine), place.machine, asked, chip)
        service.machines.set_faults(place.machine, faults)
        await _order(service, place, faults)
        if asked.how == HEAL:
            await _order(service, place, HEAL)
    return {
        "node": place.node and place.node.spec.name.rpartition("/")[2],
        "host": place.index,
        "machine": place.machine,
        "how": asked.how,
        "chip": chip,
        "from_step": (asked.from_step or 0) if asked.how in _WITH_STEPS else None,
    }


def broken_machines(service: Service) -> list[Json]:
    """Every machine with faults, and the host that is on it."""
    listed: list[Json] = []
    for machine, faults in sorted(service.machines.broken.items()):
        place = _on(service, machine)
        node = place.node and place.node.spec.name.rpartition("/")[2]
        listed.append(
            {"name": machine, "node": node, "host": place.index, "faults": faults.listing()}
        )
    return listed


def _check(asked: Breakage) -> None:
    """Refuse what no host or machine could do."""
    if asked.how not in (*HOWS, HEAL):
        raise ControlMistake(f"a host breaks by {', '.join(HOWS)}, and heals; not by {asked.how!r}")
    if asked.from_step is not None and asked.how not in _WITH_STEPS:
        raise ControlMistake(
            f"{asked.how} begins at once: --from-step goes with {' and '.join(_WITH_STEPS)}"
        )
    if asked.from_step is not None and asked.from_step < 0:
        raise ControlMistake(f"steps count from 0: there is no step {asked.from_step}")
    if asked.chip is not None and asked.how not in _OF_A_CHIP:
        raise ControlMistake(
            f"{asked.how} is of no single chip: --chip goes with {', '.join(_OF_A_CHIP)}"
        )


def _place(service: Service, asked: Breakage) -> _Place:
    try:
        subject = service.find(asked.target)
    except ControlMistake:
        if service.fleet.machines.chips(asked.target) is None:
            raise
        if asked.host is not None:
            raise ControlMistake(
                f"{asked.target} is one machine: leave out --host {asked.host}"
            ) from None
        return _on(service, asked.target)
    nodes = [subject] if isinstance(subject, Node) else service.fleet.nodes_under(subject)
    hosts = [(node, number) for node in nodes for number in range(len(node.hosts))]
    if not hosts:
        raise ControlMistake(f"{asked.target} has no hosts now: it is {subject.state}")
    host = asked.host or 0
    if not 0 <= host < len(hosts):
        raise ControlMistake(f"{asked.target} has the hosts 0 to {len(hosts) - 1}, not {host}")
    node, number = hosts[host]
    return _Place(node.machines[number], node, number)


def _on(service: Service, machine: str) -> _Place:
    for node in service.fleet.nodes.values():
        if machine in node.machines:
            return _Place(machine, node, node.machines.index(machine))
    return _Place(machine)


def _chip(service: Service, place: _Place, asked: Breakage) -> int | None:
    """The chip that is meant, the first unless another is named; None if no chip is."""
    if asked.how not in _OF_A_CHIP:
        return None
    chips = service.fleet.machines.chips(place.machine) or 0
    chip = asked.chip or 0
    if not 0 <= chip < chips:
        has = "only the chip 0" if chips == 1 else f"the chips 0 to {chips - 1}"
        raise ControlMistake(f"{place.machine} has {has}, not {chip}")
    if chip in service.machines.faults(place.machine).missing:
        raise ControlMistake(
            f"chip {chip} of {place.machine} is missing already; --how {HEAL} brings it back"
        )
    return chip


def _broken(
    before: MachineFaults, machine: str, asked: Breakage, chip: int | None
) -> MachineFaults:
    """The faults of the machine from now on."""
    match asked.how:
        case "slow":
            return replace(before, slow=True)
        case "vfio":
            return replace(before, vfio=True)
        case "missing-chip" if chip is not None:
            return replace(before, missing=before.missing | {chip})
        case how if chip is not None:
            seed = zlib.crc32(machine.encode())
            return replace(before, chip=ChipFault(how, chip, asked.from_step or 0, seed))
        case _:
            return SOUND


async def _order(service: Service, place: _Place, what: str | MachineFaults) -> bool:
    """Tell the host, if there is one, and wait until it has done so."""
    if place.node is None or place.index is None:
        return False
    return await service.hosts.order(place.node, place.index, what)
