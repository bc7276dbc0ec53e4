"""What a fused kernel is called with beside its arrays, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.blocks import Blocks, Operands, choose_blocks, sublanes
from drumline.parallel.fused.options import Interpret
from drumline.parallel.fused.tours import Tour
from drumline.parallel.varying import empty


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
