"""Norms of vectors: by their mean square, or by mean and variance; in float32 at least."""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from drumline.parallel.axes import AxisName
from drumline.parallel.grouped.blocks import accumulator
from drumline.parallel.grouped.typed import pmean

EPSILON = 1e-6
"""Added to the mean square or to the variance, where nobody says otherwise."""


def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float = EPSILON,
    axis_name: AxisName | None = None,
) -> Float[Array, "*rows D"]:
    """Scale each vector to a mean square of one, in float32 or wider, and by the weight.

    Inside `shard_map`, `axis_name` is the mesh axis that divides the vectors, if one does.
    """
    dtype = accumulator(x.dtype)
    wide = x.astype(dtype)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if axis_name is not None:
        square = pmean(square, axis_name)
    return (wide * lax.rsqrt(square + epsilon) * weight.astype(dtype)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    shift: Float[Array, " D"],
    *,
    epsilon: float = EPSILON,
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
    return (centred * lax.rsqrt(variance + epsilon) * scale + shift).astype(x.dtype)
