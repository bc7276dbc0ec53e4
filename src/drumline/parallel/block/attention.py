"""Attention of one device's own heads: rotary positions, grouped queries, causal or full.

Nothing here communicates. Under tensor parallelism a device has whole heads for the whole
sequence, so this is the same code on one device and on many.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Kernel = Literal["xla", "cudnn"]


def rotate(x: Float[Array, "B S heads H"], *, base: float) -> Float[Array, "B S heads H"]:
    """Turn each pair (i, i + H/2) of a head by its position, slower for later pairs.

    The angles are in float32 whatever x is: bfloat16 cannot tell positions apart beyond 256.
    """
    half = x.shape[-1] // 2
    speed = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speed
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    kernel: Kernel,
    rotary_base: float | None = None,
    tokens: int | None = None,
) -> Float[Array, "B S N H"]:
    """Softmax attention, N/K queries to each key; scores and their sums are in float32.

    Args:
        query: of each head.
        key: of each head that N/K of the queries share.
        value: likewise.
        causal: whether a token sees only those before it.
        kernel: `"xla"`, or `"cudnn"` for the fused kernel on GPUs.
        rotary_base: turns queries and keys by their positions; None leaves them.
        tokens: how many of the S there are to be seen, the others being padding; None for all.
    """
    if rotary_base is not None:
        query, key = rotate(query, base=rotary_base), rotate(key, base=rotary_base)
    batch, length = query.shape[:2]
    seen = None if tokens is None or tokens == length else jnp.full(batch, tokens, jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        key_value_seq_lengths=seen,
        implementation=kernel,
    )
