"""Blocked matmuls of arrays in HBM, each a pipeline through VMEM inside a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.plans import Blocks
from drumline.parallel.fused.ring import Ref

# The cores share the blocks of the result; each core runs one program.
_SHARED: Any = {
    "core_axis": 0,
    "dimension_semantics": (pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
}


@dataclass(frozen=True)
class Addend:
    """A float32 array to add to a matmul, if the condition holds."""

    array: Ref
    condition: jax.Array | bool = True


def pipelined_matmul(
    x: Ref,
    w: Ref,
    out: Ref,
    *,
    blocks: Blocks,
    w_dim: int,
    precision: lax.PrecisionLike,
    added: Sequence[Addend] = (),
) -> None:
    """Compute out = x[M, K] · w[K, N] + addends, written once in the type of out.

    Args:
        x: in HBM, as are w and out.
        w: `[K, N]`, or `[N, K]` with `w_dim=1`; its blocks are not transposed in memory.
        out: may be one of the addends: a block is read before it is written.
        blocks: the sides of the blocks.
        w_dim: the dimension of w that is contracted.
        precision: the precision of the matmuls.
        added: arrays to add to the finished matmul.
    """
    (rows, depth), columns = x.shape, w.shape[1 - w_dim]
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    last = depth // k - 1

    def step(x_block: Ref, w_block: Ref, *refs: Ref) -> None:
        *added_blocks, out_block, accumulator = refs
        step_index = pl.program_id(2)

        @pl.when(step_index == 0)
        def _() -> None:
            accumulator[...] = jnp.zeros_like(accumulator)

        accumulator[...] += lax.dot_general(
            x_block[...],
            w_block[...],
            (((1,), (w_dim,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

        @pl.when(step_index == last)
        def _() -> None:
            out_block[...] = _sum(accumulator, added_blocks, added).astype(out_block.dtype)

    result = pl.BlockSpec((m, n), lambda i, j, _: (i, j))
    weights = (
        pl.BlockSpec((n, k), lambda _, j, d: (j, d))
        if w_dim
        else pl.BlockSpec((k, n), lambda _, j, d: (d, j))
    )
    pipeline = pltpu.emit_pipeline(
        step,
        grid=(rows // m, columns // n, depth // k),
        in_specs=[pl.BlockSpec((m, k), lambda i, _, d: (i, d)), weights, *[result] * len(added)],
        out_specs=[result],
        **_SHARED,
    )
    refs = (x, w, *(addend.array for addend in added), out)
    _with_total(blocks, lambda accumulator: pipeline(*refs, scratches=(accumulator,)))


def pipelined_outer(
    pairs: Sequence[tuple[Ref, Ref]],
    out: Ref,
    *,
    blocks: Blocks,
    precision: lax.PrecisionLike,
    added: Sequence[Addend] = (),
) -> None:
    """Compute out = Σ x[K, M]ᵀ · g[K, N] over the pairs, plus addends, written once."""
    (depth, rows), columns = pairs[0][0].shape, pairs[0][1].shape[1]
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    last = depth // k - 1

    def step(*refs: Ref) -> None:
        operands, (*added_blocks, out_block, accumulator) = (
            refs[: 2 * len(pairs)],
            refs[2 * len(pairs) :],
        )
        step_index = pl.program_id(2)

        @pl.when(step_index == 0)
        def _() -> None:
            accumulator[...] = jnp.zeros_like(accumulator)

        for x_block, g_block in zip(operands[::2], operands[1::2], strict=True):
            accumulator[...] += lax.dot_general(
                x_block[...],
                g_block[...],
                (((0,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        @pl.when(step_index == last)
        def _() -> None:
            out_block[...] = _sum(accumulator, added_blocks, added).astype(out_block.dtype)

    result = pl.BlockSpec((m, n), lambda i, j, _: (i, j))
    pair = [
        pl.BlockSpec((k, m), lambda i, _, d: (d, i)),
        pl.BlockSpec((k, n), lambda _, j, d: (d, j)),
    ]
    pipeline = pltpu.emit_pipeline(
        step,
        grid=(rows // m, columns // n, depth // k),
        in_specs=[*pair * len(pairs), *[result] * len(added)],
        out_specs=[result],
        **_SHARED,
    )
    refs = (*(ref for both in pairs for ref in both), *(addend.array for addend in added), out)
    _with_total(blocks, lambda accumulator: pipeline(*refs, scratches=(accumulator,)))


def _with_total(blocks: Blocks, run: Callable[[Ref], None]) -> None:
    """Run a pipeline with a float32 accumulator for one block in VMEM."""
    pl.run_scoped(run, pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32))


def _sum(accumulator: Ref, blocks: Sequence[Ref], added: Sequence[Addend]) -> jax.Array:
    value: jax.Array = accumulator[...]
    for block, addend in zip(blocks, added, strict=True):
        term = block[...].astype(jnp.float32)
        if addend.condition is not True:
            term = jnp.where(addend.condition, term, 0.0)
        value = value + term
    return value
