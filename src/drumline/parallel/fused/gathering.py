"""Kernels that multiply by what the other devices hold: a product of rows, and its weight gradient.

`gather_product` writes the rows of the result that belong to each chunk, complete, as it passes.
`gather_outer` sums over the chunks' rows, so every step adds to the whole result. Its sum waits in
HBM in float32 between the steps, and both chunks of a step are added at once: read and written
n/2 times and not n, it is a few bytes for each thousand multiplications at training's sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.blocks import Operands
from drumline.parallel.fused.plans import KernelPlan
from drumline.parallel.fused.products import Added, multiply, multiply_transposed
from drumline.parallel.fused.tours import Ref
from drumline.parallel.fused.travel import ArrivedChunk, Slots, Travel


def gather_product(
    plan: KernelPlan, x: jax.Array, w: jax.Array, *, along: int = 0, keep: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x[B_Y, K] · w[K, N] → [B, N], and the slots: with `keep` they are the gathered x[B, K].

    `along=1` takes w as [N, K]. What is kept is where the chunks landed, so it costs the memory of
    the slots that a long ring would use again, and no copy but that of the device's own chunk.
    """
    (height, depth), columns = x.shape, w.shape[1 - along]
    size, itemsize = plan.tour.size, x.dtype.itemsize
    blocks = plan.blocks(height, columns, depth, Operands(itemsize, itemsize))
    slots = Slots(plan.tour, keep)

    def kernel(x: Ref, w: Ref, out: Ref, chunks: Ref, kept: Ref, *semaphores: Ref) -> None:
        def own_chunk() -> Any:
            return pltpu.make_async_copy(x, chunks.at[plan.tour.here()], kept)

        if keep:
            plan.tour.lead(lambda: own_chunk().start())

        def visit(arrivals: list[ArrivedChunk], _first: bool, _last: bool) -> None:
            for chunk, source in arrivals:
                rows = out.at[pl.ds(pl.multiple_of(source * height, height), height)]
                multiply(chunk, w, rows, blocks=blocks, along=along, precision=plan.precision)

        Travel(slots, x, chunks, *semaphores).run(visit)
        if keep:
            plan.tour.lead(lambda: own_chunk().wait())

    out, chunks = plan.call(
        kernel,
        "gather_product",
        (x, w),
        [((size * height, columns), x.dtype), ((slots.count, height, depth), x.dtype)],
        [pltpu.SemaphoreType.DMA, *slots.semaphores()],
    )
    return out, chunks.reshape(slots.count * height, depth)


def gather_outer(plan: KernelPlan, x: jax.Array, g: jax.Array) -> jax.Array:
    """x[B_Y, M]ᵀ · g[B, N] → [M, N], where the rows of x travel and those of g are here."""
    (height, rows), columns = x.shape, g.shape[1]
    itemsize, ways = x.dtype.itemsize, len(plan.tour.ways)
    operands = Operands(itemsize, 4, pairs=ways, added=1)
    blocks = plan.blocks(rows, columns, height, operands)
    slots = Slots(plan.tour, keep=False)

    def kernel(x: Ref, g: Ref, out: Ref, sums: Ref, chunks: Ref, *semaphores: Ref) -> None:
        def visit(arrivals: list[ArrivedChunk], first: bool, last: bool) -> None:
            pairs = [
                (chunk, g.at[pl.ds(pl.multiple_of(source * height, height), height)])
                for chunk, source in arrivals
            ]
            multiply_transposed(
                pairs,
                out if last else sums,
                blocks=blocks,
                precision=plan.precision,
                added=() if first else (Added(sums),),
            )

        Travel(slots, x, chunks, *semaphores).run(visit)

    out, _, _ = plan.call(
        kernel,
        "gather_outer",
        (x, g),
        [
            ((rows, columns), x.dtype),
            ((rows, columns), jnp.dtype(jnp.float32)),
            ((slots.count, height, rows), x.dtype),
        ],
        slots.semaphores(),
    )
    return out
