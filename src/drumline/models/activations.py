"""Non-linearities whose gradient keeps no more than their input.

Left to itself, differentiation keeps each factor of the derivative for the backward pass: on a GPU
that is two more arrays of the feed-forward part's width to write and to read again.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """`x · Φ(x)` in float32, Φ being the normal distribution itself and not the tanh like it."""
    wide = x.astype(jnp.float32)
    return (wide * _below(wide)).astype(x.dtype)


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # Behind the barrier nothing is known of the forward pass, so XLA keeps none of it.
    wide = lax.optimization_barrier(x).astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * math.pi) ** -0.5
    return ((g.astype(jnp.float32) * (_below(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(_forward, _backward)


def _below(x: jax.Array) -> jax.Array:
    """Φ(x), the share of a normal distribution below x."""
    return 0.5 * (1 + lax.erf(x * 0.5**0.5))
