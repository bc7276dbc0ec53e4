"""Norms of vectors: by their mean square, or by mean and variance; in float32 whatever comes in."""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

EPSILON = 1e-6


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, epsilon: float
) -> Float[Array, "*rows D"]:
    """Scale each vector to a mean square of one, in float32, and by the weight."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], shift: Float[Array, " D"]
) -> Float[Array, "*rows D"]:
    """Move each vector to mean zero and variance one, in float32; then scale and shift it.

    The variance as a difference of two means, of squares and squared, takes one pass over a vector
    and loses all digits where the mean outweighs what varies. So the vector is taken from one of
    its own elements, which is never further from the mean than √D standard deviations: what is
    lost then is a relative D·2⁻²⁴ at most. The element itself cancels, hence no gradient to it.
    """
    wide = x.astype(jnp.float32)
    near = wide - lax.stop_gradient(wide[..., :1])
    mean = jnp.mean(near, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(near), axis=-1, keepdims=True) - jnp.square(mean)
    centred = near - mean
    variance = jnp.maximum(variance, 0.0)
    return (centred * lax.rsqrt(variance + EPSILON) * scale + shift).astype(x.dtype)
