"""From what JAX calls a device to the chip of the catalogue."""

import re
from dataclasses import dataclass

from drumline.chips.catalogue import Chip, chip, chips

TPUS = {
    "TPU v2": ("v2", 2),
    "TPU v3": ("v3", 2),
    "TPU v4": ("v4", 1),
    "TPU v5 lite": ("v5e", 1),
    "TPU v5e": ("v5e", 1),
    "TPU v5": ("v5p", 1),
    "TPU v5p": ("v5p", 1),
    "TPU v6 lite": ("v6e", 1),
    "TPU v6e": ("v6e", 1),
    "TPU7x": ("7x", 2),
}
"""Device kind as JAX tells it → chip, and how many JAX devices one chip is."""
_GPU = re.compile(rf"\b({'|'.join(row.name for row in chips() if row.kind == 'gpu')})\b")


@dataclass(frozen=True)
class DeviceKind:
    """A JAX device: a chip, or one of the devices that a chip is."""

    chip: Chip
    devices_per_chip: int = 1


def device_kind(name: str) -> DeviceKind | None:
    """What `device.device_kind` names; None for one that the catalogue lacks, as a CPU."""
    if name in TPUS:
        generation, devices = TPUS[name]
        return DeviceKind(chip(generation), devices)
    gpu = _GPU.search(name)
    return DeviceKind(chip(gpu[1])) if gpu else None
