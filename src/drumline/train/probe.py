"""A short computation that should give the same bits on every device in the same time.

Its inputs are generated on the chip and there is no communication. So a host waits only for its own
devices, and its time is that of its slowest device. On TPUs and GPUs the probe is eight matmuls of
2048³, about half a millisecond. On CPU devices it is tiny, because its time is meaningless there.
"""

# mypy: allow-untyped-calls

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from drumline.health.emulated import inject_compute_fault
from drumline.train.checksums import digest, gather_rows
from drumline.train.state import replicate

SIZE, MATMULS = 2048, 8
SIZE_ON_CPU = 32


def probe_devices(mesh: Mesh, step: int) -> tuple[dict[int, bytes], list[float]]:
    """Return the checksum of each device by its id, and the seconds that each host waited."""
    program = _program(mesh)
    start = time.perf_counter()
    rows = jax.block_until_ready(program())
    seconds = time.perf_counter() - start
    sums = gather_rows(mesh, inject_compute_fault(rows, step=step))
    seconds_by_host = [seconds]
    if jax.process_count() > 1:
        gathered = multihost_utils.process_allgather(np.float32(seconds))
        seconds_by_host = np.asarray(gathered).reshape(-1).tolist()
    checksums = {int(d.id): row.tobytes() for d, row in zip(mesh.devices.flat, sums, strict=True)}
    return checksums, seconds_by_host


@lru_cache(maxsize=4)
def _program(mesh: Mesh) -> Any:
    size = SIZE_ON_CPU if mesh.devices.flat[0].platform == "cpu" else SIZE

    def compute(seed: jax.Array) -> jax.Array:
        x, w = _generate(size, seed + np.uint32(1)), _generate(size, seed + np.uint32(2))

        def matmul(_: int, x: jax.Array) -> jax.Array:
            # tanh limits the values, so that no matmul overflows.
            y = jnp.dot(x, w, preferred_element_type=jnp.float32)
            return jnp.tanh(y / size**0.5).astype(x.dtype)

        return digest([lax.fori_loop(0, MATMULS, matmul, x)])

    unsharded, per_device = PartitionSpec(), PartitionSpec(mesh.axis_names)
    program = jax.shard_map(
        compute, mesh=mesh, in_specs=unsharded, out_specs=per_device, check_vma=False
    )
    # The seed is an input, so that the compiler cannot compute the result itself.
    compiled, seed = jax.jit(program), replicate(mesh, np.zeros((), np.uint32))
    # The first call compiles.
    jax.block_until_ready(compiled(seed))
    return partial(compiled, seed)


def _generate(size: int, seed: jax.Array) -> jax.Array:
    """Generate a matrix of numbers between -1.7 and 1.7 by hashing their indices."""
    index = lax.iota(jnp.uint32, size * size) * np.uint32(2) + seed
    word = index * np.uint32(0x9E3779B1)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    unit = (word >> np.uint32(16)).astype(jnp.float32) / 2**15 - 1
    return (1.7 * unit).astype(jnp.bfloat16).reshape(size, size)


# Slow hosts ---------------------------------------------------------------------------------------

SLOW_FACTOR, SLOW_CHECKS = 1.2, 20
"""A host is slow if it takes this many times the median of the other hosts in this many checks in a
row."""
VERY_SLOW_FACTOR, VERY_SLOW_CHECKS = 3.0, 5
"""A host that is far slower is reported sooner."""


class SlowHosts:
    """Finds hosts that are slower than the others. A slow host is logged, and is not a fault."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._counts: dict[int, tuple[int, int]] = {}
        self._reported: set[int] = set()

    def update(self, seconds: Sequence[float]) -> list[str]:
        """Add the time of each host in one check. Return a message for each newly slow host."""
        messages = []
        for host, host_seconds in enumerate(seconds):
            # The median is that of the other hosts, because with two hosts the slow one's own time
            # would hide half of the difference.
            others = [*seconds[:host], *seconds[host + 1 :]]
            ratio = host_seconds / max(median(others), 1e-9) if others else 1.0
            slow, very_slow = self._counts.get(host, (0, 0))
            slow = slow + 1 if ratio > SLOW_FACTOR else 0
            very_slow = very_slow + 1 if ratio > VERY_SLOW_FACTOR else 0
            self._counts[host] = slow, very_slow
            is_slow = slow >= SLOW_CHECKS or very_slow >= VERY_SLOW_CHECKS
            if host not in self._reported and is_slow:
                self._reported.add(host)
                checks = SLOW_CHECKS if slow >= SLOW_CHECKS else VERY_SLOW_CHECKS
                messages.append(
                    f"host {host} is slow: it takes {ratio:.2f} times as long as the other hosts "
                    f"for the same matmuls, as in each of the last {checks} checks"
                )
        return messages
