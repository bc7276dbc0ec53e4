"""The models once more, written out plainly in NumPy's float64, one image or text at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drumline.models import LM, MLP, ViT
from drumline.parallel.block.norms import EPSILON

Values = Any  # arrays of float64, and of whole numbers
erf = np.vectorize(math.erf)


def loss(model: LM | MLP | ViT, weights: Any, batch: dict[str, Values]) -> float:
    """The loss of a batch."""
    if isinstance(model, LM):
        return lm_loss(model, weights, batch["tokens"])
    logits_of = mlp_logits if isinstance(model, MLP) else vit_logits
    images = batch["image"] / 127.5 - 1
    losses = [
        surprise(logits_of(model, weights, image), label)  # type: ignore[arg-type]
        for image, label in zip(images, batch["label"], strict=True)
    ]
    return float(np.mean(losses))


def mlp_logits(model: MLP, weights: Any, image: Values) -> Values:
    x = image.reshape(-1)
    last = len(model.hidden_sizes)
    for i in range(last + 1):
        x = x @ weights[f"layer{i}"]["weight"] + weights[f"layer{i}"]["bias"]
        x = x if i == last else np.maximum(x, 0)
    return x


def vit_logits(model: ViT, weights: Any, image: Values) -> Values:
    p = model.patch
    corners = [(i, j) for i in range(0, model.image, p) for j in range(0, model.image, p)]
    patches = [image[i : i + p, j : j + p].reshape(-1) for i, j in corners]
    tokens = [patch @ weights["patch"] + weights["patch_bias"] for patch in patches]
    x = np.stack([weights["class_token"], *tokens]) + weights["positions"]
    for i in range(model.depth):
        w = {name: stacked[i] for name, stacked in weights["blocks"].items()}
        calm = normal(x, w["attention_norm"], w["attention_shift"])
        query, key, value = (
            np.einsum("sd,dnh->snh", calm, w[name]) + w[f"{name}_bias"]
            for name in ("query", "key", "value")
        )
        mixed = attention(query, key, value, causal=False)
        x = x + np.einsum("snh,nhd->sd", mixed, w["output"]) + w["output_bias"]
        calm = normal(x, w["feedforward_norm"], w["feedforward_shift"])
        hidden = calm @ w["up"] + w["up_bias"]
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        x = x + hidden @ w["down"] + w["down_bias"]
    token = normal(x, weights["norm"], weights["shift"])[0]
    return token @ weights["head"] + weights["head_bias"]


def lm_loss(model: LM, weights: Any, tokens: Values) -> float:
    surprises: list[float] = []
    # For each block, all tokens' router scores.
    scores: list[list[Values]] = [[] for _ in range(model.depth)]
    for text in tokens:
        x = weights["table"][text[:-1]]
        for i in range(model.depth):
            w = {name: stacked[i] for name, stacked in weights["blocks"].items()}
            calm = rms(model, x, w["attention_norm"])
            query, key, value = (
                np.einsum("sd,dnh->snh", calm, w[name]) for name in ("query", "key", "value")
            )
            query, key = turn(model, query), turn(model, key)
            mixed = attention(query, key, value, causal=True)
            x = x + np.einsum("snh,nhd->sd", mixed, w["output"])
            calm = rms(model, x, w["feedforward_norm"])
            if model.experts:
                scores[i].extend(calm @ w["router"])
                x = x + np.stack([mixture(model, w, token) for token in calm])
            else:
                x = x + (silu(calm @ w["gate"]) * (calm @ w["up"])) @ w["down"]
        logits = rms(model, x, weights["norm"]) @ weights["head"]
        surprises.extend(map(surprise, logits, text[1:]))
    total = float(np.mean(surprises))
    if model.experts:
        total += float(np.mean([router_loss(model, np.stack(each)) for each in scores]))
    return total


def mixture(model: LM, w: Any, token: Values) -> Values:
    scores = token @ w["router"]
    chosen = np.argsort(-scores)[: model.experts_per_token]
    gates = softmax(scores)[chosen] / softmax(scores)[chosen].sum()
    out = np.zeros_like(token)
    for gate, expert in zip(gates, chosen, strict=True):
        into, up = w["experts_in"][expert, :, 0], w["experts_in"][expert, :, 1]
        out += gate * (silu(token @ into) * (token @ up)) @ w["experts_out"][expert]
    return out


def router_loss(model: LM, scores: Values) -> float:
    chosen = np.argsort(-scores, axis=1)[:, : model.experts_per_token]
    used = np.bincount(chosen.reshape(-1), minlength=model.experts) / chosen.size
    importance = np.mean([softmax(row) for row in scores], axis=0)
    balance = model.experts * float(used @ importance)
    z = float(np.mean(np.log(np.exp(scores).sum(1)) ** 2))
    return model.balance_weight * balance + model.z_weight * z


def attention(query: Values, key: Values, value: Values, *, causal: bool) -> Values:
    sharing = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, sharing, axis=1), np.repeat(value, sharing, axis=1)
    out = np.zeros_like(query)
    for at in range(query.shape[0]):
        seen = at + 1 if causal else key.shape[0]
        for head in range(query.shape[1]):
            scores = key[:seen, head] @ query[at, head] / math.sqrt(query.shape[2])
            out[at, head] = softmax(scores) @ value[:seen, head]
    return out


def turn(model: LM, x: Values) -> Values:
    """Rotary positions: pair (i, i + H/2) as a complex number, turned by position × speed."""
    half = model.head_dim // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    speed = model.rotary_base ** -(np.arange(half) / half)
    turned = pairs * np.exp(1j * np.arange(x.shape[0])[:, None, None] * speed)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def normal(x: Values, scale: Values, shift: Values) -> Values:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * scale + shift


def rms(model: LM, x: Values, scale: Values) -> Values:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.epsilon) * scale


def surprise(logits: Values, label: int) -> float:
    return -float(np.log(softmax(logits)[label]))


def softmax(x: Values) -> Values:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def silu(x: Values) -> Values:
    return x / (1 + np.exp(-x))
