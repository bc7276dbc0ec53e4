"""Problem 3.2: a reduce-scatter matmul, Tmp[B_X, F_Y] · W[F_Y, D] → Out[B_X, D_Y], overlapped.

    python examples/chapter/problem_3_2_reducescatter_matmul.py

What to see: plain jit makes an all-reduce of the full matmul and slices it. `psum_scatter`
sends half of that, but waits for the matmul. `matmul_reducescatter` moves the sum of each owner
around the ring, and each device adds its term: only permutes, and only of sums that are still
needed.
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
from collectives import bytes_sent, collectives, error
from jax.sharding import PartitionSpec as P

from drumline.parallel import matmul_reducescatter

B, F, D = 128, 512, 256
rng = np.random.default_rng(0)
T = rng.normal(size=(B, F)).astype(np.float32)
W = rng.normal(size=(F, D)).astype(np.float32)
exact = T.astype(np.float64) @ W.astype(np.float64)


def plain(t: jax.Array, w: jax.Array) -> jax.Array:
    """Leave the communication to XLA."""
    return jnp.einsum("bf,fd->bd", t, w, out_sharding=P("X", "Y"))


def naive(t: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then reduce-scatter over Y."""
    out: jax.Array = jax.lax.psum_scatter(t @ w, "Y", scatter_dimension=1, tiled=True)
    return out


mesh = jax.make_mesh((2, 4), ("X", "Y"))
with jax.set_mesh(mesh):
    t, w = jax.device_put(T, P("X", "Y")), jax.device_put(W, P("Y", None))
    on_shards = jax.shard_map(in_specs=(P("X", "Y"), P("Y")), out_specs=P("X", "Y"))
    ring = on_shards(partial(matmul_reducescatter, axis_name="Y", loop="unrolled"))
    versions: dict[str, Callable[..., jax.Array]] = {
        "plain jit": plain,
        "psum_scatter": on_shards(naive),
        "matmul_reducescatter": ring,
    }
    for name, function in versions.items():
        compiled = jax.jit(function).lower(t, w).compile()
        print(f"{name}: {collectives(compiled)}; {error(compiled(t, w), exact)}")
    sent = " and ".join(f"{count:,}" for count in bytes_sent(jax.jit(ring).lower(t, w)))
    result_bytes = B // 2 * D * 4
    print(f"bytes sent by the ring in each direction: {sent}")
    print(
        f"the minimum is 3/4 of the {result_bytes:,} bytes of X's result, half of it in each "
        "direction"
    )
