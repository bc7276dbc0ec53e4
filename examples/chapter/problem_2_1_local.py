"""Problem 2, step 1: experts on one device, with no array of [S, D, F] nor of [E, S, D].

    python examples/chapter/problem_2_1_local.py

Prints the largest error against a loop over tokens, and that nothing was communicated.
The chapter hints at a buffer of [E, S, D] with masks, S long since one expert may get every token.
Sorting the tokens by expert needs only [S, D]: each expert's tokens become one run of rows.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
from collections import Counter

import jax
import numpy as np

from drumline.parallel.experts import expert_matmul

S, D, F, E = 512, 64, 128, 16


def main() -> None:
    """Multiply, compare, and look at the compiled program."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(S, D)).astype(np.float32)
    w = rng.normal(size=(E, D, F)).astype(np.float32)
    b = rng.integers(0, E, S).astype(np.int32)
    compiled = jax.jit(expert_matmul).lower(a, w, b).compile()
    expected = np.stack([a[i].astype(np.float64) @ w[b[i]] for i in range(S)])
    print(f"largest error: {np.abs(compiled(a, w, b) - expected).max():.1e}")
    text = str(compiled.as_text())
    print("collectives:", dict(Counter(re.findall(r" (all-\w+|reduce-scatter)\(", text))) or "none")
    print("an array of [S, D, F]:", f"[{S},{D},{F}]" in text)
    print("an array of [E, S, D]:", f"[{E},{S},{D}]" in text)


if __name__ == "__main__":
    main()
