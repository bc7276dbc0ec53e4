"""X"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.axes import empty
from drumline.parallel.fused.functions import Interpret
from drumline.parallel.fused.ring import Tour

LANES = 128
"""Columns of one tile, of any type."""

DEEPEST = 512
"""More depth saves no reading, and takes VMEM that a larger block of the result uses better."""

LONGEST = 2048
"""A longer side no longer pays."""

ENOUGH = 640
"""Multiplications for each byte read that leave any chip's HBM waiting: v6e, of which most are
wanted, does 575 in the time of one byte. Larger blocks would save nothing."""

RESERVED = 2 << 20
"""VMEM that is left to the compiler, for what it spills and for semaphores."""


@dataclass(frozen=True)
class Blocks:
    """The sides of the blocks of one product."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class Operands:
    """What passes through VMEM beside the sum: bytes of a number, and how many of each there are.

    Attributes:
        itemsize: of the operands.
        out_itemsize: of the result.
        pairs: how many pairs of operands are multiplied at once.
        added: how many float32 arrays of the result's shape are added to the product.
    """

    itemsize: int
    out_itemsize: int
    pairs: int = 1
    added: int = 0


def sublanes(itemsize: int) -> int:
    """Rows of one tile: 8 of 32 bits, 16 of 16 bits."""
    return 32 // itemsize


def vmem_of(blocks: Blocks, operands: Operands) -> int:
    """Bytes that a pipelined product takes: the sum once, all that passes through twice."""
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    passing = operands.pairs * (m + n) * k * operands.itemsize
    results = m * n * (operands.out_itemsize + 4 * operands.added)
    # The product of one step is a value of its own before it is added to the sum.
    return 2 * (passing + results) + 2 * 4 * m * n


def choose_blocks(
    rows: int,
    columns: int,
    depth: int,
    operands: Operands,
    *,
    vmem: int,
    row_tile: int,
    cores: int = 1,
) -> Blocks | None:
    """The blocks that read least from HBM, or None if not even the smallest fit.

    Args:
        rows: of the result; a multiple of `row_tile`.
        columns: of the result; a multiple of 128.
        depth: of the contraction; a multiple of 128, or of `row_tile` where it is rows.
        operands: what passes through VMEM.
        vmem: bytes that each core may use.
        row_tile: what the rows of a block have to be a multiple of.
        cores: which share the blocks, and have to have as many each.
    """
    room = vmem - RESERVED
    best: tuple[tuple[float, int], Blocks] | None = None
    for m in _divisors(rows, row_tile, LONGEST):
        for n in _divisors(columns, LANES, LONGEST):
            if (rows // m) % cores and (columns // n) % cores:
                continue
            for k in _divisors(depth, LANES if depth % LANES == 0 else row_tile, DEEPEST):
                blocks = Blocks(m, n, k)
                if vmem_of(blocks, operands) > room:
                    continue
                # Least reading, and few steps: each reads and writes the whole sum in VMEM, which
                # takes about as long as multiplying a depth of 64.
                reuse = min(ENOUGH, m * n / (m + n) * 2 / operands.itemsize)
                worth = reuse * k / (k + 64), -m * n
                if best is None or worth > best[0]:
                    best = worth, blocks
    return best and best[1]


def _divisors(length: int, tile: int, most: int) -> list[int]:
    """Multiples of the tile that divide a length, up to the largest that is useful."""
    return [d for d in range(tile, min(length, most) + 1, tile) if length % d == 0]


@dataclass(frozen=True)
class KernelPlan:
    """How the kernels of one fused product run.

    Attributes:
        caller: the function to name in what is refused.
        tour: the ring.
        precision: of each multiplication.
        wire_dtype: the type in which sums travel.
        vmem: bytes of each core's VMEM that a kernel may use; None where there is no TPU to ask.
        interpret: False on TPUs; elsewhere how they are emulated.
    """

    caller: str
    tour: Tour
    precision: lax.PrecisionLike
    wire_dtype: jnp.dtype
    vmem: int | None
    interpret: Interpret

    def blocks(self, rows: int, columns: int, depth: int, operands: Operands) -> Blocks:
        """How a product is cut, refused if its smallest blocks do not fit.

        Emulated where JAX does not know of any TPU, it is not cut: JAX asks for the TPU's tiles.
        """
        if self.vmem is None:
            return Blocks(rows, columns, depth)
        tile = sublanes(operands.itemsize)
        cores = self.tour.cores
        found = choose_blocks(
            rows, columns, depth, operands, vmem=self.vmem, row_tile=tile, cores=cores
        )
        if found is None:
            raise ValueError(
                f"{self.caller}: no blocks of a product of {rows}×{depth}×{columns} fit "
                f"{self.vmem} bytes of VMEM on each of {self.tour.cores} cores; give it more with "
                "vmem_bytes, or use the ring functions"
            )
        return found

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        inputs: Sequence[jax.Array],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        scratch: Sequence[Any],
    ) -> list[jax.Array]:
        """Run a kernel on arrays that stay in HBM, on every core.

        It gets inputs, outputs, scratch, and a semaphore for its cores to meet at. A kernel has no
        scratch memory in HBM, so that its buffers there are outputs too. It counts as free of side
        effects: where a gradient is not used, no device runs its kernel.
        """
        here = pl.BlockSpec(memory_space=pltpu.HBM)
        results = pl.pallas_call(
            kernel,
            grid=(self.tour.cores,),
            out_shape=[_typed(shape, dtype, inputs[0]) for shape, dtype in outputs],
            in_specs=[here] * len(inputs),
            out_specs=[here] * len(outputs),
            scratch_shapes=[*scratch, pltpu.SemaphoreType.REGULAR],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",),
                collective_id=self.tour.collective_id,
                vmem_limit_bytes=self.vmem,
            ),
            interpret=self.interpret,
            name=name,
        )(*inputs)
        return list(results)


def _typed(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> Any:
    """The type of an array that varies over the axes that `like` varies over."""
    return jax.eval_shape(lambda: empty(shape, dtype, like))
