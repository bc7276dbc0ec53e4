"""Are all devices there, and each at a place of its own. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from drumline.health.report import FAIL, CheckOutcome


@dataclass(frozen=True)
class Device:
    """What JAX says of a device."""

    id: int
    host: int
    kind: str
    platform: str
    place: tuple[int, ...] | None
    """Its coordinates in the torus, and its core; None where it does not say."""


def described(device: Any) -> Device:
    """What matters here of a JAX device."""
    coords = getattr(device, "coords", None)
    core = int(getattr(device, "core_on_chip", 0) or 0)
    return Device(
        device.id,
        device.process_index,
        device.device_kind,
        device.platform,
        None if coords is None else (*map(int, coords), core),
    )


def own_numbers(devices: Sequence[Any]) -> list[int]:
    """The numbers by which a host knows its own devices; none where it has none."""
    numbers = [getattr(device, "local_hardware_id", None) for device in devices]
    return [number for number in numbers if number is not None]


def check_devices(
    devices: Sequence[Device], numbers: Sequence[Sequence[int]], expected: int | None
) -> dict[int, CheckOutcome]:
    """The verdict on each host's devices.

    Args:
        devices: those of all hosts.
        numbers: for each host the numbers of its own devices.
        expected: how many each host should have; None where nobody says, and then as many as the
            others have.
    """
    counts = Counter(device.host for device in devices)
    wanted = expected or max(counts.values())
    places = Counter(device.place for device in devices)
    outcomes = {}
    for host in range(len(numbers)):
        mine = [device for device in devices if device.host == host]
        twice = [device.id for device in mine if device.place and places[device.place] > 1]
        if counts[host] < wanted:
            said = f"{counts[host]} of {wanted} devices{_missing(numbers[host], wanted)}"
            outcomes[host] = CheckOutcome(FAIL, said)
        elif twice:
            said = f"device {', '.join(map(str, twice))} is where another is"
            outcomes[host] = CheckOutcome(FAIL, said)
        else:
            outcomes[host] = CheckOutcome(said=f"{counts[host]} devices")
    hole = _hole(devices)
    if hole and all(outcome.verdict != FAIL for outcome in outcomes.values()):
        outcomes[min(outcomes)] = CheckOutcome(FAIL, hole)
    return outcomes


def _missing(numbers: Sequence[int], wanted: int) -> str:
    """Which it is, where the others' numbers leave a gap."""
    if not numbers or len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(wanted)):
        return ""
    missing = [str(number) for number in range(wanted) if number not in numbers]
    return f": chip {', '.join(missing)} is missing" if missing else ""


def _hole(devices: Sequence[Device]) -> str:
    """Whether the devices of several hosts leave a place of their box empty; hosts fill boxes."""
    places = {device.place for device in devices if device.place}
    if len(places) != len(devices):
        return ""
    box = [len(set(along)) for along in zip(*places, strict=True)]
    if prod(box) == len(places):
        return ""
    shape = " × ".join(map(str, box[:-1]))
    return f"{len(places)} devices do not fill their box of {shape} chips"
