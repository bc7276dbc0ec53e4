"""Who sends what to whom, as one device of the ring sees it from inside a kernel.

A chunk that sets out from device s reaches device s+1 after one hop, s+2 after two. One way, every
chunk makes n-1 hops. Both ways, it makes n/2 hops each way, whole, so that two chunks arrive in
each step and a step's two products hide its two hops, which use both directions of the links. With
an even number of devices the one opposite would come twice: half of its chunk comes each way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

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
