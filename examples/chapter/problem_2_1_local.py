"""Problem 2.1: experts on one device, Out[i] = W[B[i]] @ A[i].

    python examples/chapter/problem_2_1_local.py

What to see: the right values without communication, and without an array of [S, D, F] or [E, S,
D]. The chapter suggests the latter with masks of length S, because one expert may get every token.
Sorting the tokens by expert needs only [S, D]: the tokens of each expert become contiguous.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from collectives import collectives, error

from drumline.parallel import expert_matmul

S, D, F, E = 512, 64, 128, 16
rng = np.random.default_rng(0)
A = rng.normal(size=(S, D)).astype(np.float32)
W = rng.normal(size=(E, D, F)).astype(np.float32)
B = rng.integers(0, E, S).astype(np.int32)
exact = np.stack([a.astype(np.float64) @ W[b] for a, b in zip(A, B, strict=True)])

compiled = jax.jit(expert_matmul).lower(A, W, B).compile()
print(f"expert_matmul: {collectives(compiled)}; {error(compiled(A, W, B), exact)}")
text = str(compiled.as_text())
print(f"an array of [S, D, F]: {f'[{S},{D},{F}]' in text}")
print(f"an array of [E, S, D]: {f'[{E},{S},{D}]' in text}")
