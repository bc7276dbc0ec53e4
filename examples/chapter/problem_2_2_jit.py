"""Problem 2.2: the same function under plain jit, with W[E_X, D, F_Y], A[S_X, D_Y] and B[S_X].

    python examples/chapter/problem_2_2_jit.py

What to see: jit cannot know which device needs a token, so every device gets all experts of W
and all sorted tokens. The memory does not shrink with more devices.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re

import jax
import numpy as np
from collectives import collectives, error, milliseconds
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import expert_matmul

S, D, F, E = 512, 64, 128, 16
rng = np.random.default_rng(0)
A = rng.normal(size=(S, D)).astype(np.float32)
W = rng.normal(size=(E, D, F)).astype(np.float32)
B = rng.integers(0, E, S).astype(np.int32)
exact = np.stack([a.astype(np.float64) @ W[b] for a, b in zip(A, B, strict=True)])

mesh = jax.make_mesh((4, 2), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
specs = (P("X", "Y"), P("X", None, "Y"), P("X"))
arrays = [
    jax.device_put(array, NamedSharding(mesh, spec))
    for array, spec in zip((A, W, B), specs, strict=True)
]
jitted = jax.jit(expert_matmul, out_shardings=NamedSharding(mesh, P("X", "Y")))
compiled = jitted.lower(*arrays).compile()
summary = f"{collectives(compiled)}; {error(compiled(*arrays), exact)}"
print(f"plain jit: {summary}; {milliseconds(compiled, *arrays)}")
shapes = re.findall(r"= \(?f32\[([\d,]+)\]\S* (?:all-gather|all-reduce)\(", str(compiled.as_text()))
print(f"whole on every device: every expert {f'{E},{D},{F // 2}' in shapes}", end=", ")
print(f"every token {f'{S},{D // 2}' in shapes}")
