"""Stop on notice: SIGTERM on any host brings all hosts to a stop after the same step.

No host asks another. Each puts its own word into a small array that goes into every step, the step
takes the largest, and all hosts read it back the same number of steps later.
"""

# mypy: allow-untyped-calls

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_given = threading.Event()


@contextmanager
def listening() -> Iterator[None]:
    """Take SIGTERM for a notice, not for the end. Within another `listening`, part of it."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread can; a run started from another one just has no notice.
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is not _take:
        _given.clear()
    signal.signal(signal.SIGTERM, _take)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _take(number: int, frame: FrameType | None) -> None:
    del number, frame
    _given.set()


class Notice:
    """This host's word to all, as an array with one element for each device."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing is sent yet."""
        self._mesh = mesh

    @property
    def word(self) -> jax.Array:
        """What goes into the next step: ones from a host that was told to stop."""
        return self._stop if _given.is_set() else self._go_on

    @cached_property
    def _go_on(self) -> jax.Array:
        return self._filled(0)

    @cached_property
    def _stop(self) -> jax.Array:
        return self._filled(1)

    def _filled(self, value: int) -> jax.Array:
        spread = PartitionSpec(self._mesh.axis_names)
        one = np.full(1, value, np.int32)
        shape, sharding = (self._mesh.size,), NamedSharding(self._mesh, spread)
        return jax.make_array_from_callback(shape, sharding, lambda _: one)
