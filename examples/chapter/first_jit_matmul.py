"""The chapter's first snippet: a sharded matmul to which `jax.jit` adds an all-reduce.

    python examples/chapter/first_jit_matmul.py

What to see: the printed snippet raises an error, because `jax.make_mesh` now creates Explicit
axes, on which a matmul over a sharded dimension must declare the sharding of its result. With that
declaration, or on Auto axes as in the chapter, the program has one all-reduce.

The chapter's text says W[D_X, F]. Its code, and the actual program, is W[D_Y, F].
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives, error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

rng = np.random.default_rng(0)
A = rng.normal(size=(8, 2048)).astype(np.float32)
B = rng.normal(size=(2048, 512)).astype(np.float32)
exact = np.square(A, dtype=np.float64) @ B.astype(np.float64)


def matmul_square(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply like the chapter."""
    return jnp.einsum("bd,df->bf", jnp.square(x), w)


def matmul_square_declared(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply with the result's sharding declared at the einsum."""
    return jnp.einsum("bd,df->bf", jnp.square(x), w, out_sharding=P("X", None))


mesh = jax.make_mesh((2, 2), ("X", "Y"))
with jax.set_mesh(mesh):
    x, w = jax.device_put(A, P("X", "Y")), jax.device_put(B, P("Y", None))
    print("In", jax.typeof(x), " W", jax.typeof(w))
    try:
        jax.jit(matmul_square, out_shardings=P("X", None)).lower(x, w)
    except Exception as failure:
        print(f"as printed: {type(failure).__name__}")
    compiled = jax.jit(matmul_square_declared).lower(x, w).compile()
    print(f"Explicit axes: {collectives(compiled)}; {error(compiled(x, w), exact)}")

auto = jax.make_mesh((2, 2), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
x = jax.device_put(A, NamedSharding(auto, P("X", "Y")))
w = jax.device_put(B, NamedSharding(auto, P("Y", None)))
program = jax.jit(matmul_square, out_shardings=NamedSharding(auto, P("X", None)))
compiled = program.lower(x, w).compile()
print(f"Auto axes: {collectives(compiled)}; {error(compiled(x, w), exact)}")
