"""The `break` control: faults of a host and of its physical machine.

A fault of a host (it hangs or reboots) does not affect the next host on the machine. A fault of a
machine stays: every later node that gets the machine has it, until the machine is healed.
"""

import zlib
from dataclasses import dataclass, replace

from drumline.cloud.emulator.host_messages import NO_FAULTS, ChipFault, MachineFaults
from drumline.cloud.emulator.service import Service
from drumline.cloud.model.errors import Json
from drumline.cloud.model.resources import Node
from drumline.errors import UserError

_CHIP_FAULTS = ("lies", "nan", "bad-link", "missing-chip")
_STEP_FAULTS = ("lies", "nan")
_HOST_FAULTS = ("silent", "reboot")
FAULTS = (*_CHIP_FAULTS, "slow", "vfio", *_HOST_FAULTS)
HEAL = "heal"


@dataclass(frozen=True)
class BreakRequest:
    """The arguments of `break`. None means that the user has not set it."""

    target: str
    """A job, node or request, of which `host` is broken; or a machine."""
    how: str
    host: int | None = None
    from_step: int | None = None
    chip: int | None = None


@dataclass(frozen=True)
class _Target:
    """A machine, and its current host if a node has the machine."""

    machine: str
    node: Node | None = None
    index: int | None = None


async def break_host(service: Service, request: BreakRequest) -> Json:
    """Break or heal a host or its machine. Return its name and the fault as JSON."""
    _check(request)
    target = _find_target(service, request)
    chip = _chip(service, target, request)
    if request.how in _HOST_FAULTS:
        if not await _send_to_host(service, target, request.how):
            raise UserError(f"no host runs on {target.machine} now, so there is none to break")
    else:
        faults = _faults_after(
            service.machines.faults(target.machine), target.machine, request, chip
        )
        service.machines.set_faults(target.machine, faults)
        await _send_to_host(service, target, faults)
        if request.how == HEAL:
            await _send_to_host(service, target, HEAL)
    return {
        "node": target.node and target.node.spec.name.rpartition("/")[2],
        "host": target.index,
        "machine": target.machine,
        "how": request.how,
        "chip": chip,
        "from_step": (request.from_step or 0) if request.how in _STEP_FAULTS else None,
    }


def broken_machines(service: Service) -> list[Json]:
    """Return every machine with faults, and its current host, as JSON."""
    listed: list[Json] = []
    for machine, faults in sorted(service.machines.broken.items()):
        target = _machine_target(service, machine)
        node = target.node and target.node.spec.name.rpartition("/")[2]
        listed.append(
            {"name": machine, "node": node, "host": target.index, "faults": faults.listing()}
        )
    return listed


def _check(request: BreakRequest) -> None:
    """Raise UserError for arguments that do not fit the fault."""
    if request.how not in (*FAULTS, HEAL):
        raise UserError(f"a host breaks by {', '.join(FAULTS)}, and heals; not by {request.how!r}")
    if request.from_step is not None and request.how not in _STEP_FAULTS:
        raise UserError(
            f"{request.how} starts at once: --from-step goes with {' and '.join(_STEP_FAULTS)}"
        )
    if request.from_step is not None and request.from_step < 0:
        raise UserError(f"steps count from 0: there is no step {request.from_step}")
    if request.chip is not None and request.how not in _CHIP_FAULTS:
        raise UserError(
            f"{request.how} is not a fault of one chip: --chip goes with {', '.join(_CHIP_FAULTS)}"
        )


def _find_target(service: Service, request: BreakRequest) -> _Target:
    try:
        subject = service.find(request.target)
    except UserError:
        if service.fleet.machines.chips(request.target) is None:
            raise
        if request.host is not None:
            raise UserError(
                f"{request.target} is one machine: leave out --host {request.host}"
            ) from None
        return _machine_target(service, request.target)
    nodes = [subject] if isinstance(subject, Node) else service.fleet.nodes_under(subject)
    hosts = [(node, index) for node in nodes for index in range(len(node.hosts))]
    if not hosts:
        raise UserError(f"{request.target} has no hosts now: it is {subject.state}")
    host = request.host or 0
    if not 0 <= host < len(hosts):
        raise UserError(f"{request.target} has the hosts 0 to {len(hosts) - 1}, not {host}")
    node, index = hosts[host]
    return _Target(node.machines[index], node, index)


def _machine_target(service: Service, machine: str) -> _Target:
    for node in service.fleet.nodes.values():
        if machine in node.machines:
            return _Target(machine, node, node.machines.index(machine))
    return _Target(machine)


def _chip(service: Service, target: _Target, request: BreakRequest) -> int | None:
    """Return the chip of the fault, by default the first, or None if the fault has none."""
    if request.how not in _CHIP_FAULTS:
        return None
    chips = service.fleet.machines.chips(target.machine) or 0
    chip = request.chip or 0
    if not 0 <= chip < chips:
        chip_range = "only the chip 0" if chips == 1 else f"the chips 0 to {chips - 1}"
        raise UserError(f"{target.machine} has {chip_range}, not {chip}")
    if chip in service.machines.faults(target.machine).missing:
        raise UserError(
            f"chip {chip} of {target.machine} is missing already; --how {HEAL} brings it back"
        )
    return chip


def _faults_after(
    faults: MachineFaults, machine: str, request: BreakRequest, chip: int | None
) -> MachineFaults:
    """Return the faults of the machine after `break`."""
    match request.how:
        case "slow":
            return replace(faults, slow=True)
        case "vfio":
            return replace(faults, vfio=True)
        case "missing-chip" if chip is not None:
            return replace(faults, missing=faults.missing | {chip})
        case how if chip is not None:
            seed = zlib.crc32(machine.encode())
            return replace(faults, chip=ChipFault(how, chip, request.from_step or 0, seed))
        case _:
            return NO_FAULTS


async def _send_to_host(service: Service, target: _Target, order: str | MachineFaults) -> bool:
    """Send an order to the host, if there is one, and wait until it is carried out."""
    if target.node is None or target.index is None:
        return False
    return await service.hosts.order(target.node, target.index, order)
