"""Attention that differs: by scale, mask, positions, whom a key serves, or the types it is in."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.ported.causes import NARROW, Candidate, off, reproduces

BASES = (1e4, 1e5, 5e5, 1e6)
"""Of rotary positions, as published models have them."""


@dataclass(frozen=True)
class Heads:
    """Attention as it may be computed."""

    scale: float
    causal: bool
    rotary: str = "none"
    """`none`, `halves` (a pair is i and i + H/2) or `neighbours` (2i and 2i + 1)."""
    base: float = 1e4
    shared: str = "repeated"
    """Which queries share a key: neighbours (`repeated`), or every K-th (`tiled`)."""


def attention(query: Numbers, key: Numbers, value: Numbers, theirs: Numbers) -> Iterator[Candidate]:
    """Attention over `[B, S, heads, H]`: first how PyTorch computes it, then with one change.

    How that is, nobody says: of all ways we know the one that comes closest to `theirs` is taken.
    """
    size = query.shape[-1]
    scales = {
        "1/√H": size**-0.5,
        "1": 1.0,
        "1/H": 1.0 / size,
        "1/√D": (query.shape[2] * size) ** -0.5,
        "√H": size**0.5,
    }
    grouped = query.shape[2] != key.shape[2]
    ways = [
        Heads(scale, causal, rotary, base, shared)
        for scale, causal, (rotary, base), shared in product(
            scales.values(),
            (False, True),
            [("none", 1e4), *product(("halves", "neighbours") if size % 2 == 0 else (), BASES)],
            ("repeated", "tiled") if grouped else ("repeated",),
        )
    ]
    # A look at one sequence tells the ways apart.
    few = query[:1], key[:1], value[:1]
    told = theirs[:1].reshape(1, query.shape[1], -1)
    base = min(ways, key=lambda way: off(_mixed(*few, way), told))
    names = {scale: name for name, scale in scales.items()}
    same = theirs.reshape(*query.shape[:2], -1)
    yield Candidate("", "as PyTorch does", same)
    if not reproduces(_mixed(*few, base), told):
        # PyTorch's own way is none of these, so that only JAX's can be told.
        for way in ways:
            words = f"{_whole(way, names)}, and PyTorch in a way that is not among those we know"
            yield Candidate("attention", words, _mixed(query, key, value, way))
        return
    for way in ways:
        changed = [
            name
            for name in ("scale", "causal", "rotary", "base", "shared")
            if getattr(way, name) != getattr(base, name)
        ]
        cause, words = _told(way, base, changed, names)
        if cause:
            yield Candidate(cause, words, _mixed(query, key, value, way))
    for name in ("bfloat16", "float16", "TF32"):
        narrow = NARROW[name]
        softmaxed = _mixed(query, key, value, base, probabilities=narrow)
        words = f"with softmax in {name}"
        yield Candidate("attention in another dtype", words, softmaxed)
        rounded = _mixed(narrow(query), narrow(key), narrow(value), base, probabilities=narrow)
        if name != "float16":
            words = f"attention's products with operands rounded to {name}"
            yield Candidate("precision default", words, rounded)
        yield Candidate(
            "attention in another dtype", f"attention to {name} at the end", narrow(same)
        )


def _whole(way: Heads, scales: dict[float, str]) -> str:
    """All there is to say of a way."""
    sees = "those before it" if way.causal else "all"
    turned = "" if way.rotary == "none" else f", {way.rotary} turned with base {way.base:g}"
    return f"scores times {scales[way.scale]}, each token seeing {sees}{turned}"


def _told(way: Heads, base: Heads, changed: list[str], scales: dict[float, str]) -> tuple[str, str]:
    """The cause and its words, where exactly one thing is otherwise; otherwise nothing."""
    if changed == ["scale"]:
        ours, theirs = scales[way.scale], scales[base.scale]
        return "attention scale", f"scores times {ours}, and PyTorch times {theirs}"
    if changed == ["causal"]:
        sees = "only those before it" if way.causal else "those behind it too"
        return "attention mask", f"attention where a token sees {sees}"
    if changed in (["rotary"], ["base"]) and way.rotary != "none":
        ours = f"{way.rotary} turned with base {way.base:g}"
        return "rotary positions", f"{ours}, and PyTorch {base.rotary} with base {base.base:g}"
    if changed == ["rotary"]:
        return "rotary positions", "without rotary positions"
    if changed == ["shared"]:
        return "shared keys", f"with keys {way.shared}, and PyTorch with keys {base.shared}"
    return "", ""


def _mixed(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    way: Heads,
    probabilities: Callable[[Numbers], Numbers] = lambda x: x,
) -> Numbers:
    """Attention, `[B, S, heads · H]`."""
    if way.rotary != "none":
        query, key = (_turned(x, way) for x in (query, key))
    times = query.shape[2] // key.shape[2]
    if times > 1:
        spread: Any = np.repeat if way.shared == "repeated" else _tiled
        key, value = spread(key, times, 2), spread(value, times, 2)
    scores = np.einsum("bqnh,bknh->bnqk", query, key) * way.scale
    if way.causal:
        later = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores = np.where(later, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    shares = probabilities(scores / scores.sum(-1, keepdims=True))
    mixed = np.einsum("bnqk,bknh->bqnh", shares, value)
    return mixed.reshape(*mixed.shape[:2], -1)


def _tiled(x: Numbers, times: int, axis: int) -> Numbers:
    return np.concatenate([x] * times, axis=axis)


def _turned(x: Numbers, way: Heads) -> Numbers:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * way.base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    if way.rotary == "halves":
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    first, second = x[..., ::2], x[..., 1::2]
    turned = np.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.reshape(x.shape)
