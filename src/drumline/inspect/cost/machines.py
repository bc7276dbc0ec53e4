"""The constants of the cost model, one table, each with where it comes from.

Peaks and bandwidths are the chips' own (`drumline.chips`). What stands here is how much of them a
program gets, and the times that no bandwidth explains.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from drumline.chips import Chip, Slice, UnknownName, chip, slice_of
from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.formatting import plural

BOOK = "How to Scale Your Model: measured on v5e, 34 MB 680 µs and 128 kB 8 µs over an axis of 4"
COMPILER = "the TPU compiler's estimated cycles of products large and small, v5e and v5p"
STEPS = "fitted on two published steps: Llama 3.1 8B on v6e-8 and v6e-64"
MEASURED = "measured on one H200: products of 2048³ and 8192³, a copy, cuDNN's attention"
DATASHEET = "architecture: MXU sides, clocks from peak FLOP/s"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How a kind of chip falls short of its peaks."""

    matmul: float
    """The part of the peak that large products reach."""
    float32: float
    """The speed of products of float32 at the default precision, relative to bfloat16."""
    attention: float
    """The speed of a library's fused attention, relative to plain products."""
    hbm: float
    """The part of the memory's bandwidth that streams reach."""
    unhidden: float
    """The part of the shorter of computing and loading that the longer does not hide."""
    tile: int
    """The side of the unit that multiplies: dimensions are padded to it."""
    rows: int
    """What the third dimension is padded to."""
    vector_flops: float
    """Elementwise operations per second and chip."""
    operation: float
    """Seconds that starting one operation takes."""
    link: float
    """The part of a link's bandwidth that collectives reach."""
    hop: float
    """Seconds for one hop between neighbours."""
    collective: float
    """Seconds that starting a collective takes."""
    on_chip: float
    """Bytes of memory on the chip (VMEM, or a GPU's L2) that a value is read from at no cost."""
    clock: float | None = None
    """Cycles per second, to read the TPU compiler's estimates with."""
    sources: dict[str, str] = field(default_factory=dict, repr=False)


_TPU_SOURCES = {
    "matmul": STEPS,
    "float32": DATASHEET,
    "attention": STEPS,
    "hbm": COMPILER,
    "unhidden": COMPILER,
    "tile": DATASHEET,
    "rows": DATASHEET,
    "vector_flops": DATASHEET,
    "operation": COMPILER,
    "link": BOOK,
    "hop": BOOK,
    "collective": BOOK,
    "on_chip": DATASHEET,
    "clock": DATASHEET,
}
_GPU_SOURCES = dict.fromkeys(_TPU_SOURCES, MEASURED)


def _tpu(
    tile: int, clock: float, vector_lanes: int, vmem: float, matmul: float = 0.98
) -> Constants:
    return Constants(
        matmul=matmul,
        float32=1.0,  # by default, TPUs round the operands to bfloat16
        attention=1.0,
        hbm=0.92,
        unhidden=0.25,
        tile=tile,
        rows=8,
        vector_flops=vector_lanes * clock,
        operation=0.3e-6,
        link=0.9,
        hop=1e-6,
        collective=3e-6,
        on_chip=vmem,
        clock=clock,
        sources=_TPU_SOURCES,
    )


# Vector lanes: 8 sublanes × 128 lanes × 4 units, for each core.
_TABLE = {
    "v2": _tpu(128, 0.70e9, 2 * 4096, 16e6),
    "v3": _tpu(128, 0.94e9, 2 * 4096, 16e6),
    "v4": _tpu(128, 1.05e9, 2 * 4096, 32e6),
    "v5e": _tpu(128, 1.50e9, 4096, 128e6),
    "v5p": _tpu(128, 1.75e9, 2 * 4096, 64e6),
    "v6e": _tpu(256, 1.75e9, 8192, 128e6, matmul=0.81),
    "7x": _tpu(256, 2.20e9, 2 * 8192, 128e6),
}
_GPU = Constants(
    matmul=0.76,
    float32=0.5,  # by default, GPUs round the operands to TF32
    attention=0.55,
    hbm=0.72,
    unhidden=0.25,
    tile=128,
    rows=64,
    vector_flops=6.0e13,
    operation=2.5e-6,
    link=0.8,
    hop=2e-6,
    collective=1e-5,
    on_chip=0.0,
    sources=_GPU_SOURCES,
)


def constants_of(chip: str) -> Constants:
    """The constants of the chip of that name; GPUs share one row."""
    return _TABLE.get(chip, _GPU)


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
