"""Kernels in which the devices' chunks travel while each device multiplies what has arrived.

A chunk lands in HBM, is sent on from where it landed, and is multiplied there: it is written once
and never copied. Each hop is started before, and waited for after, the products of the chunks that
are here already.

`SLOTS` chunks of each direction have room at once. With so many, a neighbour may be a step ahead or
behind and nobody waits: a chunk is sent to a slot whose last chunk was multiplied a whole step ago,
and semaphores (`room`) make sure of it. Rings of up to eight devices need no more than the n-1
slots of a gathered array, longer ones seven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.fused.tours import Index, Ref, Tour, remainder, when

SLOTS = 3
"""Chunks of each direction that have room: one to multiply, one to send on, one that arrives."""


class ArrivedChunk(NamedTuple):
    """A chunk that is here now, in HBM, and the place of the device that it set out from."""

    chunk: Ref
    source: jax.Array


Visit = Callable[[list[ArrivedChunk], bool, bool], None]
"""Work on the chunks of a step, told whether it is the first and whether it is the last."""


@dataclass(frozen=True)
class Slots:
    """Where chunks land.

    Attributes:
        tour: the ring.
        keep: whether every chunk stays, at its source's place, so that all of them together are
            the gathered array.
    """

    tour: Tour
    keep: bool

    @property
    def each_way(self) -> int:
        """How many whole chunks of one direction have room."""
        return self.tour.hops if self.keep else min(self.tour.hops, SLOTS)

    @property
    def count(self) -> int:
        """How many chunks have room in all."""
        if self.keep:
            return self.tour.size
        return len(self.tour.ways) * self.each_way + self.tour.halves

    @property
    def scarce(self) -> bool:
        """Whether slots are used again, so that senders have to ask for room."""
        return self.each_way < self.tour.hops

    def semaphores(self) -> list[Any]:
        """What has left, what has arrived, and where there is room."""
        each = (len(self.tour.ways), self.each_way + 1)
        dma = pltpu.SemaphoreType.DMA
        return [dma(each), dma(each), pltpu.SemaphoreType.REGULAR((len(self.tour.ways),))]


@dataclass(frozen=True)
class Travel:
    """One device's part in the travelling of all chunks, inside a kernel."""

    slots: Slots
    own: Ref
    chunks: Ref
    sent: Ref
    arrived: Ref
    room: Ref
    cores: Ref

    def run(self, visit: Visit) -> None:
        """Send the chunks round, and visit each of them once."""
        tour = self.slots.tour

        @tour.lead
        def _() -> None:
            tour.meet()
            self._each_onward(0, lambda copy: copy.start())

        visit([ArrivedChunk(self.own, tour.here())], True, False)
        tour.lead(lambda: self._each_onward(0, lambda copy: copy.wait_send()))
        steps = tour.hops if tour.halves else tour.hops - 1
        if steps:
            lax.fori_loop(1, steps + 1, lambda step, _: self._step(step, visit), None)
        if tour.halves:
            tour.lead(self._await_halves)
            opposite = ArrivedChunk(
                self.chunks.at[self._opposite_slot()], tour.away(tour.size // 2)
            )
            arrivals = [opposite]
        else:
            tour.lead(lambda: self._await(tour.hops))
            arrivals = self._arrivals(tour.hops)
        tour.cores_meet(self.cores)
        visit(arrivals, False, True)

    def _step(self, step: jax.Array, visit: Visit) -> None:
        tour = self.slots.tour

        @tour.lead
        def _() -> None:
            self._await(step)
            self._ask_for_room(step)
            self._each_onward(step, lambda copy: copy.start())

        tour.cores_meet(self.cores)
        visit(self._arrivals(step), False, False)
        tour.cores_meet(self.cores)

        @tour.lead
        def _() -> None:
            self._each_onward(step, lambda copy: copy.wait_send())
            self._give_room(step)

    def _ask_for_room(self, step: jax.Array) -> None:
        """Before a chunk is sent to a slot that has been used: until it has been left."""
        slots, tour = self.slots, self.slots.tour
        if slots.scarce:

            @pl.when((step >= slots.each_way) & (step < tour.hops))
            def _() -> None:
                for lane in range(len(tour.ways)):
                    pl.semaphore_wait(self.room.at[lane], 1)

    def _give_room(self, step: jax.Array) -> None:
        """Tell those who will send to this step's slots that these have been left."""
        slots, tour = self.slots, self.slots.tour
        if slots.scarce:

            @pl.when(step + slots.each_way <= tour.hops)
            def _() -> None:
                for lane, way in enumerate(tour.ways):
                    tour.signal(self.room.at[lane], -way)

    def _await_halves(self) -> None:
        for lane in range(2):
            self._half(self.slots.tour.hops, lane).wait_recv()

    def _await(self, step: Index) -> None:
        for lane in range(len(self.slots.tour.ways)):
            chunk = self.chunks.at[self._slot(step, lane)]
            self._copy(chunk, chunk, lane, remainder(step - 1, self.slots.each_way)).wait_recv()

    def _arrivals(self, step: Index) -> list[ArrivedChunk]:
        tour = self.slots.tour
        return [
            ArrivedChunk(self.chunks.at[self._slot(step, lane)], tour.away(-way * step))
            for lane, way in enumerate(tour.ways)
        ]

    def _slot(self, hop: Index, lane: int, *, ahead: int = 0) -> Index:
        """The slot of the chunk that arrives by a hop, here or so many devices ahead."""
        slots = self.slots
        if slots.keep:
            way = slots.tour.ways[lane]
            return slots.tour.away(way * (ahead - hop))
        return lane * slots.each_way + remainder(hop - 1, slots.each_way)

    def _opposite_slot(self, *, ahead: int = 0) -> Index:
        slots = self.slots
        if slots.keep:
            return slots.tour.away(slots.tour.size // 2 + ahead)
        return slots.count - 1

    def _source(self, step: Index, lane: int) -> Ref:
        if isinstance(step, int) and step == 0:
            return self.own
        return self.chunks.at[self._slot(step, lane)]

    def _each_onward(self, step: Index, act: Callable[[Any], None]) -> None:
        """Do something with the copies that leave in a step."""
        tour = self.slots.tour
        for lane in range(len(tour.ways)):
            when(step < tour.hops, partial(lambda lane: act(self._whole(step, lane)), lane))
            if tour.halves:
                when(step == tour.hops, partial(lambda lane: act(self._half(step, lane)), lane))

    def _whole(self, step: Index, lane: int) -> Any:
        """The copy of the chunk that leaves in a step and arrives by the hop after it."""
        target = self.chunks.at[self._slot(step + 1, lane, ahead=1)]
        return self._copy(
            self._source(step, lane), target, lane, remainder(step, self.slots.each_way)
        )

    def _half(self, step: Index, lane: int) -> Any:
        """The copy of half a chunk to the device opposite the one that it set out from."""
        half = self.own.shape[0] // 2
        rows = pl.ds(lane * half, half)
        slot = self._opposite_slot(ahead=self.slots.tour.ways[lane])
        source = self._source(step, lane).at[rows]
        return self._copy(source, self.chunks.at[slot, rows], lane, self.slots.each_way)

    def _copy(self, source: Ref, target: Ref, lane: int, number: Index) -> Any:
        semaphores = self.sent.at[lane, number], self.arrived.at[lane, number]
        return self.slots.tour.copy(source, target, semaphores, self.slots.tour.ways[lane])
