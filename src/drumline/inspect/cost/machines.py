"""The machine that a program is estimated for, as one device of the program sees it.

`v5litepod-8`, `2xv6e-256` for two slices joined by the data-centre network, `H200`, `8xH200`.
A device is a chip, but on v2, v3 and 7x a core, of which JAX shows two for each chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from drumline.chips import Chip, Slice, UnknownName, chip, slice_of
from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.cost.constants import Constants, constants_of
from drumline.inspect.views.words import plural

_CORES_ARE_DEVICES = {"v2", "v3", "7x"}


@dataclass(frozen=True)
class TorusLine:
    """Devices in a row, with a link between neighbours; a ring where the ends are joined."""

    length: int
    wraps: bool


@dataclass(frozen=True)
class Machine:
    """A number of equal devices, and how they are joined."""

    name: str
    chip: Chip
    constants: Constants
    slice: Slice | None
    """One of its slices; None for GPUs."""
    slices: int
    chips: int
    """Of all slices together."""
    torus: tuple[TorusLine, ...]
    """The dimensions of one slice's torus; empty for GPUs, which a switch joins."""
    per_chip: int = 1
    """Devices that share a chip, its memory and its links."""

    @property
    def devices(self) -> int:
        """The number of devices, as JAX counts them."""
        return self.chips * self.per_chip

    @property
    def peak_flops(self) -> float:
        """Of one device, in bfloat16."""
        return self.chip.peak_bf16_flops / self.per_chip

    @property
    def memory_bandwidth(self) -> float:
        """Of one device."""
        return self.chip.hbm_bandwidth / self.per_chip

    @property
    def memory(self) -> float:
        """Bytes of one device's memory."""
        return self.chip.hbm_bytes / self.per_chip

    @property
    def link(self) -> float:
        """Bytes per second one way, of one device's share of a link."""
        return self.chip.link_bandwidth / self.per_chip * self.constants.link

    @property
    def dcn(self) -> float:
        """Bytes per second to other slices, of one device."""
        # Where it is not published, the slowest that is.
        return (self.chip.dcn_bandwidth or 3.125e9) / self.per_chip * self.constants.link


def machine(name: str) -> Machine:
    """The machine of that name.

    Raises:
        UnknownName: no slice and no GPU is called so.
    """
    if not isinstance(name, str):
        raise UnknownName(f"{name!r} names no slice; one looks like v5litepod-8 or 2xv6e-256")
    found = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x×]\s*)?(\S+)\s*", name)
    if found is None:
        raise UnknownName(f"{name!r} names no slice; one looks like v5litepod-8 or 2xv6e-256")
    count, kind = int(found[1] or 1), found[2]
    if count < 1:
        raise UnknownName(f"{name!r}: the number of slices must be 1 or more")
    try:
        of_slice = slice_of(kind)
    except UnknownName:
        try:
            gpu = chip(kind)
        except UnknownName:
            gpu = None
        if gpu is None or gpu.kind != "gpu":
            raise
        constants = constants_of(gpu.name)
        return Machine(name.strip(), gpu, constants, None, 1, count, ())
    lines = tuple(TorusLine(axis.length, axis.wraps) for axis in of_slice.mesh_axes())
    return Machine(
        name=of_slice.name if count == 1 else f"{count}x{of_slice.name}",
        chip=of_slice.chip,
        constants=constants_of(of_slice.generation),
        slice=of_slice,
        slices=count,
        chips=count * of_slice.chips,
        torus=lines,
        per_chip=2 if of_slice.generation in _CORES_ARE_DEVICES else 1,
    )


def check_fits(target: Machine, mesh: Axes, devices: int) -> Machine:
    """The machine with as many devices to a chip as the program's mesh takes it to have.

    Raises:
        UserError: the mesh has more or fewer devices than the machine.
    """
    for per_chip in dict.fromkeys((target.per_chip, 1, target.chip.cores or 1)):
        if target.chip.kind == "tpu" and devices == target.chips * per_chip:
            return Machine(**{**target.__dict__, "per_chip": per_chip})
    if devices == target.devices:
        return target
    over = f"the mesh {shown(mesh)}" if mesh else "the program"
    raise UserError(
        f"{over} has {plural(devices, 'device')} and {target.name} has {target.devices:,}: change "
        "the mesh, or name another slice"
    )
