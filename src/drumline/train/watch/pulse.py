"""A short product that every device computes alike: whether its bits agree, and how long it takes.

The inputs are made on the chip, so that nothing but the chip can spoil them, and nothing is
exchanged: a host waits for its own devices alone, and its time is that of its slowest. On TPUs and
GPUs it is eight products of 2048³, half a millisecond or so; on CPU devices it is next to nothing,
because there the time says nothing anyway.
"""

# mypy: allow-untyped-calls

import time
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from drumline.health.emulated import inject_compute_fault
from drumline.train.checkpoints.digest import digest
from drumline.train.state import everywhere
from drumline.train.watch.checksums import exchanged

WIDTH, TIMES = 2048, 8
WIDTH_ON_CPU = 32


def pulse(mesh: Mesh, step: int) -> tuple[dict[int, bytes], list[float]]:
    """What each device made of it, by its id, and the seconds that each host waited."""
    program = _program(mesh)
    start = time.perf_counter()
    rows = jax.block_until_ready(program())
    seconds = time.perf_counter() - start
    sums = exchanged(mesh, inject_compute_fault(rows, step=step))
    of_hosts = [seconds]
    if jax.process_count() > 1:
        heard = multihost_utils.process_allgather(np.float32(seconds))
        of_hosts = np.asarray(heard).reshape(-1).tolist()
    made = {int(d.id): row.tobytes() for d, row in zip(mesh.devices.flat, sums, strict=True)}
    return made, of_hosts


@lru_cache(maxsize=4)
def _program(mesh: Mesh) -> Any:
    width = WIDTH_ON_CPU if mesh.devices.flat[0].platform == "cpu" else WIDTH

    def of_device(seed: jax.Array) -> jax.Array:
        x, w = _drawn(width, seed + np.uint32(1)), _drawn(width, seed + np.uint32(2))

        def product(_: int, x: jax.Array) -> jax.Array:
            # Squashed back, so that every product has work to do and none overflows.
            y = jnp.dot(x, w, preferred_element_type=jnp.float32)
            return jnp.tanh(y / width**0.5).astype(x.dtype)

        return digest([lax.fori_loop(0, TIMES, product, x)])

    every = PartitionSpec(mesh.axis_names)
    here = PartitionSpec()
    whole = jax.shard_map(of_device, mesh=mesh, in_specs=here, out_specs=every, check_vma=False)
    # From a seed that the compiler does not know: it would compute the product itself.
    compiled, seed = jax.jit(whole), everywhere(mesh, np.zeros((), np.uint32))
    # The first time is the compiler's.
    jax.block_until_ready(compiled(seed))
    return partial(compiled, seed)


def _drawn(width: int, seed: jax.Array) -> jax.Array:
    """Numbers between -1.7 and 1.7, hashed from their places."""
    at = lax.iota(jnp.uint32, width * width) * np.uint32(2) + seed
    word = at * np.uint32(0x9E3779B1)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    unit = (word >> np.uint32(16)).astype(jnp.float32) / 2**15 - 1
    return (1.7 * unit).astype(jnp.bfloat16).reshape(width, width)
