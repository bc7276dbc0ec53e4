"""Problem 2.4: k experts per token, B[S, k], weighted by a router, with gradients.

    python examples/chapter/problem_2_4_top_k.py

What to see: a token is sent once to each of its experts, and the answers are summed on its own
device. The loss and the gradients of tokens, experts and gates (which use the same rounds) equal
those of applying every expert to every token.
"""

# mypy: allow-untyped-calls

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives, error
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from drumline.parallel import expert_matmul, route

S, D, F, E, K = 512, 64, 128, 16, 2
rng = np.random.default_rng(0)
A = rng.normal(size=(S, D)).astype(np.float32)
W = rng.normal(size=(E, D, F)).astype(np.float32)
routing = jax.jit(partial(route, k=K))(rng.normal(size=(S, E)).astype(np.float32))

mesh = jax.make_mesh((4, 2), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
exchanged = jax.shard_map(
    partial(expert_matmul, axis_name="X", gather_axis_name="Y"),
    mesh=mesh,
    in_specs=(P("X", "Y"), P("X", None, "Y"), P("X"), P("X")),
    out_specs=P("X", "Y"),
)


def reference(a: jax.Array, w: jax.Array, b: jax.Array, gates: jax.Array) -> jax.Array:
    """Return the same from all E matmuls of every token."""
    all_outputs = jnp.einsum("sd,edf->sef", a, w)
    chosen = jnp.take_along_axis(all_outputs, b[:, :, None], axis=1)
    return jnp.einsum("skf,sk->sf", chosen, gates)


def with_gradients(function: Callable[..., jax.Array]) -> Any:
    """Return the compiled loss of a function and its gradients."""

    def loss(a: jax.Array, w: jax.Array, gates: jax.Array) -> jax.Array:
        return jnp.mean(function(a, w, routing.experts, gates) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(A, W, routing.gates).compile()


print(f"tokens per expert: {routing.tokens_per_expert.min()} to {routing.tokens_per_expert.max()}")
compiled = with_gradients(exchanged)
print(f"alltoall with gradients: {collectives(compiled)}")
loss, gradients = compiled(A, W, routing.gates)
expected_loss, expected = with_gradients(reference)(A, W, routing.gates)
print(f"loss {loss:.4f}, by every expert {expected_loss:.4f}")
for name, gradient, expected_gradient in zip(("A", "W", "gates"), gradients, expected, strict=True):
    print(f"gradient of {name}: {error(gradient, np.asarray(expected_gradient, np.float64))}")
