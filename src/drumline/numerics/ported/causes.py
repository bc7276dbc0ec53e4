"""Known causes of a divergence, as float64 computations of a layer with a single change.

The cause with the output closest to JAX's is reported with its remaining error.
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from drumline.numerics.errors import NARROW_TYPES, NDArray

if TYPE_CHECKING:
    import torch

Padding = tuple[int, int]
"""The padding of height and width."""
EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)
FLOAT32_TOLERANCE = 1e-5
"""The relative error of an equivalent float32 computation."""
ROTARY_BASES = (1e4, 1e5, 5e5, 1e6)
"""The bases of rotary positions in published models."""


@dataclass(frozen=True)
class CandidateCause:
    """A cause and the layer's output under it."""

    cause: str
    """The name of the cause; empty for PyTorch's own computation."""
    description: str
    """The end of a sentence that begins with "JAX computes"."""
    output: NDArray

    @property
    def is_rounding(self) -> bool:
        """True for causes that imitate rounding. Other causes must match JAX's values."""
        return "dtype" in self.cause or self.cause == "precision default"


def module_candidates(
    module: torch.nn.Module, x: NDArray, output: NDArray
) -> Iterator[CandidateCause]:
    """Yield the candidates for a module with this input and output.

    The first is the module's computation, without a cause. Modules with submodules have no
    candidates, unless these have no weights or are a single convolution.
    """
    import torch

    weight = _to_numpy(getattr(module, "weight", None))
    bias = _to_numpy(getattr(module, "bias", None))
    type_name = type(module).__name__
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if len(children) == 1 and isinstance(children[0], torch.nn.Conv2d):
        yield from module_candidates(children[0], x, output)
    elif isinstance(module, torch.nn.Conv2d) and weight is not None:
        yield from _convolution_candidates(module, x, weight, bias)
    elif isinstance(module, torch.nn.Embedding) and weight is not None:
        yield from _embedding_candidates(x, weight)
    elif weight is not None and weight.ndim == 2:
        yield from linear_candidates(x, weight, bias)
    elif weight is not None and weight.shape == x.shape[-1:] and _is_last_axis_norm(type_name):
        epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", 0.0))
        subtracts_mean = isinstance(module, torch.nn.LayerNorm) or type_name.startswith("LayerNorm")
        yield from norm_candidates(x, weight, bias, float(epsilon or 0.0), subtracts_mean)
    elif weight is None and not list(module.children()) and x.shape == output.shape:
        yield from activation_candidates(x, output)


def linear_candidates(
    x: NDArray, weight: NDArray, bias: NDArray | None
) -> Iterator[CandidateCause]:
    """Yield the candidates for `x · weightᵀ + bias` with a weight [outputs, inputs]."""
    offset = 0.0 if bias is None else bias
    outputs, inputs = weight.shape
    without_bias = x @ weight.T
    yield CandidateCause("", "as PyTorch does", without_bias + offset)
    if outputs == inputs:
        yield CandidateCause("transposed kernel", "with the kernel transposed", x @ weight + offset)
    elif outputs % inputs == 0:
        # Several square kernels side by side, such as those of query, key and value.
        blocks = weight.reshape(-1, inputs, inputs)
        transposed = np.concatenate([x @ block for block in blocks], axis=-1)
        yield CandidateCause("transposed kernel", "with the kernel transposed", transposed + offset)
    reshaped = x @ weight.reshape(inputs, outputs)
    yield CandidateCause(
        "transposed kernel",
        "with a kernel that was reshaped instead of transposed",
        reshaped + offset,
    )
    if bias is not None:
        yield from _bias_candidates(without_bias, bias)
    yield from _narrow_candidates(lambda x, kernel: x @ kernel.T, x, weight, offset)


def _bias_candidates(without_bias: NDArray, bias: NDArray) -> Iterator[CandidateCause]:
    yield CandidateCause("bias", "without the bias", without_bias)
    for name in ("bfloat16", "float16"):
        y = without_bias + NARROW_TYPES[name](bias)
        yield CandidateCause("bias in another dtype", f"with the bias in {name}", y)


def _narrow_candidates(
    multiply: Callable[[NDArray, NDArray], NDArray], x: NDArray, kernel: NDArray, offset: Any
) -> Iterator[CandidateCause]:
    """Yield the candidates for a matmul and a bias with parts of it in a narrower type."""
    exact = multiply(x, kernel) + offset
    for name, devices in (("bfloat16", "TPUs"), ("TF32", "GPUs")):
        narrow = NARROW_TYPES[name]
        y = multiply(narrow(x), narrow(kernel)) + offset
        description = f"with operands rounded to {name}, the default of {devices}"
        yield CandidateCause("precision default", description, y)
    for name in ("bfloat16", "float16"):
        narrow = NARROW_TYPES[name]
        y = multiply(x, narrow(kernel)) + offset
        yield CandidateCause("kernel in another dtype", f"with the kernel in {name}", y)
        yield CandidateCause("output in another dtype", f"in {name} at the end", narrow(exact))
        matmul = narrow(multiply(narrow(x), narrow(kernel)))
        y = narrow(matmul + narrow(np.asarray(offset)))
        yield CandidateCause("computed in another dtype", f"in {name} throughout", y)


def norm_candidates(
    x: NDArray, weight: NDArray, bias: NDArray | None, epsilon: float, subtracts_mean: bool
) -> Iterator[CandidateCause]:
    """Yield the candidates for a norm with or without subtraction of the mean."""
    shift = np.zeros(()) if bias is None else bias

    def normalize(
        x: NDArray, epsilon: float, *, subtracts_mean: bool = subtracts_mean, ddof: int = 0
    ) -> NDArray:
        if subtracts_mean:
            x = x - x.mean(-1, keepdims=True)
        variance = np.square(x).sum(-1, keepdims=True) / max(1, x.shape[-1] - ddof)
        with np.errstate(divide="ignore", invalid="ignore"):
            return x / np.sqrt(variance + epsilon)

    normalized = normalize(x, epsilon)
    yield CandidateCause("", "as PyTorch does", normalized * weight + shift)
    for other in EPSILONS:
        if not math.isclose(other, epsilon, rel_tol=1e-6):
            y = normalize(x, other) * weight + shift
            description = f"with an epsilon of {other:g}, and PyTorch with {epsilon:g}"
            yield CandidateCause("epsilon", description, y)
    if subtracts_mean and x.shape[-1] > 1:
        y = normalize(x, epsilon, ddof=1) * weight + shift
        yield CandidateCause("norm's variance", "the variance over D - 1 instead of D", y)
    other_norm = "by the mean square alone" if subtracts_mean else "by mean and variance"
    y = normalize(x, epsilon, subtracts_mean=not subtracts_mean) * weight + shift
    yield CandidateCause("another norm", f"the norm {other_norm}", y)
    yield CandidateCause("norm's scale", "without the norm's scale", normalized + shift)
    yield CandidateCause("norm's scale", "with 1 + scale", normalized * (1 + weight) + shift)
    if bias is not None:
        yield CandidateCause("bias", "without the norm's bias", normalized * weight)
    for name in ("bfloat16", "float16"):
        narrow = NARROW_TYPES[name]
        cause = "norm in another dtype"
        from_narrow_x = normalize(narrow(x), epsilon)
        y = narrow(from_narrow_x) * narrow(weight) + narrow(shift)
        yield CandidateCause(cause, f"the norm in {name}", y)
        y = from_narrow_x * weight + shift
        yield CandidateCause(cause, f"the norm of rows in {name}", y)
        y = normalized * narrow(weight) + narrow(shift)
        yield CandidateCause(cause, f"with the norm's scale in {name}", y)
        y = narrow(normalized * weight + shift)
        yield CandidateCause(cause, f"the norm to {name} at the end", y)
        if bias is not None:
            y = normalized * weight + narrow(shift)
            description = f"with the norm's bias in {name}"
            yield CandidateCause("bias in another dtype", description, y)


def activation_candidates(x: NDArray, output: NDArray) -> Iterator[CandidateCause]:
    """Yield the candidates for an activation. PyTorch's activation is identified by its output."""
    from scipy.special import erf, expit

    tanh_argument = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    activations = {
        "gelu by the normal distribution": x * 0.5 * (1 + erf(x / math.sqrt(2))),
        "gelu by tanh": x * 0.5 * (1 + np.tanh(tanh_argument)),
        "gelu by a sigmoid of 1.702·x": x * expit(1.702 * x),
        "silu": x * expit(x),
        "relu": np.maximum(x, 0.0),
        "relu squared": np.square(np.maximum(x, 0.0)),
        "tanh": np.tanh(x),
        "nothing": x,
    }
    torch_name = min(activations, key=lambda name: _rms_difference(activations[name], output))
    is_known = _is_close(activations[torch_name], output)
    yield CandidateCause("", "as PyTorch does", output)
    for name, y in activations.items():
        if name != torch_name or not is_known:
            are_gelus = is_known and name.startswith("gelu") and torch_name.startswith("gelu")
            cause = "gelu's variant" if are_gelus else "another activation"
            torch_activation = torch_name if is_known else "an unknown activation"
            yield CandidateCause(cause, f"{name}, and PyTorch {torch_activation}", y)
    for type_name in ("bfloat16", "float16"):
        y = NARROW_TYPES[type_name](output)
        yield CandidateCause("activation in another dtype", f"the activation in {type_name}", y)


def residual_candidates(x: NDArray, branch: NDArray) -> Iterator[CandidateCause]:
    """Yield the candidates for the sum of a block's input and a branch's output."""
    yield CandidateCause("", "as PyTorch does", x + branch)
    yield CandidateCause("residual", "the branch without the block's input", branch)
    yield CandidateCause("residual", "without the branch", x)
    for name in ("bfloat16", "float16"):
        y = NARROW_TYPES[name](x + branch)
        yield CandidateCause("residual in another dtype", f"the sum in {name}", y)


def _convolution_candidates(
    module: torch.nn.Conv2d, x: NDArray, weight: NDArray, bias: NDArray | None
) -> Iterator[CandidateCause]:
    """Yield the candidates for a convolution, with values [batch, positions, channels]."""
    import torch
    from torch.nn.functional import conv2d, pad

    stride, dilation, groups = module.stride, module.dilation, module.groups
    extents = [
        step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[-2:], strict=True)
    ]

    def convolve(x: NDArray, weight: NDArray, before: Padding, after: Padding) -> NDArray:
        edges = (before[1], after[1], before[0], after[0])
        padded, kernel = pad(torch.from_numpy(x), edges), torch.from_numpy(weight)
        result = conv2d(padded, kernel, stride=stride, dilation=dilation, groups=groups)
        return result.flatten(2).transpose(1, 2).numpy()

    if module.padding == "same":
        before: Padding = ((extents[0] - 1) // 2, (extents[1] - 1) // 2)
        after: Padding = (extents[0] - 1 - before[0], extents[1] - 1 - before[1])
        padding = before, after
    else:
        sides = (0, 0) if module.padding == "valid" else module.padding
        padding = (sides[0], sides[1]), (sides[0], sides[1])
    offset = 0.0 if bias is None else bias
    without_bias = convolve(x, weight, *padding)
    yield CandidateCause("", "as PyTorch does", without_bias + offset)
    for description, kernel in (
        ("with height and width of the kernel exchanged", weight.swapaxes(2, 3)),
        ("with the kernel flipped", weight[..., ::-1, ::-1]),
    ):
        if kernel.shape == weight.shape:
            y = convolve(x, np.ascontiguousarray(kernel), *padding) + offset
            yield CandidateCause("transposed kernel", description, y)
    y = convolve(x, np.ascontiguousarray(weight[:, ::-1]), *padding) + offset
    yield CandidateCause("channels", "with the channels in the other order", y)
    same_totals = [
        max((math.ceil(length / step) - 1) * step + extent - length, 0)
        for length, step, extent in zip(x.shape[-2:], stride, extents, strict=True)
    ]
    same_low = (same_totals[0] // 2, same_totals[1] // 2)
    total = (padding[0][0] + padding[1][0], padding[0][1] + padding[1][1])
    paddings: dict[str, tuple[Padding, Padding]] = {
        "VALID": ((0, 0), (0, 0)),
        "SAME": (same_low, (same_totals[0] - same_low[0], same_totals[1] - same_low[1])),
        "PyTorch's, all of it behind,": ((0, 0), total),
        "PyTorch's, all of it in front,": (total, (0, 0)),
    }
    for name, (before, after) in paddings.items():
        if (before, after) != padding:
            y = convolve(x, weight, before, after) + offset
            description = (
                f"with padding {name} {before} to {after}, and PyTorch with {padding[0]} to "
                f"{padding[1]}"
            )
            yield CandidateCause("padding", description, y)
    if bias is not None:
        yield from _bias_candidates(without_bias, bias)
    yield from _narrow_candidates(
        lambda x, kernel: convolve(x, kernel, *padding), x, weight, offset
    )


def _embedding_candidates(x: NDArray, weight: NDArray) -> Iterator[CandidateCause]:
    rows = weight[x.astype(np.int64)]
    yield CandidateCause("", "as PyTorch does", rows)
    scale = math.sqrt(weight.shape[1])
    yield CandidateCause("embedding scale", "with rows times √D", rows * scale)
    yield CandidateCause("embedding scale", "with rows over √D", rows / scale)
    for name in ("bfloat16", "float16"):
        y = NARROW_TYPES[name](rows)
        yield CandidateCause("embedding in another dtype", f"with the table in {name}", y)


@dataclass(frozen=True)
class AttentionVariant:
    """A variant of attention."""

    scale: float
    causal: bool
    rotary: str = "none"
    """`none`, `halves` (pairs i and i + H/2) or `neighbours` (pairs 2i and 2i + 1)."""
    base: float = 1e4
    key_sharing: str = "repeated"
    """`repeated` if neighbouring queries share a key, or `tiled` if every K-th query does."""


def attention_candidates(
    query: NDArray, key: NDArray, value: NDArray, output: NDArray
) -> Iterator[CandidateCause]:
    """Yield the candidates for attention over [B, S, heads, H], with a single change.

    PyTorch's variant is identified by its output.
    """
    size = query.shape[-1]
    scales = {
        "1/√H": size**-0.5,
        "1": 1.0,
        "1/H": 1.0 / size,
        "1/√D": (query.shape[2] * size) ** -0.5,
        "√H": size**0.5,
    }
    is_grouped = query.shape[2] != key.shape[2]
    rotary_kinds = ("halves", "neighbours") if size % 2 == 0 else ()
    variants = [
        AttentionVariant(scale, causal, rotary, base, key_sharing)
        for scale, causal, (rotary, base), key_sharing in product(
            scales.values(),
            (False, True),
            [("none", 1e4), *product(rotary_kinds, ROTARY_BASES)],
            ("repeated", "tiled") if is_grouped else ("repeated",),
        )
    ]
    # A single sequence identifies the variant.
    sample = query[:1], key[:1], value[:1]
    sample_output = output[:1].reshape(1, query.shape[1], -1)
    torch_variant = min(
        variants, key=lambda v: _rms_difference(_attention(*sample, v), sample_output)
    )
    scale_names = {scale: name for name, scale in scales.items()}
    torch_output = output.reshape(*query.shape[:2], -1)
    yield CandidateCause("", "as PyTorch does", torch_output)
    if not _is_close(_attention(*sample, torch_variant), sample_output):
        # PyTorch's variant is unknown.
        for variant in variants:
            description = f"{_describe(variant, scale_names)}, and PyTorch an unknown variant"
            yield CandidateCause("attention", description, _attention(query, key, value, variant))
        return
    for variant in variants:
        cause, description = _describe_change(variant, torch_variant, scale_names)
        if cause:
            yield CandidateCause(cause, description, _attention(query, key, value, variant))
    for name in ("bfloat16", "float16", "TF32"):
        narrow = NARROW_TYPES[name]
        narrow_softmax = _attention(query, key, value, torch_variant, round_softmax=narrow)
        description = f"with softmax in {name}"
        yield CandidateCause("attention in another dtype", description, narrow_softmax)
        narrow_operands = _attention(
            narrow(query), narrow(key), narrow(value), torch_variant, round_softmax=narrow
        )
        if name != "float16":
            description = f"attention's matmuls with operands rounded to {name}"
            yield CandidateCause("precision default", description, narrow_operands)
        description = f"attention to {name} at the end"
        yield CandidateCause("attention in another dtype", description, narrow(torch_output))


def _describe(variant: AttentionVariant, scale_names: dict[float, str]) -> str:
    visible = "those before it" if variant.causal else "all"
    rotary = ""
    if variant.rotary != "none":
        rotary = f", rotary {variant.rotary} with base {variant.base:g}"
    return f"scores times {scale_names[variant.scale]}, each token seeing {visible}{rotary}"


def _describe_change(
    variant: AttentionVariant, torch_variant: AttentionVariant, scale_names: dict[float, str]
) -> tuple[str, str]:
    """Return the cause and description of a single change, else empty strings."""
    changed_fields = [
        name
        for name in ("scale", "causal", "rotary", "base", "key_sharing")
        if getattr(variant, name) != getattr(torch_variant, name)
    ]
    if changed_fields == ["scale"]:
        scale, torch_scale = scale_names[variant.scale], scale_names[torch_variant.scale]
        return "attention scale", f"scores times {scale}, and PyTorch times {torch_scale}"
    if changed_fields == ["causal"]:
        visible = "only those before it" if variant.causal else "those after it too"
        return "attention mask", f"attention where a token sees {visible}"
    if changed_fields in (["rotary"], ["base"]) and variant.rotary != "none":
        rotary = f"rotary {variant.rotary} with base {variant.base:g}"
        torch_rotary = f"{torch_variant.rotary} with base {torch_variant.base:g}"
        return "rotary positions", f"{rotary}, and PyTorch {torch_rotary}"
    if changed_fields == ["rotary"]:
        return "rotary positions", "without rotary positions"
    if changed_fields == ["key_sharing"]:
        sharing, torch_sharing = variant.key_sharing, torch_variant.key_sharing
        return "shared keys", f"with keys {sharing}, and PyTorch with keys {torch_sharing}"
    return "", ""


def _attention(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    variant: AttentionVariant,
    round_softmax: Callable[[NDArray], NDArray] = lambda x: x,
) -> NDArray:
    """Return attention as [B, S, heads · H]."""
    if variant.rotary != "none":
        query, key = (_rotate(x, variant) for x in (query, key))
    group_size = query.shape[2] // key.shape[2]
    if group_size > 1:
        expand: Any = np.repeat if variant.key_sharing == "repeated" else _tile
        key, value = expand(key, group_size, 2), expand(value, group_size, 2)
    scores = np.einsum("bqnh,bknh->bnqk", query, key) * variant.scale
    if variant.causal:
        later = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores = np.where(later, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities = round_softmax(scores / scores.sum(-1, keepdims=True))
    output = np.einsum("bnqk,bknh->bqnh", probabilities, value)
    return output.reshape(*output.shape[:2], -1)


def _tile(x: NDArray, count: int, axis: int) -> NDArray:
    return np.concatenate([x] * count, axis=axis)


def _rotate(x: NDArray, variant: AttentionVariant) -> NDArray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * variant.base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    if variant.rotary == "halves":
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    first, second = x[..., ::2], x[..., 1::2]
    rotated = np.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.reshape(x.shape)


def _to_numpy(parameter: Any) -> NDArray | None:
    return None if parameter is None else parameter.detach().to("cpu").double().numpy()


def _is_last_axis_norm(type_name: str) -> bool:
    """Return True for type names of norms over the last axis."""
    name = type_name.lower()
    return "norm" in name and not any(other in name for other in ("batch", "group", "instance"))


def _is_close(actual: NDArray, expected: NDArray) -> bool:
    """Return True if the values agree within PyTorch's float32 errors."""
    scale = float(np.sqrt(np.mean(np.square(expected))))
    return _rms_difference(actual, expected) <= FLOAT32_TOLERANCE * scale


def _rms_difference(actual: NDArray, expected: NDArray) -> float:
    return float(np.sqrt(np.mean(np.square(actual - expected))))
