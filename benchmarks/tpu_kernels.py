"""Compile the fused kernels with the TPU's own compiler (Mosaic), without a TPU.

    python benchmarks/tpu_kernels.py [WORD …] [--on v5litepod-8]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). For each
program the benchmark prints the compile time or the error, the number of kernels (custom calls),
the VMEM of the largest kernel on a core, the temporaries in HBM, and `model` in microseconds. The
compiler gives no estimate for a custom call, so the model is Drumline's own. Each step takes the
longer of its matmuls, at the chip's peak, and of its concurrent transfers, at the bandwidth of a
link. The first blocks of the first matmul are read before it starts. The model was never compared
with a TPU. Only rows with names that contain all WORDs are compiled, which takes half a minute
each.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.chips import Slice, slice_of
from drumline.errors import UserError
from drumline.inspect.compiling.programs import InspectedProgram, compile_for
from drumline.inspect.cost.machines import parse_machine
from drumline.parallel import fused_allgather_matmul, fused_matmul_reducescatter
from drumline.parallel.fused.kernels import piece_count
from drumline.parallel.fused.ring import KernelRing

MIB = 1 << 20
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
"""The JAX names of the chips with one device each, because a slice's chips are counted here."""

FIRST_BLOCKS = 4 * MIB
"""Bytes of both operands that are read before the first multiplication."""


@dataclass(frozen=True)
class Size:
    """The rows shared by one ring, and the dimensions of the weights, in bfloat16."""

    name: str
    rows: int
    model: int
    hidden: int


SIZES = (Size("8B", 8192, 4096, 14336), Size("70B", 8192, 8192, 28672))


@dataclass(frozen=True)
class Case:
    """One function on a ring of a slice."""

    name: str
    size: Size
    mesh: AbstractMesh
    chips: Slice
    gathers: bool
    gradients: bool

    @property
    def ring(self) -> int:
        """The number of devices in the ring."""
        return int(self.mesh.shape["Y"])

    def program(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function on shards and the shapes of its arguments."""
        column_sharded, rows = P("X", "Y"), P(("X", "Y"), None)
        weights = P(None, "Y") if self.gathers else P("Y", None)
        fn = fused_allgather_matmul if self.gathers else fused_matmul_reducescatter
        specs = (rows, column_sharded) if self.gathers else (column_sharded, rows)
        run = jax.shard_map(
            partial(fn, axis_name="Y"),
            mesh=self.mesh,
            in_specs=(specs[0], weights),
            out_specs=specs[1],
        )
        size = self.size
        dimensions = (size.model, size.hidden) if self.gathers else (size.hidden, size.model)
        batch = size.rows * int(self.mesh.shape["X"])
        args = (self._shape(specs[0], batch, dimensions[0]), self._shape(weights, *dimensions))
        return (_gradients(run) if self.gradients else run), args

    def _shape(self, spec: P, *dimensions: int) -> Any:
        struct: Any = jax.ShapeDtypeStruct
        return struct(dimensions, jnp.bfloat16, sharding=NamedSharding(self.mesh, spec))

    def model(self) -> float:
        """Return the seconds predicted by the model in the docstring of this file."""
        chip, size, ring_size = self.chips.chip, self.size, self.ring
        ring_order = KernelRing("Y", ring_size, "both", ("X", "Y"))
        block_rows = size.rows // ring_size
        matmul_seconds = (
            2 * block_rows * size.model * size.hidden / ring_size / chip.peak_bf16_flops
        )
        permute_seconds = block_rows * size.model / chip.link_bandwidth
        gather = _gather_seconds(ring_order, matmul_seconds, 2 * permute_seconds)
        scatter = _scatter_seconds(
            ring_order, matmul_seconds, 4 * permute_seconds, piece_count(block_rows, 16)
        )
        first_read = FIRST_BLOCKS / chip.hbm_bandwidth
        forward = first_read + (gather if self.gathers else scatter)
        if not self.gradients:
            return forward
        # Gradients of the gather: a scatter, and a gather that sums. Of the scatter: a gather and a
        # matmul.
        backward = (
            scatter + gather + 2 * first_read
            if self.gathers
            else gather + ring_size * matmul_seconds + first_read
        )
        return forward + backward


def _gather_seconds(ring_order: KernelRing, matmul_seconds: float, permute_seconds: float) -> float:
    """Return the seconds of the local matmul and of each step's matmul or transfer."""
    direction_count = len(ring_order.directions)
    matmuls = [
        matmul_seconds,
        *[direction_count * matmul_seconds] * ring_order.hops,
        *[matmul_seconds] * ring_order.has_opposite,
    ]
    transfers = [
        *[permute_seconds] * ring_order.hops,
        *[permute_seconds / 2] * ring_order.has_opposite,
        0.0,
    ]
    return sum(max(pair) for pair in zip(matmuls, transfers, strict=True))


def _scatter_seconds(
    ring_order: KernelRing, matmul_seconds: float, permute_seconds: float, pieces: int
) -> float:
    """Return the seconds of the reversed steps. A sum is sent once its piece's matmul is done."""
    direction_count = len(ring_order.directions)
    matmuls = [
        *[matmul_seconds] * ring_order.has_opposite,
        *[direction_count * matmul_seconds] * ring_order.hops,
        matmul_seconds,
    ]
    transfers = [
        0.0,
        *[permute_seconds / 2] * ring_order.has_opposite,
        *[permute_seconds] * ring_order.hops,
    ]
    delay = matmul_seconds / pieces
    return sum(
        max(compute, transfer + delay) if transfer else compute
        for compute, transfer in zip(matmuls, transfers, strict=True)
    )


def _gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(x, w).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))


def cases(chips: Slice) -> Iterator[Case]:
    """Yield every size, ring and function, forward and with gradients."""
    device = jax.sharding.AbstractDevice(KINDS[chips.generation], chips.chip.cores, "tpu")
    for size in SIZES:
        for ring in (4, 8):
            if chips.chips % ring:
                continue
            dimensions, explicit = (chips.chips // ring, ring), (AxisType.Explicit,) * 2
            mesh = AbstractMesh(dimensions, ("X", "Y"), explicit, abstract_device=device)
            for gathers in (True, False):
                for gradients in (False, True):
                    name = f"{size.name}, ring of {ring}, {'gather' if gathers else 'scatter'}"
                    name += ", gradients" if gradients else ""
                    yield Case(name, size, mesh, chips, gathers, gradients)


def kernels(program: InspectedProgram) -> list[int]:
    """Return the VMEM of each kernel in a program."""
    calls = [
        instruction
        for computation in program.module.computations.values()
        for instruction in computation.instructions
        if 'custom_call_target="tpu_custom_call"' in instruction.attribute_text
    ]
    return [_vmem_bytes(call.attribute_text) for call in calls]


def _vmem_bytes(text: str) -> int:
    match = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1".*?"size":"(\d+)"', text)
    return int(match[1]) if match else 0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows with names that contain all words")
    parser.add_argument("--on", default="v5litepod-8", help="the slice to compile for")
    options = parser.parse_args()
    if slice_of(options.on).generation not in KINDS:
        parser.error(f"--on {options.on}: the slice has to be one of {', '.join(KINDS)}")
    columns = f"{'compiled':>10}{'kernels':>9}{'VMEM':>9}{'HBM temp':>11}{'model':>11}"
    print(f"{'on ' + options.on:42}{columns}")
    for case in cases(slice_of(options.on)):
        if not all(filter_word in case.name for filter_word in options.words):
            continue
        fn, args = case.program()
        start = time.perf_counter()
        try:
            program = compile_for(
                parse_machine(options.on), fn, args, mesh=case.mesh, compiler="tpu"
            )
        except UserError as error:
            print(f"{case.name:42} not compiled: {error}", flush=True)
            continue
        seconds = time.perf_counter() - start
        vmem_sizes = kernels(program)
        print(
            f"{case.name:42}{seconds:8.1f} s{len(vmem_sizes):9}{max(vmem_sizes) / MIB:5.0f} MiB"
            f"{program.memory['temporaries'] / MIB:7.0f} MiB{case.model() * 1e6:8.0f} µs",
            flush=True,
        )


if __name__ == "__main__":
    main()
