"""The blocks of a matmul in a TPU core's VMEM, and the call of a fused kernel.

A float32 block of the result, `rows` by `columns`, stays in VMEM while blocks of `depth` of the
operands stream through. Every block of an operand reads the other operand from HBM once. A block of
m by n computes `m·n/(m+n)` multiply-adds per number read, so larger blocks read less.
"""

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
from drumline.parallel.fused.ring import KernelRing

LANES = 128
"""The columns of one tile, for any type."""

MAX_DEPTH = 512
"""The maximum depth. More depth saves no reads, and leaves less VMEM for the result."""

MAX_SIDE = 2048
"""The maximum side. Longer sides are no faster."""

ENOUGH_REUSE = 640
"""The multiplications per byte read from which no chip's HBM limits the matmul. The v6e needs 575.
Larger blocks are no faster."""

RESERVED_VMEM = 2 << 20
"""The VMEM left to the compiler for spills and semaphores."""


@dataclass(frozen=True)
class Blocks:
    """The sides of the blocks of one matmul."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class Operands:
    """The data that streams through VMEM besides the sum.

    Attributes:
        itemsize: the bytes of a number of the operands.
        out_itemsize: the bytes of a number of the result.
        pairs: the number of pairs of operands that are multiplied at once.
        added: the number of float32 arrays of the result's shape that are added.
    """

    itemsize: int
    out_itemsize: int
    pairs: int = 1
    added: int = 0


def sublanes(itemsize: int) -> int:
    """Return the rows of one tile: 8 for 32 bits, 16 for 16 bits."""
    return 32 // itemsize


def vmem_bytes_of(blocks: Blocks, operands: Operands) -> int:
    """Return the VMEM of a pipelined matmul: the sum once, all streamed data twice."""
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    operand_bytes = operands.pairs * (m + n) * k * operands.itemsize
    result_bytes = m * n * (operands.out_itemsize + 4 * operands.added)
    # The matmul of one step is a separate value before it is added to the sum.
    return 2 * (operand_bytes + result_bytes) + 2 * 4 * m * n


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
    """Return the blocks that read least from HBM, or None if not even the smallest fit.

    Args:
        rows: the rows of the result; a multiple of `row_tile`.
        columns: the columns of the result; a multiple of 128.
        depth: the length of the contraction; a multiple of 128, or of `row_tile` if it is rows.
        operands: the data that streams through VMEM.
        vmem: the bytes that each core may use.
        row_tile: the rows of a block are a multiple of this.
        cores: the number of cores, which must get equally many blocks.
    """
    slot_free = vmem - RESERVED_VMEM
    best: tuple[tuple[float, int], Blocks] | None = None
    for m in _divisors(rows, row_tile, MAX_SIDE):
        for n in _divisors(columns, LANES, MAX_SIDE):
            if (rows // m) % cores and (columns // n) % cores:
                continue
            for k in _divisors(depth, LANES if depth % LANES == 0 else row_tile, MAX_DEPTH):
                blocks = Blocks(m, n, k)
                if vmem_bytes_of(blocks, operands) > slot_free:
                    continue
                # Prefer few reads and few steps. Each step reads and writes the sum in VMEM, which
                # takes about as long as multiplying a depth of 64.
                reuse = min(ENOUGH_REUSE, m * n / (m + n) * 2 / operands.itemsize)
                score = reuse * k / (k + 64), -m * n
                if best is None or score > best[0]:
                    best = score, blocks
    return best and best[1]


def _divisors(length: int, tile: int, limit: int) -> list[int]:
    """Return the multiples of the tile that divide a length, up to a limit."""
    return [d for d in range(tile, min(length, limit) + 1, tile) if length % d == 0]


@dataclass(frozen=True)
class KernelPlan:
    """The options of the kernels of one fused matmul.

    Attributes:
        caller: the calling function, for messages.
        ring: the ring.
        precision: the precision of the matmuls.
        wire_dtype: the type in which sums are sent.
        vmem: the bytes of each core's VMEM for a kernel; None if the TPU is unknown.
        interpret: False on TPUs, else the emulation's parameters.
    """

    caller: str
    ring: KernelRing
    precision: lax.PrecisionLike
    wire_dtype: jnp.dtype
    vmem: int | None
    interpret: Interpret

    def blocks(self, rows: int, columns: int, depth: int, operands: Operands) -> Blocks:
        """Return the blocks of a matmul. Raise ValueError if the smallest do not fit.

        An emulated kernel without a known TPU has one block, because JAX needs the TPU for its
        tiles.
        """
        if self.vmem is None:
            return Blocks(rows, columns, depth)
        tile = sublanes(operands.itemsize)
        cores = self.ring.cores
        blocks = choose_blocks(
            rows, columns, depth, operands, vmem=self.vmem, row_tile=tile, cores=cores
        )
        if blocks is None:
            raise ValueError(
                f"{self.caller}: no blocks of a product of {rows}×{depth}×{columns} fit "
                f"{self.vmem} bytes of VMEM on each of {self.ring.cores} cores; give it more with "
                "vmem_bytes, or use the ring functions"
            )
        return blocks

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        inputs: Sequence[jax.Array],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        scratch: Sequence[Any],
    ) -> list[jax.Array]:
        """Run a kernel on every core, on arrays that stay in HBM.

        The kernel gets inputs, outputs, scratch, and a semaphore to synchronize its cores. Kernels
        have no scratch memory in HBM, so buffers there are outputs as well. A kernel counts as free
        of side effects: if a gradient is unused, no device runs its kernel.
        """
        device_index = pl.BlockSpec(memory_space=pltpu.HBM)
        result_bytes = pl.pallas_call(
            kernel,
            grid=(self.ring.cores,),
            out_shape=[_output_type(shape, dtype, inputs[0]) for shape, dtype in outputs],
            in_specs=[device_index] * len(inputs),
            out_specs=[device_index] * len(outputs),
            scratch_shapes=[*scratch, pltpu.SemaphoreType.REGULAR],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",),
                collective_id=self.ring.collective_id,
                vmem_limit_bytes=self.vmem,
            ),
            interpret=self.interpret,
            name=name,
        )(*inputs)
        return list(result_bytes)


def _output_type(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> Any:
    """Return the type of an array that varies over the same axes as `like`."""
    return jax.eval_shape(lambda: empty(shape, dtype, like))
