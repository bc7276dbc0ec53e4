"""How hosts come to know the same thing before they act on it. With one host there is no talk."""

import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils

_MOST = 1024
_MEETING = 1800
"""Seconds. Of two hosts that compile the same program, one may have found it in a cache."""

_meetings = itertools.count()


def meet() -> None:
    """Go on when all hosts are here.

    Unlike a collective, which on CPUs gives up after 30 seconds, this has the patience for a host
    that is still compiling, or reading its data.
    """
    if jax.process_count() > 1:
        wait = ocp.multihost.get_barrier_sync_fn()
        wait(key=f"drumline-{next(_meetings)}", timeout_ms=1000 * _MEETING)


def as_host_0_says(numbers: list[int]) -> list[int]:
    """Host 0's list, on every host; at most the last 1,024 of it."""
    if jax.process_count() == 1:
        return numbers
    told = np.full(_MOST, -1, np.int32)
    numbers = numbers[-_MOST:]
    told[: len(numbers)] = numbers
    heard = np.asarray(multihost_utils.broadcast_one_to_all(told))
    return [int(number) for number in heard if number >= 0]


def hosts_without(good: bool) -> list[int]:
    """The hosts on which something is not good, on every host."""
    if jax.process_count() == 1:
        return [] if good else [0]
    heard = np.asarray(multihost_utils.process_allgather(np.int32(good)))
    return [host for host, well in enumerate(heard.reshape(-1)) if not well]
