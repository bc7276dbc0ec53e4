"""Blocked products of arrays in HBM, each a pipeline through VMEM inside a kernel."""

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

# The blocks of the result are divided between the cores, whose number is that of the programs.
_SHARED: Any = {
    "core_axis": 0,
    "dimension_semantics": (pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
}


@dataclass(frozen=True)
class Added:
    """A float32 sum of the product's shape to add to it, if the condition holds."""

    array: Ref
    condition: jax.Array | bool = True


def multiply(
    x: Ref,
    w: Ref,
    out: Ref,
    *,
    blocks: Blocks,
    along: int,
    precision: lax.PrecisionLike,
    added: Sequence[Added] = (),
) -> None:
    """out = x[M, K] · w[K, N] + what is added, written once in out's type.

    Args:
        x: in HBM, as are w and out.
        w: `[K, N]`, or `[N, K]` with `along=1`; its blocks are not transposed in memory.
        out: may be one of the arrays that are added: a block is read before it is written.
        blocks: how to cut them.
        along: the dimension of w that is contracted.
        precision: of each multiplication.
        added: to the finished product.
    """
    (rows, depth), columns = x.shape, w.shape[1 - along]
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    last = depth // k - 1

    def step(x_block: Ref, w_block: Ref, *refs: Ref) -> None:
        *added_blocks, out_block, total = refs
        at = pl.program_id(2)

        @pl.when(at == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += lax.dot_general(
            x_block[...],
            w_block[...],
            (((1,), (along,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

        @pl.when(at == last)
        def _() -> None:
            out_block[...] = _sum(total, added_blocks, added).astype(out_block.dtype)

    result = pl.BlockSpec((m, n), lambda i, j, _: (i, j))
    weights = (
        pl.BlockSpec((n, k), lambda _, j, d: (j, d))
        if along
        else pl.BlockSpec((k, n), lambda _, j, d: (d, j))
    )
    pipeline = pltpu.emit_pipeline(
        step,
        grid=(rows // m, columns // n, depth // k),
        in_specs=[pl.BlockSpec((m, k), lambda i, _, d: (i, d)), weights, *[result] * len(added)],
        out_specs=[result],
        **_SHARED,
    )
    refs = (x, w, *(one.array for one in added), out)
    _with_total(blocks, lambda total: pipeline(*refs, scratches=(total,)))


def multiply_transposed(
    pairs: Sequence[tuple[Ref, Ref]],
    out: Ref,
    *,
    blocks: Blocks,
    precision: lax.PrecisionLike,
    added: Sequence[Added] = (),
) -> None:
    """out = Σ x[K, M]ᵀ · g[K, N] over the pairs, and what is added, written once."""
    (depth, rows), columns = pairs[0][0].shape, pairs[0][1].shape[1]
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    last = depth // k - 1

    def step(*refs: Ref) -> None:
        operands, (*added_blocks, out_block, total) = refs[: 2 * len(pairs)], refs[2 * len(pairs) :]
        at = pl.program_id(2)

        @pl.when(at == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        for x_block, g_block in zip(operands[::2], operands[1::2], strict=True):
            total[...] += lax.dot_general(
                x_block[...],
                g_block[...],
                (((0,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        @pl.when(at == last)
        def _() -> None:
            out_block[...] = _sum(total, added_blocks, added).astype(out_block.dtype)

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
    refs = (*(ref for both in pairs for ref in both), *(one.array for one in added), out)
    _with_total(blocks, lambda total: pipeline(*refs, scratches=(total,)))


def _with_total(blocks: Blocks, run: Callable[[Ref], None]) -> None:
    """Run a pipeline with room in VMEM for the float32 sum of one block."""
    pl.run_scoped(run, pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32))


def _sum(total: Ref, blocks: Sequence[Ref], added: Sequence[Added]) -> jax.Array:
    value: jax.Array = total[...]
    for block, one in zip(blocks, added, strict=True):
        term = block[...].astype(jnp.float32)
        if one.condition is not True:
            term = jnp.where(one.condition, term, 0.0)
        value = value + term
    return value
