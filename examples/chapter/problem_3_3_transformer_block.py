"""Problem 3.3: In[B_X, D_Y] · W_in[D, F_Y] · W_out[F_Y, D] → Out[B_X, D_Y], fully overlapped.

    python examples/chapter/problem_3_3_transformer_block.py

What to see: plain jit has an all-gather and an all-reduce around the two matmuls, `feedforward`
has only permutes, and both give the same values. The times are of CPU devices, whose collectives
and matmuls share the same cores. They say nothing about the gain of overlap on a TPU
(docs/overlap.md).
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives, error, milliseconds
from jax.sharding import PartitionSpec as P

from drumline.parallel import feedforward

B, D, F = 256, 256, 1024
rng = np.random.default_rng(0)
IN = rng.normal(size=(B, D)).astype(np.float32)
W_IN = rng.normal(size=(D, F)).astype(np.float32) / 16
W_OUT = rng.normal(size=(F, D)).astype(np.float32) / 32
hidden = np.maximum(IN.astype(np.float64) @ W_IN.astype(np.float64), 0)
exact = hidden @ W_OUT.astype(np.float64)


def plain(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Leave the gather and the reduction of the activations to XLA."""
    hidden = jnp.einsum("bd,df->bf", x, w_in, out_sharding=P("X", "Y"))
    return jnp.einsum("bf,fd->bd", jax.nn.relu(hidden), w_out, out_sharding=P("X", "Y"))


mesh = jax.make_mesh((2, 4), ("X", "Y"))
with jax.set_mesh(mesh):
    specs = (P("X", "Y"), P(None, "Y"), P("Y", None))
    arrays = jax.device_put((IN, W_IN, W_OUT), specs)
    block = partial(feedforward, axis_name="Y", activation=jax.nn.relu, loop="unrolled")
    versions: dict[str, Callable[..., jax.Array]] = {
        "plain jit": plain,
        "feedforward": jax.shard_map(block, in_specs=specs, out_specs=P("X", "Y")),
    }
    for name, function in versions.items():
        compiled = jax.jit(function).lower(*arrays).compile()
        summary = f"{collectives(compiled)}; {error(compiled(*arrays), exact)}"
        print(f"{name}: {summary}; {milliseconds(compiled, *arrays)}")
