"""The constants of the cost model, one table, each with where it comes from.

Peaks and bandwidths are the chips' own (`drumline.chips`). What stands here is how much of them a
program gets, and the times that no bandwidth explains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
