"""Problem 4: the all-reduce and the reduce-scatter matmul, in both directions of the ring.

    python examples/chapter/problem_4_both_directions.py

What to see: with `direction="both"` there are two streams of half the bytes instead of one, in
opposite directions, so a link with two independent directions needs half the time. Emulated devices
have no links, and the times are for the record only. On a GPU expect no gain, because permutes in
opposite directions run one after the other.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

import jax
import numpy as np
from collectives import bytes_sent, error, milliseconds
from jax.sharding import PartitionSpec as P

from drumline.parallel import matmul_allreduce, matmul_reducescatter

B, F, D = 128, 512, 256
rng = np.random.default_rng(0)
T = rng.normal(size=(B, F)).astype(np.float32)
W = rng.normal(size=(F, D)).astype(np.float32)
exact = T.astype(np.float64) @ W.astype(np.float64)

mesh = jax.make_mesh((2, 4), ("X", "Y"))
with jax.set_mesh(mesh):
    t, w = jax.device_put(T, P("X", "Y")), jax.device_put(W, P("Y", None))
    for function, out in ((matmul_allreduce, P("X")), (matmul_reducescatter, P("X", "Y"))):
        for direction in ("one", "both"):
            ring = partial(function, axis_name="Y", direction=direction, loop="unrolled")
            mapped = jax.shard_map(ring, in_specs=(P("X", "Y"), P("Y")), out_specs=out)
            lowered = jax.jit(mapped).lower(t, w)
            compiled = lowered.compile()
            streams = " and ".join(f"{count:,}" for count in bytes_sent(lowered))
            summary = f"bytes sent {streams}; {error(compiled(t, w), exact)}"
            print(f"{function.__name__} {direction}: {summary}; {milliseconds(compiled, t, w)}")
