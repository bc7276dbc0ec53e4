"""What the TPU's own compiler (Mosaic) makes of the fused kernels, without a TPU.

    python benchmarks/tpu_kernels.py [WORD …] [--on v5litepod-8]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). For each
program: whether it compiles and in how many seconds; its kernels, custom calls to the compiler;
the VMEM that the largest of them uses on a core; temporaries in HBM; and `model`, in
microseconds. A custom call carries no estimate of the compiler's, so that the model is ours: in
every step the longer of its products, at the chip's peak, and of what travels beside them, at the
bandwidth of a link, which is what it takes if nothing else does; the first blocks of the first
product are read before it begins. It was never held against a TPU. Only rows whose names hold all
the WORDs are compiled, which takes half a minute each.
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
"""What JAX calls the chips that it gives one device each, as a slice's chips are counted here."""

FIRST_BLOCKS = 4 * MIB
"""Bytes of both operands that are read before the first multiplication."""


@dataclass(frozen=True)
class Size:
    """The rows that one ring shares, and the two sides of the weights, in bfloat16."""

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
        """The devices of the ring."""
        return int(self.mesh.shape["Y"])

    def program(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to compile: the function on shards, and the shapes of its arguments."""
        divided, rows = P("X", "Y"), P(("X", "Y"), None)
        weights = P(None, "Y") if self.gathers else P("Y", None)
        fn = fused_allgather_matmul if self.gathers else fused_matmul_reducescatter
        specs = (rows, divided) if self.gathers else (divided, rows)
        run = jax.shard_map(
            partial(fn, axis_name="Y"),
            mesh=self.mesh,
            in_specs=(specs[0], weights),
            out_specs=specs[1],
        )
        size = self.size
        sides = (size.model, size.hidden) if self.gathers else (size.hidden, size.model)
        batch = size.rows * int(self.mesh.shape["X"])
        args = (self._shape(specs[0], batch, sides[0]), self._shape(weights, *sides))
        return (_gradients(run) if self.gradients else run), args

    def _shape(self, spec: P, *sides: int) -> Any:
        struct: Any = jax.ShapeDtypeStruct
        return struct(sides, jnp.bfloat16, sharding=NamedSharding(self.mesh, spec))

    def model(self) -> float:
        """Seconds, by our model: see above."""
        chip, size, n = self.chips.chip, self.size, self.ring
        tour = KernelRing("Y", n, "both", ("X", "Y"))
        height = size.rows // n
        product = 2 * height * size.model * size.hidden / n / chip.peak_bf16_flops
        hop = height * size.model / chip.link_bandwidth
        gather = _gather_seconds(tour, product, 2 * hop)
        scatter = _scatter_seconds(tour, product, 4 * hop, piece_count(height, 16))
        first = FIRST_BLOCKS / chip.hbm_bandwidth
        forward = first + (gather if self.gathers else scatter)
        if not self.gradients:
            return forward
        # The gather's: a scatter, and a gather that sums. The scatter's: a gather, and a product.
        others = scatter + gather + 2 * first if self.gathers else gather + n * product + first
        return forward + others


def _gather_seconds(tour: KernelRing, product: float, hop: float) -> float:
    """Own product, then those of each step's arrivals, beside what travels on meanwhile."""
    ways = len(tour.directions)
    steps = [product, *[ways * product] * tour.hops, *[product] * tour.has_opposite]
    beside = [*[hop] * tour.hops, *[hop / 2] * tour.has_opposite, 0.0]
    return sum(max(pair) for pair in zip(steps, beside, strict=True))


def _scatter_seconds(tour: KernelRing, product: float, hop: float, pieces: int) -> float:
    """The same steps backwards; a sum sets out when its piece's product is there."""
    ways = len(tour.directions)
    steps = [*[product] * tour.has_opposite, *[ways * product] * tour.hops, product]
    beside = [0.0, *[hop / 2] * tour.has_opposite, *[hop] * tour.hops]
    delay = product / pieces
    return sum(
        max(work, travel + delay) if travel else work
        for work, travel in zip(steps, beside, strict=True)
    )


def _gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(x, w).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))


def cases(chips: Slice) -> Iterator[Case]:
    """Every size, ring, function, forward and with gradients."""
    device = jax.sharding.AbstractDevice(KINDS[chips.generation], chips.chip.cores, "tpu")
    for size in SIZES:
        for ring in (4, 8):
            if chips.chips % ring:
                continue
            sides, explicit = (chips.chips // ring, ring), (AxisType.Explicit,) * 2
            mesh = AbstractMesh(sides, ("X", "Y"), explicit, abstract_device=device)
            for gathers in (True, False):
                for gradients in (False, True):
                    name = f"{size.name}, ring of {ring}, {'gather' if gathers else 'scatter'}"
                    name += ", gradients" if gradients else ""
                    yield Case(name, size, mesh, chips, gathers, gradients)


def kernels(program: InspectedProgram) -> list[int]:
    """The VMEM that each kernel of a program uses."""
    calls = [
        instruction
        for computation in program.module.computations.values()
        for instruction in computation.instructions
        if 'custom_call_target="tpu_custom_call"' in instruction.attribute_text
    ]
    return [_vmem(call.attribute_text) for call in calls]


def _vmem(text: str) -> int:
    found = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1".*?"size":"(\d+)"', text)
    return int(found[1]) if found else 0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose names hold all of them")
    parser.add_argument("--on", default="v5litepod-8", help="a slice")
    given = parser.parse_args()
    if slice_of(given.on).generation not in KINDS:
        parser.error(f"--on {given.on}: the slice has to be one of {', '.join(KINDS)}")
    columns = f"{'compiled':>10}{'kernels':>9}{'VMEM':>9}{'HBM temp':>11}{'model':>11}"
    print(f"{'on ' + given.on:42}{columns}")
    for case in cases(slice_of(given.on)):
        if not all(word in case.name for word in given.words):
            continue
        fn, args = case.program()
        started = time.perf_counter()
        try:
            program = compile_for(parse_machine(given.on), fn, args, mesh=case.mesh, compiler="tpu")
        except UserError as wrong:
            print(f"{case.name:42} not compiled: {wrong}", flush=True)
            continue
        seconds = time.perf_counter() - started
        used = kernels(program)
        print(
            f"{case.name:42}{seconds:8.1f} s{len(used):9}{max(used) / MIB:5.0f} MiB"
            f"{program.memory['temporaries'] / MIB:7.0f} MiB{case.model() * 1e6:8.0f} µs",
            flush=True,
        )


if __name__ == "__main__":
    main()
