"""Problem 2, step 3.2: shard_map where tokens travel to their experts in rounds.

    python examples/chapter/problem_2_3_2_alltoall.py

A `while_loop` around `all_to_all`: a round moves a fixed buffer, and there are as many rounds as
the fullest pair of devices needs. Skew costs rounds and never memory, and no token is dropped.
Prints error, communication, temporary memory and time for an even and for a hopeless assignment.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import time
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.experts import expert_matmul

S, D, F, E = 4096, 64, 128, 16


def main() -> None:
    """Run both assignments through one compiled program."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("X", "Y"))
    rng = np.random.default_rng(0)
    a = rng.normal(size=(S, D)).astype(np.float32)
    w = rng.normal(size=(E, D, F)).astype(np.float32)
    function = jax.shard_map(
        partial(expert_matmul, axis_name="X", gather_axis_name="Y", exchange="alltoall"),
        mesh=mesh,
        in_specs=(P("X", "Y"), P("X", None, "Y"), P("X")),
        out_specs=P("X", "Y"),
    )
    jitted = jax.jit(function)
    compiled = jitted.lower(a, w, np.zeros(S, np.int32)).compile()
    kinds = r"= \(?(\w+\[[\d,]*\]).* (all-[a-z-]+|reduce-scatter|collective-permute)\("
    for shape, kind in re.findall(kinds, str(compiled.as_text())):
        print(f"{kind:20s} {shape}")
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(f"temporaries of a device: {temporary / 1024:.0f} KiB; whole A: {S * D * 4 // 1024} KiB")
    for name, b in {"even": np.arange(S) % E, "all to one": np.zeros(S)}.items():
        b = b.astype(np.int32)
        out = jax.block_until_ready(jitted(a, w, b))
        start = time.perf_counter()
        jax.block_until_ready(jitted(a, w, b))
        took = 1e3 * (time.perf_counter() - start)
        expected = np.stack([a[i].astype(np.float64) @ w[b[i]] for i in range(S)])
        print(f"{name}: largest error {np.abs(out - expected).max():.1e}, {took:.1f} ms")


if __name__ == "__main__":
    main()
