"""The Transformer block once more, written out plainly, to be run in float64.

`xp` is numpy for values, or `jax.numpy` with 64 bits enabled where gradients are wanted.
"""

from __future__ import annotations

from typing import Any

from drumline.parallel.block.weights import BlockShape

Weights = dict[str, Any]


def block(xp: Any, shape: BlockShape, weights: Weights, x: Any) -> Any:
    """x[B, S, D] through attention and feed-forward."""
    calm = _norm(xp, shape, x, weights["attention_norm"])
    query = _turn(xp, shape, xp.einsum("bsd,dnh->bsnh", calm, weights["query"]))
    key = _turn(xp, shape, xp.einsum("bsd,dkh->bskh", calm, weights["key"]))
    value = xp.einsum("bsd,dkh->bskh", calm, weights["value"])
    sharing = shape.heads // shape.kv_heads
    key, value = xp.repeat(key, sharing, axis=2), xp.repeat(value, sharing, axis=2)
    scores = xp.einsum("bsnh,btnh->bnst", query, key) / shape.head_dim**0.5
    if shape.causal:
        seen = xp.tril(xp.ones(scores.shape[-2:], bool))
        scores = xp.where(seen, scores, -xp.inf)
    weight = xp.exp(scores - scores.max(-1, keepdims=True))
    weight = weight / weight.sum(-1, keepdims=True)
    mixed = xp.einsum("bnst,btnh->bsnh", weight, value)
    x = x + xp.einsum("bsnh,nhd->bsd", mixed, weights["output"])
    calm = _norm(xp, shape, x, weights["feedforward_norm"])
    hidden = calm @ weights["up"]
    hidden = _silu(xp, calm @ weights["gate"]) * hidden if shape.gated else _silu(xp, hidden)
    return x + hidden @ weights["down"]


def _norm(xp: Any, shape: BlockShape, x: Any, weight: Any) -> Any:
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + shape.epsilon) * weight


def _turn(xp: Any, shape: BlockShape, x: Any) -> Any:
    half = shape.head_dim // 2
    pairs = xp.arange(half) / half
    angle = xp.arange(x.shape[1])[:, None, None] * shape.rotary_base**-pairs
    first, second = x[..., :half], x[..., half:]
    cos, sin = xp.cos(angle), xp.sin(angle)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _silu(xp: Any, x: Any) -> Any:
    return x / (1 + xp.exp(-x))
