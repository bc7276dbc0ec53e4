"""Problem 2.3: the experts with `shard_map` and explicit communication, in two versions.

    python examples/chapter/problem_2_3_exchange.py

What to see: the first version gathers every token on every device, which applies its own
experts, and scatters the sum of the answers. The second sends tokens to their experts with
`all_to_all` inside a `while_loop`. A round moves a fixed buffer, and the fullest pair of devices
determines the number of rounds. It needs a fraction of the memory, the same for an even assignment
and for one with all tokens on one expert: a skew costs rounds, and no token is dropped. On CPU
devices, whose messages are copies in one memory, the gather is faster if much must be sent. These
times say nothing about links.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

import jax
import numpy as np
from collectives import collectives, error, milliseconds
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import expert_matmul

S, D, F, E = 4096, 64, 128, 16
rng = np.random.default_rng(0)
A = rng.normal(size=(S, D)).astype(np.float32)
W = rng.normal(size=(E, D, F)).astype(np.float32)
assignments = {"even": np.arange(S) % E, "all to one": np.zeros(S, int)}

mesh = jax.make_mesh((4, 2), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
specs = (P("X", "Y"), P("X", None, "Y"), P("X"))
print(f"whole A: {S * D * 4 // 1024} KiB")
for exchange in ("allgather", "alltoall"):
    function = jax.shard_map(
        partial(expert_matmul, axis_name="X", gather_axis_name="Y", exchange=exchange),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("X", "Y"),
    )
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    jitted = jax.jit(function, in_shardings=shardings)
    compiled = jitted.lower(A, W, assignments["even"].astype(np.int32)).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 1024
    print(f"{exchange}: {collectives(compiled)}; temporaries of a device {temporaries:.0f} KiB")
    for name, assignment in assignments.items():
        arrays = jax.device_put((A, W, assignment.astype(np.int32)), tuple(shardings))
        exact = np.einsum("sd,sdf->sf", A.astype(np.float64), W[assignment].astype(np.float64))
        summary = f"{error(compiled(*arrays), exact)}; {milliseconds(compiled, *arrays)}"
        print(f"  {name}: {summary}")
