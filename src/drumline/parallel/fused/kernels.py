"""The kernels: a gather with matmuls, a gather with a weight gradient, and a matmul with a scatter.

`gather_matmul` writes the complete rows of the result for each chunk that arrives.

`gather_outer` sums over the rows of the chunks, so every step adds to the full result. The float32
sum stays in HBM between the steps. It is read and written n/2 times, because the chunks of a step
are added together. With the sizes of training, these are a few bytes per thousand multiplications.

`scatter_matmul` reverses the gather. The sum for a device starts at the devices farthest from it.
Every device on its path adds a matmul, in the epilogue of this matmul, and sends the sum to the
next device. A sum must arrive before a device can add to it and send it, so its hop overlaps with
other matmuls: those of the opposite direction and of other pieces. With chunks split into s pieces,
the hop of a full chunk overlaps completely if it takes no longer than `2 - 1/s` of its matmuls, or
`1 - 1/s` in a unidirectional ring.

A sum is updated in the slot in which it arrived. It is sent to a slot of the neighbour, which
signals (`slot_free`) when it has sent the previous content. Two slots per direction are enough,
because the neighbour freed the slot a full step earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.matmuls import Addend, pipelined_matmul, pipelined_outer
from drumline.parallel.fused.plans import KernelPlan, Operands, sublanes
from drumline.parallel.fused.ring import (
    ArrivedChunk,
    ChunkGather,
    Index,
    KernelRing,
    Ref,
    Slots,
    remainder,
    when,
)


def gather_matmul(
    plan: KernelPlan, x: jax.Array, w: jax.Array, *, w_dim: int = 0, keep: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Compute x[B_Y, K] · w[K, N] → [B, N]. Return it with the slots in which chunks arrive.

    With `keep` the slots are the gathered x[B, K]. This costs the memory of slots that a long ring
    would reuse, and a copy of the local chunk. With `w_dim=1`, w is [N, K].
    """
    (height, depth), columns = x.shape, w.shape[1 - w_dim]
    size, itemsize = plan.ring.size, x.dtype.itemsize
    blocks = plan.blocks(height, columns, depth, Operands(itemsize, itemsize))
    slots = Slots(plan.ring, keep)

    def kernel(x: Ref, w: Ref, out: Ref, chunks: Ref, kept: Ref, *semaphores: Ref) -> None:
        def local_chunk() -> Any:
            return pltpu.make_async_copy(x, chunks.at[plan.ring.device_index()], kept)

        if keep:
            plan.ring.on_first_core(lambda: local_chunk().start())

        def visit(arrivals: list[ArrivedChunk], _first: bool, _last: bool) -> None:
            for chunk, source in arrivals:
                rows = out.at[pl.ds(pl.multiple_of(source * height, height), height)]
                pipelined_matmul(
                    chunk, w, rows, blocks=blocks, w_dim=w_dim, precision=plan.precision
                )

        ChunkGather(slots, x, chunks, *semaphores).run(visit)
        if keep:
            plan.ring.on_first_core(lambda: local_chunk().wait())

    out, chunks = plan.call(
        kernel,
        "gather_product",
        (x, w),
        [((size * height, columns), x.dtype), ((slots.count, height, depth), x.dtype)],
        [pltpu.SemaphoreType.DMA, *slots.semaphores()],
    )
    return out, chunks.reshape(slots.count * height, depth)


def gather_outer(plan: KernelPlan, x: jax.Array, g: jax.Array) -> jax.Array:
    """Compute x[B_Y, M]ᵀ · g[B, N] → [M, N], where x is gathered and g is local."""
    (height, rows), columns = x.shape, g.shape[1]
    itemsize, directions = x.dtype.itemsize, len(plan.ring.directions)
    operands = Operands(itemsize, 4, pairs=directions, added=1)
    blocks = plan.blocks(rows, columns, height, operands)
    slots = Slots(plan.ring, keep=False)

    def kernel(x: Ref, g: Ref, out: Ref, sums: Ref, chunks: Ref, *semaphores: Ref) -> None:
        def visit(arrivals: list[ArrivedChunk], first: bool, last: bool) -> None:
            pairs = [
                (chunk, g.at[pl.ds(pl.multiple_of(source * height, height), height)])
                for chunk, source in arrivals
            ]
            pipelined_outer(
                pairs,
                out if last else sums,
                blocks=blocks,
                precision=plan.precision,
                added=() if first else (Addend(sums),),
            )

        ChunkGather(slots, x, chunks, *semaphores).run(visit)

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


MIN_PIECE_ROWS = 512
"""The minimum rows of a piece. Smaller pieces load the weights too often to overlap."""

MAX_PIECES = 4


def piece_count(height: int, tile: int) -> int:
    """Return the number of pieces of a chunk. It is even, because a chunk may be sent in halves."""
    pieces = 2
    while (
        pieces < MAX_PIECES
        and height // (2 * pieces) >= MIN_PIECE_ROWS
        and height % (2 * pieces * tile) == 0
    ):
        pieces *= 2
    return pieces


@dataclass(frozen=True)
class Sums:
    """The sums that move around the ring, as seen by a device inside a kernel.

    The number of remaining hops of a sum identifies a step. `slots[lane, 0 or 1]` holds the chunks
    of a direction; their rows are the pieces.
    """

    ring: KernelRing
    slots: Ref
    sent: Ref
    arrived: Ref
    piece_rows: int
    pieces: int

    @property
    def max_hops(self) -> int:
        """The maximum number of hops of a sum."""
        return self.ring.hops + self.ring.has_opposite

    def hops(self, lane: Index, piece: Index) -> Index:
        """Return the number of hops of a piece's sum in a direction."""
        if not self.ring.has_opposite:
            return self.ring.hops
        # The halves of the opposite device's pieces move in opposite directions.
        takes_extra_hop = jnp.equal(piece < self.pieces // 2, lane == 0)
        return self.ring.hops + takes_extra_hop.astype(jnp.int32)

    def sum_at(self, hops: Index, lane: Index, piece: Index) -> Ref:
        """Return the buffer of the sum with this number of remaining hops."""
        return self.slots.at[lane, remainder(hops + 1, 2), self._rows(piece)]

    def copy(self, hops: Index, lane: Index, piece: Index) -> Any:
        """Return the copy of a sum to the neighbour's buffer for sums with a hop less."""
        index = remainder(hops, 2)
        return self.ring.copy(
            self.sum_at(hops, lane, piece),
            self.slots.at[lane, index, self._rows(piece)],
            (self.sent.at[lane, index, piece], self.arrived.at[lane, index, piece]),
            direction_of(lane),
        )

    def _rows(self, piece: Index) -> Any:
        return rows_of(piece * self.piece_rows, self.piece_rows)


def rows_of(start: Index, count: int) -> Any:
    """Return a slice of `count` rows from a multiple of `count`."""
    return pl.ds(pl.multiple_of(jnp.asarray(start, jnp.int32), count), count)


def direction_of(lane: Index) -> Index:
    """Return the direction of a lane, 1 or -1."""
    return 1 - 2 * lane


def scatter_matmul(plan: KernelPlan, x: jax.Array, w: jax.Array, *, w_dim: int = 0) -> jax.Array:
    """Compute x[B, K_Y] · w[K_Y, N] → [B_Y, N], summed over Y; with `w_dim=1`, w is [N, K_Y]."""
    (rows, depth), columns = x.shape, w.shape[1 - w_dim]
    ring = plan.ring
    height = rows // ring.size
    lanes, itemsize = len(ring.directions), x.dtype.itemsize
    wire = plan.wire_dtype
    pieces = piece_count(height, max(sublanes(itemsize), sublanes(wire.itemsize)))
    piece_rows = height // pieces
    blocks = plan.blocks(piece_rows, columns, depth, Operands(itemsize, 4, added=lanes))

    def kernel(
        x: Ref, w: Ref, out: Ref, slots: Ref, sent: Ref, arrived: Ref, *semaphores: Ref
    ) -> None:
        slot_free, cores = semaphores
        sums = Sums(ring, slots, sent, arrived, piece_rows, pieces)

        def product(owner: jax.Array, piece: Index, target: Ref, added: list[Addend]) -> None:
            pipelined_matmul(
                x.at[rows_of(owner * height + piece * piece_rows, piece_rows)],
                w,
                target,
                blocks=blocks,
                w_dim=w_dim,
                precision=plan.precision,
                added=added,
            )

        def forward_sum(hops: Index, lane: Index, piece: Index) -> None:
            before = jnp.asarray(hops < sums.hops(lane, piece))

            def receive() -> None:
                earlier = sums.copy(hops + 1, lane, piece)
                earlier.wait_send()
                ring.signal(slot_free.at[lane, piece], -direction_of(lane))
                earlier.wait_recv()

            ring.on_first_core(lambda: when(before, receive))
            ring.sync_cores(cores)
            local_sum = sums.sum_at(hops, lane, piece)
            product(
                ring.index_after(direction_of(lane) * hops),
                piece,
                local_sum,
                [Addend(local_sum, before)],
            )
            ring.sync_cores(cores)

            @ring.on_first_core
            def _() -> None:
                when(before, lambda: pl.semaphore_wait(slot_free.at[lane, piece], 1))
                sums.copy(hops, lane, piece).start()

        def step(index: jax.Array, _: None) -> None:
            hops = sums.max_hops - index // (pieces * lanes)
            piece = remainder(index // lanes, pieces)
            lane = remainder(index, lanes)
            pl.when(hops <= sums.hops(lane, piece))(lambda: forward_sum(hops, lane, piece))

        def finish(piece: jax.Array, _: None) -> None:
            added = []
            for lane in range(lanes):
                has_sum = sums.hops(lane, piece) >= 1

                def wait_for_sum(lane: int = lane) -> None:
                    last = sums.copy(1, lane, piece)
                    last.wait_send()
                    last.wait_recv()

                ring.on_first_core(partial(when, has_sum, wait_for_sum))
                added.append(Addend(sums.sum_at(0, lane, piece), has_sum))
            ring.sync_cores(cores)
            share = out.at[rows_of(piece * piece_rows, piece_rows)]
            product(ring.device_index(), piece, share, added)

        ring.on_first_core(ring.wait_for_neighbours)
        lax.fori_loop(0, sums.max_hops * pieces * lanes, step, None)
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
