"""Fused attention on TPUs: JAX's splash kernel, fitted to our arrays and to checked meshes.

The kernel keeps scores on the chip, and of a causal square it visits only the blocks that hold
something to be seen. It wants heads before positions, whole blocks of 128 positions, queries that
are already scaled, and one example at a time; all that is arranged here.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from drumline.parallel.apart import ArrayType, traced_apart
from drumline.parallel.grouped.blocks import alike

LANES = 128
"""Positions in the kernel's smallest block."""
SHORTEST = 512
"""Positions from which the kernel is taken. It wants heads before positions, and bringing them
there is a cost that grows with the positions, where XLA's attention grows with their square."""
BLOCKS = (512, 384, 256, 128)
"""Positions of a block, best first: long ones read keys less often, longer fill the memory."""

Heads = Float[Array, "B heads S H"]


def takes(query: jax.Array) -> bool:
    """Whether the kernel is worth it."""
    return query.shape[1] >= SHORTEST and jnp.issubdtype(query.dtype, jnp.floating)


def attend(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    tokens: int | None,
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Softmax attention, N/K queries to each key.

    Args:
        query: of each head.
        key: of each head that N/K of the queries share.
        value: likewise.
        causal: whether a token sees only those before it.
        tokens: how many of the S there are to be seen; None for all.
        interpret: whether to run without a TPU, slowly.
    """
    length = query.shape[1]
    scaled = (query.astype(jnp.float32) / sqrt(query.shape[-1])).astype(query.dtype)
    padding = -length % LANES

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))

    seen = length if tokens is None else tokens
    # Behind the last token there are only queries that nobody reads, and causal ones look back.
    hides = seen < length + padding and (not causal or seen < length)
    kernel = _Kernel(causal, seen if hides else None, interpret)
    out = _attend(kernel, *alike(by_head(scaled), by_head(key), by_head(value)))
    return jnp.swapaxes(out[:, :, :length], 1, 2)


class _Kernel(NamedTuple):
    causal: bool
    seen: int | None
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: _Kernel, query: Heads, key: Heads, value: Heads) -> Heads:
    return _forward(kernel, query, key, value)[0]


def _forward(kernel: _Kernel, query: Heads, key: Heads, value: Heads) -> tuple[Heads, Any]:
    forward = _passes(kernel, ArrayType.of(query), ArrayType.of(key)).forward
    out, *saved = alike(query, *forward(query, key, value))[1:]
    return out, (query, key, saved)


def _backward(kernel: _Kernel, kept: Any, g: Heads) -> tuple[Heads, Heads, Heads]:
    query, key, saved = kept
    backward = _passes(kernel, ArrayType.of(query), ArrayType.of(key)).backward
    dquery, dkey, dvalue = alike(query, *backward(*saved, g))[1:]
    return dquery, dkey, dvalue


_attend.defvjp(_forward, _backward)


class _Passes(NamedTuple):
    forward: Callable[..., list[jax.Array]]
    """Of query, key and value: what comes out, and what the backward pass needs."""
    backward: Callable[..., list[jax.Array]]
    """Of what it needs and the gradient of what came out: the gradients."""


@cache
def _passes(kernel: _Kernel, query: ArrayType, key: ArrayType) -> _Passes:
    def forward(*arrays: jax.Array) -> Any:
        return jax.vjp(jax.vmap(_splash(kernel, query)), *arrays)

    there = traced_apart(forward, query, key, key)
    out, pull = there.result
    saved, shape = jax.tree.flatten(pull)

    def backward(*kept: jax.Array) -> Any:
        return jax.tree.unflatten(shape, kept[:-1])(kept[-1])

    back = traced_apart(backward, *map(ArrayType.of, (*saved, out)))
    return _Passes(there.call, back.call)


def _splash(kernel: _Kernel, query: ArrayType) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, heads, length, _ = query.shape
    block = next(block for block in BLOCKS if length % block == 0)
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_kv"), block)
    sizes |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    square = (length, length)
    mask = masks.CausalMask(square) if kernel.causal else masks.FullMask(square)
    multiply = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        interpret=kernel.interpret,
    )
    if kernel.seen is None:
        return partial(multiply)
    # Tokens attend to those of their own segment; every query is of the first.
    place = jnp.arange(length, dtype=jnp.int32)
    segments = splash.SegmentIds(jnp.zeros_like(place), (place >= kernel.seen).astype(jnp.int32))
    return partial(multiply, segment_ids=segments)
