"""The catalogue of chips with the sources of its figures, and the device kinds of JAX.

Figures are per chip, never per core. Memory sizes are powers of ten, as in the sources, which
underestimates them: Google's "32 GB" is 32 GiB.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from drumline.chips.names import UnknownName, nearest

SCALING_BOOK = "How to Scale Your Model, chapter 2 (TPUs) and chapter 12 (GPUs)"
TPU_DOCS = "Cloud TPU documentation, system architecture pages, read 2026-11"
NVIDIA = "NVIDIA datasheet of the chip, dense figures without sparsity"
NVIDIA_SERVERS = (
    "NVIDIA datasheets of DGX-1, DGX A100, H100, H200 and B200: 4 × 100, 8 × 200 and 8 × 400 Gb/s"
)
JAX_TABLE = "JAX, the table of TPUs for kernels (jax/_src/pallas/mosaic/tpu_info.py)"
JAX_SLIDES = "Introduction to TPU & JAX, the tables of chips"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator chip. An unpublished figure is None."""

    name: str
    kind: str
    """`tpu` or `gpu`."""
    year: int
    peak_bf16_flops: float
    """Dense operations per second with float32 accumulation."""
    peak_int8_flops: float | None
    """Dense operations per second in int8. None if its matrix unit has no int8."""
    peak_fp8_flops: float | None
    """Dense operations per second in fp8. None if its matrix unit has no fp8."""
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    """Unidirectional bytes per second of an ICI link, or of a GPU's whole NVLink or PCIe."""
    torus_dimensions: int | None
    cores: int | None
    """The number of TensorCores of a TPU, or of streaming multiprocessors of a GPU."""
    dcn_bandwidth: float | None
    """Bytes per second per chip to the data-centre network, or of a GPU to other nodes."""
    sources: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def peak_8bit_flops(self) -> float | None:
        """The faster of int8 and fp8, the only 8-bit figure of earlier versions."""
        peaks = (self.peak_int8_flops, self.peak_fp8_flops)
        return max((peak for peak in peaks if peak is not None), default=None)

    def peak_flops(self, dtype: str) -> float:
        """Return the peak of matmuls of an XLA type such as `bf16`, `s8` or `f8e4m3fn`.

        Types without a unit of their own are converted to bfloat16. int4 counts as int8.
        """
        peak = None
        if dtype in ("s8", "u8", "s4", "u4"):
            peak = self.peak_int8_flops
        elif dtype.startswith("f8"):
            peak = self.peak_fp8_flops
        return peak or self.peak_bf16_flops

    def source_of(self, figure: str) -> str:
        """Return the source of a figure, given its field name."""
        return self.sources[figure]


_FIGURES = frozenset(f.name for f in fields(Chip)) - {"name", "kind", "sources", "notes"}


def _from(source: str, **exceptions: str) -> Mapping[str, str]:
    """Return a table of sources: `source`, except for the figures in `exceptions`."""
    return MappingProxyType(dict.fromkeys(_FIGURES, source) | exceptions)


# fmt: off
_CHIPS: tuple[Chip, ...] = (
    Chip(
        name="v2", kind="tpu", year=2018, cores=2, torus_dimensions=2,
        peak_bf16_flops=4.6e13, peak_int8_flops=None, peak_fp8_flops=None,
        hbm_bytes=16e9, hbm_bandwidth=7.2e11,
        link_bandwidth=6e10, dcn_bandwidth=None,
        sources=_from(
            SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_int8_flops=JAX_TABLE,
            peak_fp8_flops=JAX_TABLE,
        ),
        notes=("the slides print 8 GB, one core's share, beside the chip's 45 TFLOP/s",),
    ),
    Chip(
        name="v3", kind="tpu", year=2020, cores=2, torus_dimensions=2,
        peak_bf16_flops=1.23e14, peak_int8_flops=None, peak_fp8_flops=None,
        hbm_bytes=32e9, hbm_bandwidth=9e11,
        link_bandwidth=1e11, dcn_bandwidth=None,
        sources=_from(
            SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_bf16_flops=TPU_DOCS,
            peak_int8_flops=JAX_TABLE, peak_fp8_flops=JAX_TABLE,
        ),
        notes=(
            "the slides' second table prints 16 GB, one core's share",
            "the book prints 1.4e14 FLOP/s; Google's page prints 123 TFLOP/s, which is used here",
        ),
    ),
    Chip(
        name="v4", kind="tpu", year=2022, cores=2, torus_dimensions=3,
        peak_bf16_flops=2.75e14, peak_int8_flops=2.75e14, peak_fp8_flops=None,
        hbm_bytes=32e9, hbm_bandwidth=1.2e12,
        link_bandwidth=4.5e10, dcn_bandwidth=6.25e9,
        sources=_from(SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_fp8_flops=JAX_TABLE),
    ),
    Chip(
        name="v5e", kind="tpu", year=2023, cores=1, torus_dimensions=2,
        peak_bf16_flops=1.97e14, peak_int8_flops=3.94e14, peak_fp8_flops=None,
        hbm_bytes=16e9, hbm_bandwidth=8.2e11,
        link_bandwidth=4.5e10, dcn_bandwidth=3.125e9,
        sources=_from(SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_fp8_flops=JAX_TABLE),
    ),
    Chip(
        name="v5p", kind="tpu", year=2023, cores=2, torus_dimensions=3,
        peak_bf16_flops=4.59e14, peak_int8_flops=9.18e14, peak_fp8_flops=4.59e14,
        hbm_bytes=96e9, hbm_bandwidth=2.8e12,
        link_bandwidth=9e10, dcn_bandwidth=6.25e9,
        sources=_from(SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_fp8_flops=TPU_DOCS),
    ),
    Chip(
        name="v6e", kind="tpu", year=2024, cores=1, torus_dimensions=2,
        peak_bf16_flops=9.2e14, peak_int8_flops=1.84e15, peak_fp8_flops=9.2e14,
        hbm_bytes=32e9, hbm_bandwidth=1.6e12,
        link_bandwidth=9e10, dcn_bandwidth=1.25e10,
        sources=_from(SCALING_BOOK, year=JAX_SLIDES, cores=TPU_DOCS, peak_fp8_flops=TPU_DOCS),
        notes=("Google's pages print 918 TFLOP/s in bf16 and fp8, and 1,836 in int8",),
    ),
    Chip(
        name="7x", kind="tpu", year=2025, cores=2, torus_dimensions=3,
        peak_bf16_flops=2.3e15, peak_int8_flops=None, peak_fp8_flops=4.61e15,
        hbm_bytes=192e9, hbm_bandwidth=7.4e12,
        link_bandwidth=9e10, dcn_bandwidth=1.25e10,
        sources=_from(
            SCALING_BOOK, year=TPU_DOCS, cores=TPU_DOCS, peak_int8_flops=JAX_TABLE,
            peak_fp8_flops=TPU_DOCS,
        ),
        notes=(
            "available through GKE, not through the Cloud TPU API",
            "Google prints 2,307 TFLOP/s in bf16, 4,614 in fp8, and no figure for int8",
        ),
    ),
    Chip(
        name="V100", kind="gpu", year=2017, cores=80, torus_dimensions=None,
        peak_bf16_flops=1.25e14, peak_int8_flops=None, peak_fp8_flops=None,
        hbm_bytes=16e9, hbm_bandwidth=9e11,
        link_bandwidth=1.5e11, dcn_bandwidth=6.25e9,
        sources=_from(NVIDIA, dcn_bandwidth=NVIDIA_SERVERS),
        notes=("its tensor cores compute in float16, not bfloat16: the figure is for float16",),
    ),
    Chip(
        name="A100", kind="gpu", year=2020, cores=108, torus_dimensions=None,
        peak_bf16_flops=3.12e14, peak_int8_flops=6.24e14, peak_fp8_flops=None,
        hbm_bytes=40e9, hbm_bandwidth=1.555e12,
        link_bandwidth=3e11, dcn_bandwidth=2.5e10,
        sources=_from(NVIDIA, dcn_bandwidth=NVIDIA_SERVERS),
        notes=("the 40 GB model, as in the slides",),
    ),
    Chip(
        name="L40", kind="gpu", year=2022, cores=142, torus_dimensions=None,
        peak_bf16_flops=1.82e14, peak_int8_flops=3.62e14, peak_fp8_flops=3.62e14,
        hbm_bytes=48e9, hbm_bandwidth=8.64e11,
        link_bandwidth=3.2e10, dcn_bandwidth=None,
        sources=_from(NVIDIA, peak_bf16_flops=JAX_SLIDES),
        notes=("no NVLink: the link is PCIe 4.0 ×16; its memory is GDDR6",),
    ),
    Chip(
        name="H100", kind="gpu", year=2022, cores=132, torus_dimensions=None,
        peak_bf16_flops=9.9e14, peak_int8_flops=1.98e15, peak_fp8_flops=1.98e15,
        hbm_bytes=80e9, hbm_bandwidth=3.35e12,
        link_bandwidth=4.5e11, dcn_bandwidth=5e10,
        sources=_from(SCALING_BOOK, year=NVIDIA, cores=NVIDIA, dcn_bandwidth=NVIDIA_SERVERS),
    ),
    Chip(
        name="H200", kind="gpu", year=2024, cores=132, torus_dimensions=None,
        peak_bf16_flops=9.9e14, peak_int8_flops=1.98e15, peak_fp8_flops=1.98e15,
        hbm_bytes=141e9, hbm_bandwidth=4.8e12,
        link_bandwidth=4.5e11, dcn_bandwidth=5e10,
        sources=_from(SCALING_BOOK, year=NVIDIA, cores=NVIDIA, dcn_bandwidth=NVIDIA_SERVERS),
        notes=("measured on one: 7.9e14 FLOP/s on an 8192³ bf16 matmul, 4.3e12 B/s on a copy",),
    ),
    Chip(
        name="B100", kind="gpu", year=2024, cores=None, torus_dimensions=None,
        peak_bf16_flops=1.8e15, peak_int8_flops=3.5e15, peak_fp8_flops=3.5e15,
        hbm_bytes=192e9, hbm_bandwidth=8e12,
        link_bandwidth=9e11, dcn_bandwidth=5e10,
        sources=_from(
            NVIDIA, peak_bf16_flops=JAX_SLIDES, hbm_bytes=JAX_SLIDES, dcn_bandwidth=NVIDIA_SERVERS,
        ),
        notes=(
            "the slides print 655 % of an A100; their own figures give 577 %",
            "the network is that of the B200's servers",
        ),
    ),
    Chip(
        name="B200", kind="gpu", year=2024, cores=148, torus_dimensions=None,
        peak_bf16_flops=2.3e15, peak_int8_flops=4.5e15, peak_fp8_flops=4.5e15,
        hbm_bytes=192e9, hbm_bandwidth=8e12,
        link_bandwidth=9e11, dcn_bandwidth=5e10,
        sources=_from(
            SCALING_BOOK, year=NVIDIA, cores=NVIDIA, peak_int8_flops=NVIDIA, peak_fp8_flops=NVIDIA,
            dcn_bandwidth=NVIDIA_SERVERS,
        ),
    ),
)
# fmt: on

_BY_NAME = {chip.name.casefold(): chip for chip in _CHIPS}
_ALIASES = {
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "trillium": "v6e",
    "tpu7x": "7x",
    "v7x": "7x",
    "ironwood": "7x",
}


def chips() -> tuple[Chip, ...]:
    """Return all chips by descending bf16 peak, then int8 peak, then memory bandwidth."""

    def speed(chip: Chip) -> tuple[float, float, float]:
        return chip.peak_bf16_flops, chip.peak_int8_flops or 0.0, chip.hbm_bandwidth

    return tuple(sorted(_CHIPS, key=speed, reverse=True))


def chip(name: str) -> Chip:
    """Return a chip by name. Case, surrounding space and a leading `TPU` do not matter."""
    folded = name.strip().casefold().removeprefix("tpu ").removeprefix("tpu-")
    folded = _ALIASES.get(folded, folded)
    if folded in _BY_NAME:
        return _BY_NAME[folded]
    names = [chip.name for chip in _CHIPS]
    if not folded:
        raise UnknownName(f"the name of the chip is empty; the chips are {', '.join(names)}")
    matches = nearest(folded, [*names, *_ALIASES])
    hint = f"nearest: {', '.join(matches)}" if matches else f"the chips are {', '.join(names)}"
    raise UnknownName(f"{name!r} is not a known chip; {hint}")


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
"""Chip and number of JAX devices per chip, by the TPU device kind in JAX."""
_GPU = re.compile(rf"\b({'|'.join(chip.name for chip in _CHIPS if chip.kind == 'gpu')})\b")


@dataclass(frozen=True)
class DeviceKind:
    """A kind of JAX device, which is a chip or a core of a chip."""

    chip: Chip
    devices_per_chip: int = 1


def device_kind(name: str) -> DeviceKind | None:
    """Look up `device.device_kind`. Return None if it is not in the catalogue, such as a CPU."""
    if name in TPUS:
        generation, devices_per_chip = TPUS[name]
        return DeviceKind(chip(generation), devices_per_chip)
    gpu = _GPU.search(name)
    return DeviceKind(chip(gpu[1])) if gpu else None
