"""Problem 2, step 2: the local version under plain jit, with everything sharded.

    python examples/chapter/problem_2_2_jit.py

Prints what the compiler decided to communicate: the experts of every device are gathered whole,
and the sorted tokens, all S of them, are made whole by an all-reduce.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel.experts import expert_matmul

S, D, F, E = 512, 64, 128, 16


def main() -> None:
    """Compile with shardings, print the collectives and the time."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("X", "Y"))
    rng = np.random.default_rng(0)
    operands = [
        jax.device_put(
            rng.normal(size=(S, D)).astype(np.float32), NamedSharding(mesh, P("X", "Y"))
        ),
        jax.device_put(
            rng.normal(size=(E, D, F)).astype(np.float32), NamedSharding(mesh, P("X", None, "Y"))
        ),
        jax.device_put(rng.integers(0, E, S).astype(np.int32), NamedSharding(mesh, P("X"))),
    ]
    out = NamedSharding(mesh, P("X", "Y"))
    compiled = jax.jit(expert_matmul, out_shardings=out).lower(*operands).compile()
    kinds = r"= \(?(\w+\[[\d,]*\]).* (all-[a-z-]+|reduce-scatter|collective-permute)\("
    for shape, kind in re.findall(kinds, str(compiled.as_text())):
        print(f"{kind:20s} {shape}")
    print(f"a device holds f32[{S // 4},{D // 2}] of A and f32[{E // 4},{D},{F // 2}] of W")
    jax.block_until_ready(compiled(*operands))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    print(f"{1e3 * (time.perf_counter() - start):.1f} ms on emulated devices")


if __name__ == "__main__":
    main()
