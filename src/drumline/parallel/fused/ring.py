"""The ring of a mesh axis from inside a kernel, and the gather of chunks on it.

A hop is a remote copy of a chunk to a neighbour. In a unidirectional ring, every chunk makes n-1
hops. In a bidirectional ring, it makes n/2 hops in each direction: a pair of chunks arrives in a
step, and the matmuls of this pair overlap with the hops of the next. With an even number of
devices, the opposite device receives half of the chunk from each side.

A chunk is written to HBM once. The device sends and multiplies it from there. A hop starts before
the matmuls of the chunks that have already arrived, and the device waits for it after them.

A direction has `SLOTS` slots, so a neighbour can be a step ahead or behind without waiting: a chunk
is sent to a slot whose previous chunk was multiplied a full step earlier. Semaphores (`slot_free`)
guarantee this. Rings of at most eight devices use no more than the n-1 slots of a gathered array,
larger rings seven.
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
    """The ring of some mesh axes inside a kernel.

    Attributes:
        axis_name: the axis or axes of the ring.
        size: the number of devices.
        direction: `"both"` or `"one"`.
        mesh: all axes of the mesh, which number the devices in kernels.
        cores: the number of cores of a device, which share its matmuls. The first core sends and
            receives, because a copy signals the semaphores of a single core.
    """

    axis_name: AxisName
    size: int
    direction: Direction
    mesh: tuple[str, ...]
    cores: int = 1

    @property
    def directions(self) -> tuple[int, ...]:
        """The directions in use: 1, -1 or both."""
        return (1, -1) if self.direction == "both" else (1,)

    @property
    def hops(self) -> int:
        """The number of hops of a full chunk in a direction."""
        return (self.size - 1) // 2 if self.direction == "both" else self.size - 1

    @property
    def has_opposite(self) -> bool:
        """True if there is an opposite device, whose chunk arrives in halves by an extra hop."""
        return self.direction == "both" and self.size % 2 == 0

    @property
    def collective_id(self) -> int:
        """The index of the barrier's semaphore, which differs for every set of axes.

        Kernels on the same ring may share it. A device that leaves a kernel has received data from
        every device of the ring, so all have passed the barrier. Rings over other axes have other
        neighbours, which may be a kernel ahead.
        """
        return sum(1 << self.mesh.index(name) for name in as_axis_tuple(self.axis_name))

    def device_index(self) -> jax.Array:
        """Return the index of this device on the ring."""
        return lax.axis_index(self.axis_name).astype(jnp.int32)

    def index_after(self, steps: Index) -> jax.Array:
        """Return the index of the device after some steps, at least minus the size."""
        return lax.rem(self.device_index() + steps + self.size, jnp.int32(self.size))

    def device_id(self, steps: Index) -> tuple[jax.Array, ...]:
        """Return the device after some steps, as its index along every axis of the mesh.

        JAX accepts this tuple as `DeviceIdType.MESH`, a deprecated name. It would interpret an
        integer as an index over the full mesh.
        """
        index = self.index_after(steps)
        names = as_axis_tuple(self.axis_name)
        indices = {}
        for position, name in enumerate(names):
            inner = prod(int(lax.axis_size(other)) for other in names[position + 1 :])
            indices[name] = lax.rem(index // inner, jnp.int32(lax.axis_size(name)))
        return tuple(
            indices[name] if name in indices else lax.axis_index(name).astype(jnp.int32)
            for name in self.mesh
        )

    def wait_for_neighbours(self) -> None:
        """Wait until the neighbours have entered this kernel and allocated their buffers."""
        barrier = pltpu.get_barrier_semaphore()  # type: ignore[no-untyped-call]
        self.signal(barrier, 1)
        self.signal(barrier, -1)
        pl.semaphore_wait(barrier, 2)

    def signal(self, semaphore: Ref, steps: Index) -> None:
        """Increment a semaphore of the device after some steps."""
        pl.semaphore_signal(semaphore, 1, device_id=self.device_id(steps))

    def on_first_core(self, action: Callable[[], None]) -> None:
        """Run an action on the first core only. Usable as a decorator."""
        when(self.cores == 1 or pl.program_id(0) == 0, action)

    def sync_cores(self, semaphore: Ref) -> None:
        """Wait for all cores of this device."""
        if self.cores == 1:
            return
        device_index = pl.program_id(0)
        for core in range(self.cores):

            @pl.when(core != device_index)
            def _(core: int = core) -> None:
                pl.semaphore_signal(semaphore, 1, core_index=core)

        pl.semaphore_wait(semaphore, self.cores - 1)

    def copy(self, source: Ref, target: Ref, semaphores: tuple[Ref, Ref], steps: Index) -> Any:
        """Return a copy to a buffer of this kernel on another device, without starting it.

        Args:
            source: the local buffer.
            target: the remote buffer.
            semaphores: the local semaphore of sent data, and the remote one of arrived data.
            steps: the steps to the other device.
        """
        return pltpu.make_async_remote_copy(
            source, target, *semaphores, device_id=self.device_id(steps)
        )


def when(condition: bool | jax.Array, action: Callable[[], None]) -> None:
    """Run an action if a condition holds. The condition may be a value on the device."""
    if isinstance(condition, bool):
        if condition:
            action()
    else:
        pl.when(condition)(action)


def remainder(index: Index, divisor: int) -> Index:
    """Return the remainder of a non-negative number."""
    return index % divisor if isinstance(index, int) else lax.rem(index, jnp.int32(divisor))


SLOTS = 3
"""The slots per direction: for a chunk to multiply, a chunk to send and a chunk that arrives."""


class ArrivedChunk(NamedTuple):
    """A chunk that has arrived in HBM, and the index of its source device."""

    chunk: Ref
    source: jax.Array


Visit = Callable[[list[ArrivedChunk], bool, bool], None]
"""A function of the chunks of a step and two flags: the first step, the last step."""


@dataclass(frozen=True)
class Slots:
    """The slots in which chunks arrive.

    Attributes:
        ring: the ring.
        keep: True to store every chunk at the index of its source. The slots are then the gathered
            array.
    """

    ring: KernelRing
    keep: bool

    @property
    def slots_per_direction(self) -> int:
        """The number of slots for full chunks per direction."""
        return self.ring.hops if self.keep else min(self.ring.hops, SLOTS)

    @property
    def count(self) -> int:
        """The total number of slots."""
        if self.keep:
            return self.ring.size
        return len(self.ring.directions) * self.slots_per_direction + self.ring.has_opposite

    @property
    def reuses_slots(self) -> bool:
        """True if senders must wait for free slots."""
        return self.slots_per_direction < self.ring.hops

    def semaphores(self) -> list[Any]:
        """Return the semaphores of sent chunks, arrived chunks and free slots."""
        shape = (len(self.ring.directions), self.slots_per_direction + 1)
        dma = pltpu.SemaphoreType.DMA
        return [dma(shape), dma(shape), pltpu.SemaphoreType.REGULAR((len(self.ring.directions),))]


@dataclass(frozen=True)
class ChunkGather:
    """The gather of all chunks on a device, inside a kernel."""

    slots: Slots
    local_chunk: Ref
    chunks: Ref
    sent: Ref
    arrived: Ref
    slot_free: Ref
    cores: Ref

    def run(self, visit: Visit) -> None:
        """Send the chunks around the ring and visit every chunk."""
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
        """Wait until the slots to send to are free."""
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
                for lane, direction in enumerate(ring.directions):
                    ring.signal(self.slot_free.at[lane], -direction)

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
                ring.index_after(-direction * step),
            )
            for lane, direction in enumerate(ring.directions)
        ]

    def _slot(self, hop: Index, lane: int, *, devices_on: int = 0) -> Index:
        """Return the slot of the chunk that arrives by a hop, here or `devices_on` devices on."""
        slots = self.slots
        if slots.keep:
            direction = slots.ring.directions[lane]
            return slots.ring.index_after(direction * (devices_on - hop))
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
        """Apply an action to the copies that start in a step."""
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
        """Return the copy of half a chunk to the opposite device."""
        half = self.local_chunk.shape[0] // 2
        rows = pl.ds(lane * half, half)
        slot = self._opposite_slot(devices_on=self.slots.ring.directions[lane])
        source = self._source(step, lane).at[rows]
        return self._copy(source, self.chunks.at[slot, rows], lane, self.slots.slots_per_direction)

    def _copy(self, source: Ref, target: Ref, lane: int, index: Index) -> Any:
        semaphores = self.sent.at[lane, index], self.arrived.at[lane, index]
        return self.slots.ring.copy(source, target, semaphores, self.slots.ring.directions[lane])
