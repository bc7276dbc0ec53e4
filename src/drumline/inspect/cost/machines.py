"""Machines that a program can be estimated for, and the constants of their chips.

A name such as `v5litepod-8`, `2xv6e-256` (two slices on the data-centre network), `H200` or
`8xH200` selects a machine. A device is a chip. On v2, v3 and 7x it is a core, because JAX has two
devices per chip there. More than eight GPUs are nodes of eight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from drumline.chips import Chip, Slice, UnknownName, chip, slice_of
from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.formatting import format_count

_CORES_ARE_DEVICES = {"v2", "v3", "7x"}


@dataclass(frozen=True, kw_only=True)
class ChipConstants:
    """The efficiency and latencies of a kind of chip.

    Peaks and bandwidths are in `drumline.chips`. Sources of the TPU values:

    - matmul_efficiency, attention_speed: fitted on two published steps, Llama 3.1 8B on v6e-8 and
      v6e-64.
    - hbm_efficiency, unhidden_fraction, operation_seconds: the TPU compiler's estimated cycles of
      large and small matmuls on v5e and v5p.
    - link_efficiency, hop_seconds, collective_seconds: "How to Scale Your Model", measured on v5e
      over an axis of 4: 680 µs for 34 MB and 8 µs for 128 kB.
    - the others: the architecture, that is the sides of the MXU and clocks from peak FLOP/s.

    All GPU values were measured on one H200: matmuls of 2048³ and 8192³, a copy, cuDNN's attention.
    """

    matmul_efficiency: float
    """The fraction of the peak that large matmuls reach."""
    float32_speed: float
    """The speed of float32 matmuls at default precision, relative to bfloat16."""
    attention_speed: float
    """The speed of a library's fused attention, relative to plain matmuls."""
    hbm_efficiency: float
    """The fraction of the memory bandwidth that streams reach."""
    unhidden_fraction: float
    """The fraction of the shorter of compute and loads that does not overlap with the longer."""
    tile: int
    """The side of the matrix unit. Two dimensions of a matmul are padded to it."""
    row_tile: int
    """The multiple that the third dimension is padded to."""
    vector_flops: float
    """Elementwise operations per second and chip."""
    operation_seconds: float
    """The start-up time of an operation."""
    link_efficiency: float
    """The fraction of the link bandwidth that collectives reach."""
    hop_seconds: float
    """The latency of a hop between neighbours."""
    collective_seconds: float
    """The start-up time of a collective."""
    on_chip_bytes: float
    """The on-chip memory (VMEM, or a GPU's L2). Values that fit are read at no cost."""
    clock_hz: float | None = None
    """The clock of the TPU compiler's cycle estimates."""


def _tpu_constants(
    tile: int,
    clock_hz: float,
    vector_lanes: int,
    vmem_bytes: float,
    matmul_efficiency: float = 0.98,
) -> ChipConstants:
    return ChipConstants(
        matmul_efficiency=matmul_efficiency,
        float32_speed=1.0,  # by default, TPUs round the operands to bfloat16
        attention_speed=1.0,
        hbm_efficiency=0.92,
        unhidden_fraction=0.25,
        tile=tile,
        row_tile=8,
        vector_flops=vector_lanes * clock_hz,
        operation_seconds=0.3e-6,
        link_efficiency=0.9,
        hop_seconds=1e-6,
        collective_seconds=3e-6,
        on_chip_bytes=vmem_bytes,
        clock_hz=clock_hz,
    )


# Vector lanes per core: 8 sublanes × 128 lanes × 4 units.
_TPU_CONSTANTS = {
    "v2": _tpu_constants(128, 0.70e9, 2 * 4096, 16e6),
    "v3": _tpu_constants(128, 0.94e9, 2 * 4096, 16e6),
    "v4": _tpu_constants(128, 1.05e9, 2 * 4096, 32e6),
    "v5e": _tpu_constants(128, 1.50e9, 4096, 128e6),
    "v5p": _tpu_constants(128, 1.75e9, 2 * 4096, 64e6),
    "v6e": _tpu_constants(256, 1.75e9, 8192, 128e6, matmul_efficiency=0.81),
    "7x": _tpu_constants(256, 2.20e9, 2 * 8192, 128e6),
}
_GPU_CONSTANTS = ChipConstants(
    matmul_efficiency=0.76,
    float32_speed=0.5,  # by default, GPUs round the operands to TF32
    attention_speed=0.55,
    hbm_efficiency=0.72,
    unhidden_fraction=0.25,
    tile=128,
    row_tile=64,
    vector_flops=6.0e13,
    operation_seconds=2.5e-6,
    link_efficiency=0.8,
    hop_seconds=2e-6,
    collective_seconds=1e-5,
    on_chip_bytes=0.0,
)


GPUS_PER_NODE = 8
"""The GPUs that NVLink connects, as in NVIDIA's HGX and DGX servers."""


def chip_constants(chip_name: str) -> ChipConstants:
    """Return the constants of a chip. All GPUs share one row."""
    return _TPU_CONSTANTS.get(chip_name, _GPU_CONSTANTS)


@dataclass(frozen=True)
class TorusDimension:
    """A row of devices with links between neighbours, closed to a ring if it wraps."""

    length: int
    wraps: bool


@dataclass(frozen=True)
class Machine:
    """A set of equal devices and their network."""

    name: str
    chip: Chip
    constants: ChipConstants
    slice: Slice | None
    """The type of its slices. None for GPUs."""
    slices: int
    """The number of slices, or of the nodes of GPUs."""
    chips: int
    """The number of chips in all slices."""
    torus: tuple[TorusDimension, ...]
    """The torus of a slice. Empty for GPUs, which a switch connects in each node."""
    devices_per_chip: int = 1
    """The devices that share a chip, its memory and its links."""

    @property
    def devices(self) -> int:
        """The number of devices in JAX."""
        return self.chips * self.devices_per_chip

    @property
    def peak_flops(self) -> float:
        """The bfloat16 peak of a device, in FLOP/s."""
        return self.chip.peak_bf16_flops / self.devices_per_chip

    @property
    def memory_bandwidth(self) -> float:
        """The memory bandwidth of a device, in bytes per second."""
        return self.chip.hbm_bandwidth / self.devices_per_chip

    @property
    def memory_bytes(self) -> float:
        """The memory of a device."""
        return self.chip.hbm_bytes / self.devices_per_chip

    @property
    def link_bandwidth(self) -> float:
        """A device's share of a link, in bytes per second and direction."""
        return self.chip.link_bandwidth / self.devices_per_chip * self.constants.link_efficiency

    @property
    def dcn_bandwidth(self) -> float:
        """A device's bandwidth to other slices or nodes, in bytes per second."""
        # The slowest published value stands for chips without one: v2, v3 and L40.
        chip_bandwidth = self.chip.dcn_bandwidth or 3.125e9
        return chip_bandwidth / self.devices_per_chip * self.constants.link_efficiency


def parse_machine(name: str) -> Machine:
    """Return the machine of a name such as `2xv6e-256`.

    Raises:
        UnknownName: no slice and no GPU has the name.
    """
    match = None
    if isinstance(name, str):
        match = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x×]\s*)?(\S+)\s*", name)
    if match is None:
        raise UnknownName(f"{name!r} is not a slice; a slice looks like v5litepod-8 or 2xv6e-256")
    count, kind = int(match[1] or 1), match[2]
    if count < 1:
        raise UnknownName(f"{name!r}: the number of slices must be 1 or more")
    try:
        slice_type = slice_of(kind)
    except UnknownName:
        try:
            gpu = chip(kind)
        except UnknownName:
            gpu = None
        if gpu is None or gpu.kind != "gpu":
            raise
        nodes = max(1, count // GPUS_PER_NODE)
        if count > GPUS_PER_NODE and count % GPUS_PER_NODE:
            sizes = f"{nodes * GPUS_PER_NODE}x{kind} or {(nodes + 1) * GPUS_PER_NODE}x{kind}"
            raise UnknownName(
                f"{name!r}: larger machines are nodes of {GPUS_PER_NODE} GPUs; use {sizes}"
            ) from None
        return Machine(name.strip(), gpu, chip_constants(gpu.name), None, nodes, count, ())
    return Machine(
        name=slice_type.name if count == 1 else f"{count}x{slice_type.name}",
        chip=slice_type.chip,
        constants=chip_constants(slice_type.generation),
        slice=slice_type,
        slices=count,
        chips=count * slice_type.chips,
        torus=tuple(TorusDimension(axis.length, axis.wraps) for axis in slice_type.mesh_axes()),
        devices_per_chip=2 if slice_type.generation in _CORES_ARE_DEVICES else 1,
    )


def match_devices(machine: Machine, mesh: MeshAxes, device_count: int) -> Machine:
    """Return the machine with the number of devices per chip that the program assumes.

    Raises:
        UserError: the program has more or fewer devices than the machine.
    """
    for per_chip in dict.fromkeys((machine.devices_per_chip, 1, machine.chip.cores or 1)):
        if machine.chip.kind == "tpu" and device_count == machine.chips * per_chip:
            return replace(machine, devices_per_chip=per_chip)
    if device_count == machine.devices:
        return machine
    subject = f"the mesh {format_mesh(mesh)}" if mesh else "the program"
    raise UserError(
        f"{subject} has {format_count(device_count, 'device')} and {machine.name} has "
        f"{machine.devices:,}: change the mesh, or name another slice"
    )
