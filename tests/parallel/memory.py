"""Temporary memory of `A[B, D_Y] · W[D, F_Y]` with its gradient, from the compiler's report."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel import allgather_matmul
from tests.parallel.layouts import RING, abstract, mesh_of, spec

B, D, F = 1024, 2048, 4096

# By default the CPU compiler starts whatever is ready, to keep its threads busy, and pays with
# memory. Accelerators schedule with memory in mind, and so does this.
SCHEDULE_FOR_MEMORY: dict[str, bool | int | str] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}


def temporary_mebibytes(size: int, **options: Any) -> float:
    """MiB of temporaries of value and gradient; without options, of `all_gather` and matmul."""
    mesh, _ = mesh_of((size,), 0)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        if options:
            return allgather_matmul(x, w, axis_name=RING, **options)
        whole: jax.Array = lax.all_gather(x, RING, axis=1, tiled=True)
        return whole @ w

    sharded = spec(None, RING)
    product = jax.shard_map(local, mesh=mesh, in_specs=(sharded, sharded), out_specs=sharded)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(product(x, w) ** 2)

    sharding = jax.NamedSharding(mesh, sharded)
    arrays = [abstract(shape, jnp.float32, sharding) for shape in ((B, D), (D, F))]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=SCHEDULE_FOR_MEMORY)
    report = step.lower(*arrays).compile().memory_analysis()
    assert report is not None
    return float(report.temp_size_in_bytes) / 2**20
