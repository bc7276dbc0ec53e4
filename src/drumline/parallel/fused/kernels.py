"""X"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.matmuls import Added, multiply, multiply_transposed
from drumline.parallel.fused.plans import KernelPlan, Operands, sublanes
from drumline.parallel.fused.ring import (
    ArrivedChunk,
    Index,
    Ref,
    Slots,
    Tour,
    Travel,
    remainder,
    when,
)


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


SHORTEST_PIECE = 512
"""Rows below which a piece would read the weights more often than its products can hide."""

MOST_PIECES = 4


def pieces_of(height: int, tile: int) -> int:
    """Into how many pieces a chunk of so many rows is cut: even, for a chunk that goes halves."""
    pieces = 2
    while (
        pieces < MOST_PIECES
        and height // (2 * pieces) >= SHORTEST_PIECE
        and height % (2 * pieces * tile) == 0
    ):
        pieces *= 2
    return pieces


@dataclass(frozen=True)
class Sums:
    """The sums that travel, as one device sees them inside a kernel.

    A step is named by how many hops a sum has still to make from here. `slots[lane, 0 or 1]` holds
    the chunks of one direction, their rows the pieces one after the other.
    """

    tour: Tour
    slots: Ref
    sent: Ref
    arrived: Ref
    piece_rows: int
    pieces: int

    @property
    def farthest(self) -> int:
        """Hops of the sums that come from farthest."""
        return self.tour.hops + self.tour.halves

    def hops(self, lane: Index, piece: Index) -> Index:
        """How many hops the sum of a piece makes in a direction."""
        if not self.tour.halves:
            return self.tour.hops
        # Of what the device opposite adds, the first pieces go one way and the others the other.
        goes = jnp.equal(piece < self.pieces // 2, lane == 0)
        return self.tour.hops + goes.astype(jnp.int32)

    def at(self, hops: Index, lane: Index, piece: Index) -> Ref:
        """Where the sum is that has so many hops to make from here."""
        return self.slots.at[lane, remainder(hops + 1, 2), self._rows(piece)]

    def copy(self, hops: Index, lane: Index, piece: Index) -> Any:
        """The copy that sends it on; it arrives where a sum with one hop less is added to."""
        number = remainder(hops, 2)
        return self.tour.copy(
            self.at(hops, lane, piece),
            self.slots.at[lane, number, self._rows(piece)],
            (self.sent.at[lane, number, piece], self.arrived.at[lane, number, piece]),
            way(lane),
        )

    def _rows(self, piece: Index) -> Any:
        return rows_of(piece * self.piece_rows, self.piece_rows)


def rows_of(start: Index, count: int) -> Any:
    """So many rows, from a multiple of their number on."""
    return pl.ds(pl.multiple_of(jnp.asarray(start, jnp.int32), count), count)


def way(lane: Index) -> Index:
    """The step from a device to the next of a direction."""
    return 1 - 2 * lane


def scatter_product(plan: KernelPlan, x: jax.Array, w: jax.Array, *, along: int = 0) -> jax.Array:
    """x[B, K_Y] · w[K_Y, N] → [B_Y, N], summed over Y; `along=1` takes w as [N, K_Y]."""
    (rows, depth), columns = x.shape, w.shape[1 - along]
    tour = plan.tour
    height = rows // tour.size
    lanes, itemsize = len(tour.ways), x.dtype.itemsize
    wire = plan.wire_dtype
    pieces = pieces_of(height, max(sublanes(itemsize), sublanes(wire.itemsize)))
    piece_rows = height // pieces
    blocks = plan.blocks(piece_rows, columns, depth, Operands(itemsize, 4, added=lanes))

    def kernel(x: Ref, w: Ref, out: Ref, slots: Ref, sent: Ref, arrived: Ref, *more: Ref) -> None:
        room, cores = more
        sums = Sums(tour, slots, sent, arrived, piece_rows, pieces)

        def product(owner: jax.Array, piece: Index, target: Ref, added: list[Added]) -> None:
            multiply(
                x.at[rows_of(owner * height + piece * piece_rows, piece_rows)],
                w,
                target,
                blocks=blocks,
                along=along,
                precision=plan.precision,
                added=added,
            )

        def pass_on(hops: Index, lane: Index, piece: Index) -> None:
            before = jnp.asarray(hops < sums.hops(lane, piece))

            def receive() -> None:
                earlier = sums.copy(hops + 1, lane, piece)
                earlier.wait_send()
                tour.signal(room.at[lane, piece], -way(lane))
                earlier.wait_recv()

            tour.lead(lambda: when(before, receive))
            tour.cores_meet(cores)
            here = sums.at(hops, lane, piece)
            product(tour.away(way(lane) * hops), piece, here, [Added(here, before)])
            tour.cores_meet(cores)

            @tour.lead
            def _() -> None:
                when(before, lambda: pl.semaphore_wait(room.at[lane, piece], 1))
                sums.copy(hops, lane, piece).start()

        def step(number: jax.Array, _: None) -> None:
            hops = sums.farthest - number // (pieces * lanes)
            piece = remainder(number // lanes, pieces)
            lane = remainder(number, lanes)
            pl.when(hops <= sums.hops(lane, piece))(lambda: pass_on(hops, lane, piece))

        def finish(piece: jax.Array, _: None) -> None:
            added = []
            for lane in range(lanes):
                came = sums.hops(lane, piece) >= 1

                def take(lane: int = lane) -> None:
                    last = sums.copy(1, lane, piece)
                    last.wait_send()
                    last.wait_recv()

                tour.lead(partial(when, came, take))
                added.append(Added(sums.at(0, lane, piece), came))
            tour.cores_meet(cores)
            share = out.at[rows_of(piece * piece_rows, piece_rows)]
            product(tour.here(), piece, share, added)

        tour.lead(tour.meet)
        lax.fori_loop(0, sums.farthest * pieces * lanes, step, None)
        lax.fori_loop(0, pieces, finish, None)

    dma = pltpu.SemaphoreType.DMA((lanes, 2, pieces))
    out, _ = plan.call(
        kernel,
        "scatter_product",
        (x, w),
        [((height, columns), x.dtype), ((lanes, 2, height, columns), wire)],
        [dma, dma, pltpu.SemaphoreType.REGULAR((lanes, pieces))],
    )
    return out
