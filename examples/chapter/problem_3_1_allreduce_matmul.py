"""Problem 3.1: an all-reduce matmul, A[B_X, D_Y] · W[D_Y, F] → Out[B_X, F], overlapped.

    python examples/chapter/problem_3_1_allreduce_matmul.py

What to see: the naive version has one all-reduce, which waits for the full matmul. So has the
chapter's hint, a `psum` for each of four tiles, because XLA merges them. `matmul_allreduce` is a
ring reduce-scatter and a ring all-gather. Its program has only permutes, and the sums are sent
while the next block is multiplied.
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
from collectives import collectives, error
from jax.sharding import PartitionSpec as P

from drumline.parallel import matmul_allreduce

B, D, F = 128, 256, 512
rng = np.random.default_rng(0)
A = rng.normal(size=(B, D)).astype(np.float32)
W = rng.normal(size=(D, F)).astype(np.float32)
exact = A.astype(np.float64) @ W.astype(np.float64)


def naive(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then sum over Y."""
    out: jax.Array = jax.lax.psum(a @ w, "Y")
    return out


def tiled(a: jax.Array, w: jax.Array) -> jax.Array:
    """Sum each quarter of the columns while the next one is multiplied (the chapter's hint)."""
    return jnp.concatenate([naive(a, columns) for columns in jnp.split(w, 4, axis=1)], axis=1)


mesh = jax.make_mesh((2, 4), ("X", "Y"))
with jax.set_mesh(mesh):
    a, w = jax.device_put(A, P("X", "Y")), jax.device_put(W, P("Y", None))
    versions: dict[str, Callable[..., jax.Array]] = {
        "naive": naive,
        "tiled psum": tiled,
        "matmul_allreduce": partial(matmul_allreduce, axis_name="Y", loop="unrolled"),
    }
    for name, function in versions.items():
        mapped = jax.shard_map(function, in_specs=(P("X", "Y"), P("Y")), out_specs=P("X"))
        compiled = jax.jit(mapped).lower(a, w).compile()
        print(f"{name}: {collectives(compiled)}; {error(compiled(a, w), exact)}")
