"""X"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.axes import AxisName, names_of
from drumline.parallel.rings.ring import Direction

Index = int | jax.Array
Ref = Any
"""An array or semaphore that a kernel reads and writes; JAX has no public type for it."""


@dataclass(frozen=True)
class Tour:
    """The ring of one mesh axis, or of several, on its mesh.

    Attributes:
        axis_name: the axis or axes of the ring.
        size: how many devices it has.
        direction: one way or both.
        mesh: every axis of the mesh, as kernels number devices.
        cores: of each device, which share its products. The first of them sends and receives for
            all: a copy counts up semaphores of one core.
    """

    axis_name: AxisName
    size: int
    direction: Direction
    mesh: tuple[str, ...]
    cores: int = 1

    @property
    def ways(self) -> tuple[int, ...]:
        """The directions that are used, each by the step from a device to the next."""
        return (1, -1) if self.direction == "both" else (1,)

    @property
    def hops(self) -> int:
        """How many hops a chunk makes whole, each way."""
        return (self.size - 1) // 2 if self.direction == "both" else self.size - 1

    @property
    def halves(self) -> bool:
        """Whether there is a device opposite, whose chunk comes in halves by one hop more."""
        return self.direction == "both" and self.size % 2 == 0

    @property
    def collective_id(self) -> int:
        """The number of the barrier's semaphore: another one for every set of axes.

        Kernels on one ring may share it: who leaves one of them has heard from every device in it,
        so all of them have passed its barrier. Rings over other axes have other neighbours, which
        may be a kernel ahead.
        """
        return sum(1 << self.mesh.index(name) for name in names_of(self.axis_name))

    def here(self) -> jax.Array:
        """The place of this device on the ring."""
        return lax.axis_index(self.axis_name).astype(jnp.int32)

    def away(self, steps: Index) -> jax.Array:
        """The place so many steps on; `steps` may be as low as minus the size."""
        return lax.rem(self.here() + steps + self.size, jnp.int32(self.size))

    def device(self, steps: Index) -> tuple[jax.Array, ...]:
        """The device so many steps on, by its index along every axis of the mesh.

        JAX takes a tuple for that (`DeviceIdType.MESH`, a name that it gives up); a number would
        be counted over the whole mesh, as if it had no other axes.
        """
        place = self.away(steps)
        names = names_of(self.axis_name)
        along = {}
        for at, name in enumerate(names):
            inner = prod(int(lax.axis_size(other)) for other in names[at + 1 :])
            along[name] = lax.rem(place // inner, jnp.int32(lax.axis_size(name)))
        return tuple(
            along[name] if name in along else lax.axis_index(name).astype(jnp.int32)
            for name in self.mesh
        )

    def meet(self) -> None:
        """Wait until both neighbours are in this kernel: before that, they have no buffers."""
        barrier = pltpu.get_barrier_semaphore()  # type: ignore[no-untyped-call]
        self.signal(barrier, 1)
        self.signal(barrier, -1)
        pl.semaphore_wait(barrier, 2)

    def signal(self, semaphore: Ref, steps: Index) -> None:
        """Count up a semaphore of the device so many steps on."""
        pl.semaphore_signal(semaphore, 1, device_id=self.device(steps))

    def lead(self, act: Callable[[], None]) -> None:
        """Act on the first core alone; to be used as a decorator."""
        when(self.cores == 1 or pl.program_id(0) == 0, act)

    def cores_meet(self, semaphore: Ref) -> None:
        """Wait until every core of this device has come here."""
        if self.cores == 1:
            return
        here = pl.program_id(0)
        for core in range(self.cores):

            @pl.when(core != here)
            def _(core: int = core) -> None:
                pl.semaphore_signal(semaphore, 1, core_index=core)

        pl.semaphore_wait(semaphore, self.cores - 1)

    def copy(self, source: Ref, target: Ref, semaphores: tuple[Ref, Ref], steps: Index) -> Any:
        """A copy from here to the same kernel's buffer on another device, not yet started.

        Args:
            source: on this device.
            target: on the other.
            semaphores: one that counts what has left, and one on the other for what has arrived.
            steps: from this device to the other.
        """
        return pltpu.make_async_remote_copy(
            source, target, *semaphores, device_id=self.device(steps)
        )


def when(condition: bool | jax.Array, act: Callable[[], None]) -> None:
    """Act if the condition holds, which is known while tracing or only on the device."""
    if isinstance(condition, bool):
        if condition:
            act()
    else:
        pl.when(condition)(act)


def remainder(number: Index, divisor: int) -> Index:
    """The remainder of a number that is not negative, without code for those that are."""
    return number % divisor if isinstance(number, int) else lax.rem(number, jnp.int32(divisor))


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
