"""The chapter's collective matmul: A[B_X, D_Y] · W[D, F_Y] → Out[B_X, F_Y] without an all-gather.

    python examples/chapter/collective_matmul.py

What to see: plain jit has one all-gather. The chapter's ring and `allgather_matmul` have
permutes instead, three in one direction, or six of half the size in both directions. All three are
equally exact, and `drumline.parallel.einsum` picks the ring itself.

The printed snippet raises an error: its sum starts as zeros that are equal on every device and
becomes a value that is not, which `jax.lax.pcast` must declare. Its `arange` operands are int32,
whose matmuls overflow, and equal wrong numbers compare equal. Here they are floats.
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

from drumline.parallel import allgather_matmul
from drumline.parallel.einsum.sharded import einsum, explain_einsum

B, D, F = 128, 256, 512
rng = np.random.default_rng(0)
A = rng.normal(size=(B, D)).astype(np.float32)
W = rng.normal(size=(D, F)).astype(np.float32)
exact = A.astype(np.float64) @ W.astype(np.float64)


def one_way(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply the local chunk, pass it to the left neighbour, and repeat (the chapter's ring)."""
    devices, device = jax.lax.axis_size("Y"), jax.lax.axis_index("Y")
    width = a.shape[1]
    left = [(i, (i - 1) % devices) for i in range(devices)]
    out: jax.Array = jax.lax.pcast(jnp.zeros((a.shape[0], w.shape[1])), ("X", "Y"), to="varying")
    for step in range(devices):
        owner = (device + step) % devices
        out += a @ jax.lax.dynamic_slice_in_dim(w, owner * width, width)
        if step < devices - 1:
            a = jax.lax.ppermute(a, "Y", left)
    return out


def plain(a: jax.Array, w: jax.Array) -> jax.Array:
    """Leave the communication to XLA."""
    return jnp.einsum("bd,df->bf", a, w, out_sharding=P("X", "Y"))


mesh = jax.make_mesh((2, 4), ("X", "Y"))
with jax.set_mesh(mesh):
    a, w = jax.device_put(A, P("X", "Y")), jax.device_put(W, P(None, "Y"))
    on_shards = jax.shard_map(in_specs=(P("X", "Y"), P(None, "Y")), out_specs=P("X", "Y"))
    versions: dict[str, Callable[..., jax.Array]] = {
        "plain jit": plain,
        "the chapter's ring": on_shards(one_way),
        "allgather_matmul": on_shards(partial(allgather_matmul, axis_name="Y", loop="unrolled")),
        "einsum": partial(einsum, "bd,df->bf", out_sharding=P("X", "Y"), loop="unrolled"),
    }
    for name, function in versions.items():
        compiled = jax.jit(function).lower(a, w).compile()
        print(f"{name}: {collectives(compiled)}; {error(compiled(a, w), exact)}")
    print(explain_einsum("bd,df->bf", a, w, out_sharding=P("X", "Y")))

largest = int(np.arange(1024 * 2048)[-2048:] @ np.arange(2048 * 8192)[8191::8192])
print(f"the chapter's last product is {largest:.0e}, past int32's {2**31 - 1:.0e}")
