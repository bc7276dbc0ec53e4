"""The chapter's second snippet: `with_sharding_constraint` on the value between two matmuls.

    python examples/chapter/sharding_constraint.py

What to see: the constraint changes how XLA shards the matmul, and with it the collectives. On
Explicit axes a sharding is part of the type, and `with_sharding_constraint` cannot change it. There
the einsum's own `out_sharding` has the same effect.

The chapter's constraint names axes 'x' and 'y' of a mesh that has 'X' and 'Y'.
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
X, IN, OUT = (
    rng.normal(size=size).astype(np.float32) for size in ((64, 128), (128, 256), (128, 256))
)
exact = X.astype(np.float64) @ IN.astype(np.float64) @ OUT.T.astype(np.float64)

auto = jax.make_mesh((4, 2), ("X", "Y"), (AxisType.Auto, AxisType.Auto))


def unconstrained(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Leave the sharding of the hidden activations to XLA."""
    return jnp.einsum("bf,df->bd", jnp.einsum("bd,df->bf", x, w_in), w_out)


def constrained(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Constrain the sharding of the hidden activations."""
    hidden = jnp.einsum("bd,df->bf", x, w_in)
    hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(auto, P("X", "Y")))
    return jnp.einsum("bf,df->bd", hidden, w_out)


def explicit(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Declare the same sharding on Explicit axes."""
    hidden = jnp.einsum("bd,df->bf", x, w_in, out_sharding=P("X", "Y"))
    return jnp.einsum("bf,df->bd", hidden, w_out, out_sharding=P("X"))


# Rows are sharded over X, and weights are replicated.
shardings = (NamedSharding(auto, P("X")), NamedSharding(auto, P()), NamedSharding(auto, P()))
arrays = jax.device_put((X, IN, OUT), shardings)
for name, function in (("free", unconstrained), ("constrained", constrained)):
    compiled = jax.jit(function, out_shardings=shardings[0]).lower(*arrays).compile()
    print(f"{name}: {collectives(compiled)}; {error(compiled(*arrays), exact)}")

mesh = jax.make_mesh((4, 2), ("X", "Y"))
with jax.set_mesh(mesh):
    arrays = jax.device_put((X, IN, OUT), (P("X"), P(), P()))
    try:
        jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("X", "Y"))).lower(arrays[0])
    except Exception as failure:
        print(f"with_sharding_constraint on Explicit axes: {type(failure).__name__}")
    compiled = jax.jit(explicit).lower(*arrays).compile()
    print(f"explicit: {collectives(compiled)}; {error(compiled(*arrays), exact)}")
