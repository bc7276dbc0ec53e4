"""The kernel that multiplies and hands every device its share of the sum.

The gather's movements backwards: the sum for each device sets out from those farthest from it, and
each device on its way adds its product, in the epilogue of that product, and sends it on. A sum
cannot be sent before it has arrived and been added to, so that its hop has to hide behind other
products: those of the other direction, and those of other pieces. With chunks cut into s pieces, a
hop of a whole chunk is hidden as long as it takes no longer than `2 - 1/s` of its products (both
ways; one way `1 - 1/s`).

A sum is added to where it arrived, and sent on from there to the other one of two slots; the
neighbour says (`room`) when it has sent what was in it. Two slots for each direction are enough:
the slot that a sum is sent to was left a whole step ago.
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

from drumline.parallel.fused.blocks import Operands, sublanes
from drumline.parallel.fused.plans import KernelPlan
from drumline.parallel.fused.products import Added, multiply
from drumline.parallel.fused.tours import Index, Ref, Tour, remainder, when

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
