"""Agreement between hosts: a barrier, broadcasts, and the request to stop.

With one host no function here communicates.
"""

# mypy: allow-untyped-calls

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MAX_NUMBERS = 1024
_BARRIER_SECONDS = 1800
"""The timeout of `barrier`. The compilation cache may differ between hosts."""

_barriers = itertools.count()


def connect_hosts(mesh: Mesh) -> None:
    """Connect all hosts and all devices once, without the lines that Gloo prints then.

    On CPUs, XLA's library Gloo prints "Rank 0 is connected to 1 peer ranks" to standard output for
    every new group of devices.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    sys.stdout.flush()
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        multihost_utils.process_allgather(np.int32(0))
        replicated = NamedSharding(mesh, PartitionSpec())
        jax.jit(jnp.max, out_shardings=replicated)(StopFlag(mesh).array).block_until_ready()
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)


def barrier() -> None:
    """Wait until all hosts get here.

    A collective times out after 30 seconds on CPUs. This waits long enough for a host that still
    compiles or reads its data.
    """
    if jax.process_count() > 1:
        wait = ocp.multihost.get_barrier_sync_fn()
        wait(key=f"drumline-{next(_barriers)}", timeout_ms=1000 * _BARRIER_SECONDS)


def broadcast_from_host_0(numbers: list[int]) -> list[int]:
    """Return the list of host 0 on every host, or its last 1,024 numbers if it is longer."""
    if jax.process_count() == 1:
        return numbers
    padded = np.full(_MAX_NUMBERS, -1, np.int32)
    numbers = numbers[-_MAX_NUMBERS:]
    padded[: len(numbers)] = numbers
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return [int(number) for number in received if number >= 0]


def failed_hosts(ok: bool) -> list[int]:
    """Return, on every host, the hosts that passed False."""
    if jax.process_count() == 1:
        return [] if ok else [0]
    flags = np.asarray(multihost_utils.process_allgather(np.int32(ok)))
    return [host for host, flag in enumerate(flags.reshape(-1)) if not flag]


def max_over_hosts(values: Sequence[float]) -> list[float]:
    """Return, on every host, the largest of each value over all hosts."""
    if jax.process_count() == 1:
        return list(values)
    gathered = np.asarray(multihost_utils.process_allgather(np.asarray(values, np.float32)))
    return [float(value) for value in gathered.reshape(-1, len(values)).max(axis=0)]


# The request to stop ------------------------------------------------------------------------------

_stop_requested = threading.Event()


@contextmanager
def catch_sigterm() -> Iterator[None]:
    """Treat SIGTERM as a request to stop at the next step. Contexts may be nested."""
    if threading.current_thread() is not threading.main_thread():
        # Python allows signal handlers in the main thread only. Other threads have none.
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    if previous is not _request_stop:
        _stop_requested.clear()
    signal.signal(signal.SIGTERM, _request_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _request_stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    _stop_requested.set()


class StopFlag:
    """An input of every step by which all hosts stop after the same step.

    It has one element for each device, and a host sets its elements to 1 once it gets SIGTERM. The
    step returns the maximum, which all hosts read the same number of steps later.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Use the devices of this mesh."""
        self._mesh = mesh

    @property
    def array(self) -> jax.Array:
        """The input of the next step."""
        return self._ones if _stop_requested.is_set() else self._zeros

    @cached_property
    def _zeros(self) -> jax.Array:
        return self._fill(0)

    @cached_property
    def _ones(self) -> jax.Array:
        return self._fill(1)

    def _fill(self, value: int) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        element = np.full(1, value, np.int32)
        return jax.make_array_from_callback((self._mesh.size,), sharding, lambda _: element)
