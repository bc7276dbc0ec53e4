"""A plain NumPy float64 implementation of the models, one image or text at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drumline.models import LM, MLP, ViT
from drumline.parallel.block.layers import EPSILON

Values = Any  # arrays of float64 or integers
erf = np.vectorize(math.erf)


def loss(model: LM | MLP | ViT, weights: Any, batch: dict[str, Values]) -> float:
    """Return the loss of a batch."""
    if isinstance(model, LM):
        return lm_loss(model, weights, batch["tokens"])
    logits_of = mlp_logits if isinstance(model, MLP) else vit_logits
    images = batch["image"] / 127.5 - 1
    losses = [
        negative_log_probability(logits_of(model, weights, image), label)  # type: ignore[arg-type]
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
        normed = layer_norm(x, w["attention_norm"], w["attention_shift"])
        query, key, value = (
            np.einsum("sd,dnh->snh", normed, w[name]) + w[f"{name}_bias"]
            for name in ("query", "key", "value")
        )
        context = attention(query, key, value, causal=False)
        x = x + np.einsum("snh,nhd->sd", context, w["output"]) + w["output_bias"]
        normed = layer_norm(x, w["feedforward_norm"], w["feedforward_shift"])
        hidden = normed @ w["up"] + w["up_bias"]
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        x = x + hidden @ w["down"] + w["down_bias"]
    token = layer_norm(x, weights["norm"], weights["shift"])[0]
    return token @ weights["head"] + weights["head_bias"]


def lm_loss(model: LM, weights: Any, tokens: Values) -> float:
    losses: list[float] = []
    # The router scores of all tokens, for each block.
    scores: list[list[Values]] = [[] for _ in range(model.depth)]
    for text in tokens:
        x = weights["table"][text[:-1]]
        for i in range(model.depth):
            w = {name: stacked[i] for name, stacked in weights["blocks"].items()}
            normed = rms_norm(model, x, w["attention_norm"])
            query, key, value = (
                np.einsum("sd,dnh->snh", normed, w[name]) for name in ("query", "key", "value")
            )
            query, key = rotary(model, query), rotary(model, key)
            context = attention(query, key, value, causal=True)
            x = x + np.einsum("snh,nhd->sd", context, w["output"])
            normed = rms_norm(model, x, w["feedforward_norm"])
            if model.experts:
                scores[i].extend(normed @ w["router"])
                x = x + np.stack([mixture(model, w, token) for token in normed])
            else:
                x = x + (silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
        logits = rms_norm(model, x, weights["norm"]) @ weights["head"]
        losses.extend(map(negative_log_probability, logits, text[1:]))
    total = float(np.mean(losses))
    if model.experts:
        total += float(np.mean([router_loss(model, np.stack(block)) for block in scores]))
    return total


def mixture(model: LM, w: Any, token: Values) -> Values:
    scores = token @ w["router"]
    selected = np.argsort(-scores)[: model.experts_per_token]
    gates = softmax(scores)[selected] / softmax(scores)[selected].sum()
    out = np.zeros_like(token)
    for gate, expert in zip(gates, selected, strict=True):
        gate_kernel, up_kernel = w["experts_in"][expert, :, 0], w["experts_in"][expert, :, 1]
        out += gate * (silu(token @ gate_kernel) * (token @ up_kernel)) @ w["experts_out"][expert]
    return out


def router_loss(model: LM, scores: Values) -> float:
    selected = np.argsort(-scores, axis=1)[:, : model.experts_per_token]
    load = np.bincount(selected.reshape(-1), minlength=model.experts) / selected.size
    importance = np.mean([softmax(row) for row in scores], axis=0)
    balance = model.experts * float(load @ importance)
    z = float(np.mean(np.log(np.exp(scores).sum(1)) ** 2))
    return model.balance_weight * balance + model.z_weight * z


def attention(query: Values, key: Values, value: Values, *, causal: bool) -> Values:
    groups = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)
    out = np.zeros_like(query)
    for position in range(query.shape[0]):
        visible = position + 1 if causal else key.shape[0]
        for head in range(query.shape[1]):
            scores = key[:visible, head] @ query[position, head] / math.sqrt(query.shape[2])
            out[position, head] = softmax(scores) @ value[:visible, head]
    return out


def rotary(model: LM, x: Values) -> Values:
    """Rotate each pair (i, i + H/2), as a complex number, by position × frequency."""
    half = model.head_dim // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequency = np.array([rotary_frequency(model, i / half) for i in range(half)])
    rotated = pairs * np.exp(1j * np.arange(x.shape[0])[:, None, None] * frequency)
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def rotary_frequency(model: LM, exponent: float) -> float:
    """Return the angle between neighbours, scaled by wavelength as Llama 3.1's paper describes."""
    frequency: float = model.rotary_base**-exponent
    scaling = model.rotary_scaling
    if scaling is None:
        return frequency
    if scaling.low_freq_factor is None:
        return frequency / scaling.factor
    assert scaling.high_freq_factor is not None
    assert scaling.original_max_position_embeddings is not None
    length, wavelength = scaling.original_max_position_embeddings, 2 * math.pi / frequency
    if wavelength < length / scaling.high_freq_factor:
        return frequency
    if wavelength > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (length / wavelength - scaling.low_freq_factor) / span
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def layer_norm(x: Values, scale: Values, shift: Values) -> Values:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * scale + shift


def rms_norm(model: LM, x: Values, scale: Values) -> Values:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.epsilon) * scale


def negative_log_probability(logits: Values, label: int) -> float:
    return -float(np.log(softmax(logits)[label]))


def softmax(x: Values) -> Values:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def silu(x: Values) -> Values:
    return x / (1 + np.exp(-x))
