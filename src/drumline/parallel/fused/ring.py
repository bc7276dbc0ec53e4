"""The ring of a mesh axis from inside a kernel, and the gather of chunks on it.

A chunk from device s reaches device s+1 after one hop (a remote copy to a neighbour), and s+2 after
two. In one direction, every chunk makes n-1 hops. In both directions, it makes n/2 hops each way as
a whole: two chunks arrive in each step, and the two matmuls of a step overlap with its two hops.
With an even number of devices, the chunk of the opposite device would arrive twice, so half of it
comes each way.

A chunk arrives in HBM, is sent on from there, and is multiplied there: it is written once and never
copied. Each hop starts before the matmuls of the chunks that have already arrived, and is waited
for after them.

There are `SLOTS` slots for chunks of each direction. This allows a neighbour to be a step ahead or
behind without waiting: a chunk is sent to a slot whose last chunk was multiplied a whole step ago,
which semaphores (`slot_free`) guarantee. Rings of up to eight devices need no more slots than the
n-1 of a gathered array, longer ones seven.
"""

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

from drumline.parallel.axes import AxisName, as_axis_tuple
from drumline.parallel.rings.ring import Direction

Index = int | jax.Array
Ref = Any
"""An array or semaphore that a kernel reads and writes; JAX has no public type for it."""


@dataclass(frozen=True)
class KernelRing:
    """The ring of one or several mesh axes, from inside a kernel.

    Attributes:
        axis_name: the axis or axes of the ring.
        size: the number of devices.
        direction: one or both.
        mesh: all axes of the mesh, which number the devices in kernels.
        cores: the cores of each device, which share its matmuls. The first core sends and receives
            for all, because a copy signals the semaphores of one core.
    """

    axis_name: AxisName
    size: int
    direction: Direction
    mesh: tuple[str, ...]
    cores: int = 1

    @property
    def directions(self) -> tuple[int, ...]:
        """The directions in use, each as the step from a device to the next."""
        return (1, -1) if self.direction == "both" else (1,)

    @property
    def hops(self) -> int:
        """The number of hops of a whole chunk in each direction."""
        return (self.size - 1) // 2 if self.direction == "both" else self.size - 1

    @property
    def has_opposite(self) -> bool:
        """True if there is an opposite device, whose chunk comes in halves by one more hop."""
        return self.direction == "both" and self.size % 2 == 0

    @property
    def collective_id(self) -> int:
        """The index of the barrier's semaphore, which differs for every set of axes.

        Kernels on one ring may share it: a device that leaves one of them has heard from every
        device in it, so all have passed its barrier. Rings over other axes have other neighbours,
        which may be a kernel ahead.
        """
        return sum(1 << self.mesh.index(name) for name in as_axis_tuple(self.axis_name))

    def device_index(self) -> jax.Array:
        """Return the index of this device on the ring."""
        return lax.axis_index(self.axis_name).astype(jnp.int32)

    def index_after(self, steps: Index) -> jax.Array:
        """Return the index some steps on; `steps` may be negative, down to minus the size."""
        return lax.rem(self.device_index() + steps + self.size, jnp.int32(self.size))

    def device_id(self, steps: Index) -> tuple[jax.Array, ...]:
        """Return the device some steps on, as its index along every axis of the mesh.

        JAX takes a tuple for this (`DeviceIdType.MESH`, a deprecated name). A single number would
        be counted over the whole mesh, as if it had no other axes.
        """
        place = self.index_after(steps)
        names = as_axis_tuple(self.axis_name)
        w_dim = {}
        for position, name in enumerate(names):
            inner = prod(int(lax.axis_size(other)) for other in names[position + 1 :])
            w_dim[name] = lax.rem(place // inner, jnp.int32(lax.axis_size(name)))
        return tuple(
            w_dim[name] if name in w_dim else lax.axis_index(name).astype(jnp.int32)
            for name in self.mesh
        )

    def wait_for_neighbours(self) -> None:
        """Wait until both neighbours are in this kernel and have their buffers."""
        barrier = pltpu.get_barrier_semaphore()  # type: ignore[no-untyped-call]
        self.signal(barrier, 1)
        self.signal(barrier, -1)
        pl.semaphore_wait(barrier, 2)

    def signal(self, semaphore: Ref, steps: Index) -> None:
        """Increment a semaphore of the device some steps on."""
        pl.semaphore_signal(semaphore, 1, device_id=self.device_id(steps))

    def on_first_core(self, action: Callable[[], None]) -> None:
        """Run an action on the first core only; usable as a decorator."""
        when(self.cores == 1 or pl.program_id(0) == 0, action)

    def sync_cores(self, semaphore: Ref) -> None:
        """Wait until every core of this device has arrived here."""
        if self.cores == 1:
            return
        device_index = pl.program_id(0)
        for core in range(self.cores):

            @pl.when(core != device_index)
            def _(core: int = core) -> None:
                pl.semaphore_signal(semaphore, 1, core_index=core)

        pl.semaphore_wait(semaphore, self.cores - 1)

    def copy(self, source: Ref, target: Ref, semaphores: tuple[Ref, Ref], steps: Index) -> Any:
        """Return a copy to the same kernel's buffer on another device, not yet started.

        Args:
            source: the local buffer.
            target: the remote buffer.
            semaphores: one that counts sent data, and a remote one that counts arrived data.
            steps: from this device to the other.
        """
        return pltpu.make_async_remote_copy(
            source, target, *semaphores, device_id=self.device_id(steps)
        )


def when(condition: bool | jax.Array, action: Callable[[], None]) -> None:
    """Run an action if a condition holds, which may be known only on the device."""
    if isinstance(condition, bool):
        if condition:
            action()
    else:
        pl.when(condition)(action)


def remainder(index: Index, divisor: int) -> Index:
    """Return the remainder of a non-negative number, without code for negative ones."""
    return index % divisor if isinstance(index, int) else lax.rem(index, jnp.int32(divisor))


SLOTS = 3
"""The slots for chunks of each direction: one to multiply, one to send on, one that arrives."""


class ArrivedChunk(NamedTuple):
    """A chunk that has arrived in HBM, and the index of the device that it comes from."""

    chunk: Ref
    source: jax.Array


Visit = Callable[[list[ArrivedChunk], bool, bool], None]
"""A function of the chunks of a step, and of two flags: the first step, and the last step."""


@dataclass(frozen=True)
class Slots:
    """The slots in which chunks arrive.

    Attributes:
        ring: the ring.
        keep: True if every chunk stays, at its source's index, so that all together are the
            gathered array.
    """

    ring: KernelRing
    keep: bool

    @property
    def slots_per_direction(self) -> int:
        """The number of slots for whole chunks of one direction."""
        return self.ring.hops if self.keep else min(self.ring.hops, SLOTS)

    @property
    def count(self) -> int:
        """The total number of slots."""
        if self.keep:
            return self.ring.size
        return len(self.ring.directions) * self.slots_per_direction + self.ring.has_opposite

    @property
    def reuses_slots(self) -> bool:
        """True if slots are reused, so that senders must wait for free slots."""
        return self.slots_per_direction < self.ring.hops

    def semaphores(self) -> list[Any]:
        """Return the semaphores of sent chunks, arrived chunks and free slots."""
        each = (len(self.ring.directions), self.slots_per_direction + 1)
        dma = pltpu.SemaphoreType.DMA
        return [dma(each), dma(each), pltpu.SemaphoreType.REGULAR((len(self.ring.directions),))]


@dataclass(frozen=True)
class ChunkGather:
    """One device's part in the gather of all chunks, inside a kernel."""

    slots: Slots
    local_chunk: Ref
    chunks: Ref
    sent: Ref
    arrived: Ref
    slot_free: Ref
    cores: Ref

    def run(self, visit: Visit) -> None:
        """Send the chunks around the ring, and visit each of them once."""
        ring = self.slots.ring

        @ring.on_first_core
        def _() -> None:
            ring.wait_for_neighbours()
            self._for_each_copy(0, lambda copy: copy.start())

        visit([ArrivedChunk(self.local_chunk, ring.device_index())], True, False)
        ring.on_first_core(lambda: self._for_each_copy(0, lambda copy: copy.wait_send()))
        steps = ring.hops if ring.has_opposite else ring.hops - 1
        if steps:
            lax.fori_loop(1, steps + 1, lambda step, _: self._step(step, visit), None)
        if ring.has_opposite:
            ring.on_first_core(self._wait_for_halves)
            opposite = ArrivedChunk(
                self.chunks.at[self._opposite_slot()], ring.index_after(ring.size // 2)
            )
            arrivals = [opposite]
        else:
            ring.on_first_core(lambda: self._wait_for_arrivals(ring.hops))
            arrivals = self._arrivals(ring.hops)
        ring.sync_cores(self.cores)
        visit(arrivals, False, True)

    def _step(self, step: jax.Array, visit: Visit) -> None:
        ring = self.slots.ring

        @ring.on_first_core
        def _() -> None:
            self._wait_for_arrivals(step)
            self._wait_for_free_slots(step)
            self._for_each_copy(step, lambda copy: copy.start())

        ring.sync_cores(self.cores)
        visit(self._arrivals(step), False, False)
        ring.sync_cores(self.cores)

        @ring.on_first_core
        def _() -> None:
            self._for_each_copy(step, lambda copy: copy.wait_send())
            self._release_slots(step)

    def _wait_for_free_slots(self, step: jax.Array) -> None:
        """Before a chunk is sent to a reused slot, wait until the slot is free."""
        slots, ring = self.slots, self.slots.ring
        if slots.reuses_slots:

            @pl.when((step >= slots.slots_per_direction) & (step < ring.hops))
            def _() -> None:
                for lane in range(len(ring.directions)):
                    pl.semaphore_wait(self.slot_free.at[lane], 1)

    def _release_slots(self, step: jax.Array) -> None:
        """Signal to the senders that the slots of this step are free."""
        slots, ring = self.slots, self.slots.ring
        if slots.reuses_slots:

            @pl.when(step + slots.slots_per_direction <= ring.hops)
            def _() -> None:
                for lane, direction_of in enumerate(ring.directions):
                    ring.signal(self.slot_free.at[lane], -direction_of)

    def _wait_for_halves(self) -> None:
        for lane in range(2):
            self._half_copy(self.slots.ring.hops, lane).wait_recv()

    def _wait_for_arrivals(self, step: Index) -> None:
        for lane in range(len(self.slots.ring.directions)):
            chunk = self.chunks.at[self._slot(step, lane)]
            self._copy(
                chunk, chunk, lane, remainder(step - 1, self.slots.slots_per_direction)
            ).wait_recv()

    def _arrivals(self, step: Index) -> list[ArrivedChunk]:
        ring = self.slots.ring
        return [
            ArrivedChunk(
                self.chunks.at[self._slot(step, lane)],
                ring.index_after(-direction_of * step),
            )
            for lane, direction_of in enumerate(ring.directions)
        ]

    def _slot(self, hop: Index, lane: int, *, devices_on: int = 0) -> Index:
        """Return the slot of the chunk that arrives by a hop, here or some devices on."""
        slots = self.slots
        if slots.keep:
            direction_of = slots.ring.directions[lane]
            return slots.ring.index_after(direction_of * (devices_on - hop))
        return lane * slots.slots_per_direction + remainder(hop - 1, slots.slots_per_direction)

    def _opposite_slot(self, *, devices_on: int = 0) -> Index:
        slots = self.slots
        if slots.keep:
            return slots.ring.index_after(slots.ring.size // 2 + devices_on)
        return slots.count - 1

    def _source(self, step: Index, lane: int) -> Ref:
        if isinstance(step, int) and step == 0:
            return self.local_chunk
        return self.chunks.at[self._slot(step, lane)]

    def _for_each_copy(self, step: Index, action: Callable[[Any], None]) -> None:
        """Call a function with the copies that start in a step."""
        ring = self.slots.ring
        for lane in range(len(ring.directions)):
            when(step < ring.hops, partial(lambda lane: action(self._chunk_copy(step, lane)), lane))
            if ring.has_opposite:
                when(
                    step == ring.hops,
                    partial(lambda lane: action(self._half_copy(step, lane)), lane),
                )

    def _chunk_copy(self, step: Index, lane: int) -> Any:
        """Return the copy of the chunk that leaves in a step."""
        target = self.chunks.at[self._slot(step + 1, lane, devices_on=1)]
        return self._copy(
            self._source(step, lane), target, lane, remainder(step, self.slots.slots_per_direction)
        )

    def _half_copy(self, step: Index, lane: int) -> Any:
        """Return the copy of half a chunk to the device opposite its source."""
        half = self.local_chunk.shape[0] // 2
        rows = pl.ds(lane * half, half)
        slot = self._opposite_slot(devices_on=self.slots.ring.directions[lane])
        source = self._source(step, lane).at[rows]
        return self._copy(source, self.chunks.at[slot, rows], lane, self.slots.slots_per_direction)

    def _copy(self, source: Ref, target: Ref, lane: int, index: Index) -> Any:
        semaphores = self.sent.at[lane, index], self.arrived.at[lane, index]
        return self.slots.ring.copy(source, target, semaphores, self.slots.ring.directions[lane])
