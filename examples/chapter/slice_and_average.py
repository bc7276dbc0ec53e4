"""The chapter's third snippet: a function of one device's shard, with `shard_map`.

    python examples/chapter/slice_and_average.py

What to see: four numbers, each the mean of eight elements that are 64 apart, from one all-reduce.

The chapter imports `jax.experimental.shard_map` and calls `jax.sharding.set_mesh`. Both are now
`jax.shard_map` and `jax.set_mesh`.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from collectives import collectives, error
from jax.sharding import PartitionSpec as P

values = np.random.default_rng(0).normal(size=512).astype(np.float32)


def slice_and_average(x: jax.Array) -> jax.Array:
    """Return the mean over all devices of the first four numbers on each."""
    assert x.shape == (512 // 8,)
    mean: jax.Array = jax.lax.pmean(x[:4], ("x", "y"))
    return mean


mesh = jax.make_mesh((2, 4), ("x", "y"))
with jax.set_mesh(mesh):
    x = jax.device_put(values, P(("x", "y")))
    mapped = jax.jit(jax.shard_map(slice_and_average, in_specs=P(("x", "y")), out_specs=P()))
    compiled = mapped.lower(x).compile()
    out = compiled(x)

exact = values.astype(np.float64).reshape(8, 64)[:, :4].mean(0)
print(f"result {out.shape}: {collectives(compiled)}; {error(out, exact)}")
