"""Problem 1.2: roll(x, shift, axis=0) - x within each shard of X.

    python examples/chapter/problem_1_2_shard_roll.py

What to see: no communication, because no shard needs data from outside, and the exact result.

The chapter's answer omits the `- x` in both of its versions, so its own comparison succeeds.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives
from jax.sharding import PartitionSpec as P

SHIFT = 5
values = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)


def roll_difference(x: jax.Array, shift: int) -> jax.Array:
    """Return the difference of one device's rolled rows and its rows."""
    return jnp.roll(x, shift, axis=0) - x


mesh = jax.make_mesh((4, 2), ("X", "Y"))
with jax.set_mesh(mesh):
    x = jax.device_put(values, P("X", "Y"))
    mapped = jax.shard_map(
        partial(roll_difference, shift=SHIFT), in_specs=P("X", "Y"), out_specs=P("X", "Y")
    )
    compiled = jax.jit(mapped).lower(x).compile()
    out = np.asarray(compiled(x))

shards = values.reshape(4, 128, 64)
exact = (np.roll(shards, SHIFT, axis=1) - shards).reshape(values.shape)
print(f"shard_map: {collectives(compiled)}; equal to numpy's: {np.array_equal(out, exact)}")
rolled_whole = np.roll(values, SHIFT, axis=0) - values
print(f"rolling the whole array would differ in {(out != rolled_whole).any(1).sum()} rows")
