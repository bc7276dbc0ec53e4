"""A plain reference implementation of the Transformer block, for float64.

`xp` is numpy for values, or `jax.numpy` with 64 bits enabled for gradients.
"""

from __future__ import annotations

from typing import Any

from drumline.parallel.block.weights import BlockShape

Weights = dict[str, Any]


def block(xp: Any, shape: BlockShape, weights: Weights, x: Any) -> Any:
    """Return x[B, S, D] after attention and feed-forward."""
    normed = _norm(xp, shape, x, weights["attention_norm"])
    query = _rotate(xp, shape, xp.einsum("bsd,dnh->bsnh", normed, weights["query"]))
    key = _rotate(xp, shape, xp.einsum("bsd,dkh->bskh", normed, weights["key"]))
    value = xp.einsum("bsd,dkh->bskh", normed, weights["value"])
    group_size = shape.heads // shape.kv_heads
    key, value = xp.repeat(key, group_size, axis=2), xp.repeat(value, group_size, axis=2)
    scores = xp.einsum("bsnh,btnh->bnst", query, key) / shape.head_dim**0.5
    if shape.causal:
        visible = xp.tril(xp.ones(scores.shape[-2:], bool))
        scores = xp.where(visible, scores, -xp.inf)
    weight = xp.exp(scores - scores.max(-1, keepdims=True))
    weight = weight / weight.sum(-1, keepdims=True)
    context = xp.einsum("bnst,btnh->bsnh", weight, value)
    x = x + xp.einsum("bsnh,nhd->bsd", context, weights["output"])
    normed = _norm(xp, shape, x, weights["feedforward_norm"])
    hidden = normed @ weights["up"]
    hidden = _silu(xp, normed @ weights["gate"]) * hidden if shape.gated else _silu(xp, hidden)
    return x + hidden @ weights["down"]


def _norm(xp: Any, shape: BlockShape, x: Any, weight: Any) -> Any:
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + shape.epsilon) * weight


def _rotate(xp: Any, shape: BlockShape, x: Any) -> Any:
    half = shape.head_dim // 2
    pairs = xp.arange(half) / half
    angle = xp.arange(x.shape[1])[:, None, None] * shape.rotary_base**-pairs
    first, second = x[..., :half], x[..., half:]
    cos, sin = xp.cos(angle), xp.sin(angle)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _silu(xp: Any, x: Any) -> Any:
    return x / (1 + xp.exp(-x))
