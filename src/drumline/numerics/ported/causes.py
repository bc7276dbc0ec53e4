"""Why a layer's results differ: what it would return if one thing about it were otherwise.

Every known cause is a computation, in float64, of what the layer returns with that one thing
changed. Whichever comes closest to what JAX returned is named, with how close it came: a cause is
not guessed from the size of an error, it is tried.
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from drumline.numerics import narrow as rounded_to
from drumline.numerics.errors import Numbers

if TYPE_CHECKING:
    import torch

Sides = tuple[int, int]
"""Of height and width."""
EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)
SAME = 1e-5
"""The relative error of a computation in float32 that is the same as another."""
NARROW = {"bfloat16": rounded_to.bfloat16, "float16": rounded_to.float16, "TF32": rounded_to.tf32}


@dataclass(frozen=True)
class Candidate:
    """A cause, and what the layer returns under it."""

    cause: str
    """One of the known ones, in a word or two."""
    words: str
    """What JAX seems to do, as the end of a sentence that begins with "JAX computes"."""
    value: Numbers

    @property
    def rounds(self) -> bool:
        """Whether it is about types: roundings are imitated, all else has to be met exactly."""
        return "dtype" in self.cause or self.cause == "precision default"


def of_module(module: torch.nn.Module, x: Numbers, theirs: Numbers) -> Iterator[Candidate]:
    """The causes known for a kind of module, given what it was given and returned.

    The first has no cause: it is what the module returns as it stands. Nothing for modules that
    consist of others, but for one convolution and what has no weights.
    """
    import torch

    weight = _numbers(getattr(module, "weight", None))
    bias = _numbers(getattr(module, "bias", None))
    kind = type(module).__name__
    parts = [part for part in module.children() if next(part.parameters(), None) is not None]
    if len(parts) == 1 and isinstance(parts[0], torch.nn.Conv2d):
        yield from of_module(parts[0], x, theirs)
    elif isinstance(module, torch.nn.Conv2d) and weight is not None:
        yield from _convolution(module, x, weight, bias)
    elif isinstance(module, torch.nn.Embedding) and weight is not None:
        yield from _embedding(x, weight)
    elif weight is not None and weight.ndim == 2:
        yield from linear(x, weight, bias)
    elif weight is not None and weight.shape == x.shape[-1:] and _is_norm_of_rows(kind):
        epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", 0.0))
        centred = isinstance(module, torch.nn.LayerNorm) or kind.startswith("LayerNorm")
        yield from norm(x, weight, bias, float(epsilon or 0.0), centred)
    elif weight is None and not list(module.children()) and x.shape == theirs.shape:
        yield from activation(x, theirs)


def linear(x: Numbers, weight: Numbers, bias: Numbers | None) -> Iterator[Candidate]:
    """`x · weightᵀ + bias`, the weight being `[outputs, inputs]`."""
    offset = 0.0 if bias is None else bias
    outputs, inputs = weight.shape
    plain = x @ weight.T
    yield Candidate("", "as PyTorch does", plain + offset)
    if outputs == inputs:
        yield Candidate("transposed kernel", "with the kernel transposed", x @ weight + offset)
    elif outputs % inputs == 0:
        # Several square kernels side by side, such as those of query, key and value.
        blocks = weight.reshape(-1, inputs, inputs)
        turned = np.concatenate([x @ block for block in blocks], axis=-1)
        yield Candidate("transposed kernel", "with the kernel transposed", turned + offset)
    reshaped = x @ weight.reshape(inputs, outputs)
    yield Candidate(
        "transposed kernel",
        "with a kernel that was reshaped instead of transposed",
        reshaped + offset,
    )
    if bias is not None:
        yield Candidate("bias", "without the bias", plain)
        for name in ("bfloat16", "float16"):
            rounded = plain + NARROW[name](bias)
            yield Candidate("bias in another dtype", f"with the bias in {name}", rounded)
    yield from _narrowed(lambda x, kernel: x @ kernel.T, x, weight, offset)


def _narrowed(
    multiply: Callable[[Numbers, Numbers], Numbers], x: Numbers, kernel: Numbers, offset: Any
) -> Iterator[Candidate]:
    """A product and a bias with some of it in a narrower type."""
    plain = multiply(x, kernel) + offset
    for name, device in (("bfloat16", "TPUs"), ("TF32", "GPUs")):
        product = multiply(NARROW[name](x), NARROW[name](kernel))
        words = f"with operands rounded to {name}, the default of {device}"
        yield Candidate("precision default", words, product + offset)
    for name in ("bfloat16", "float16"):
        narrow = NARROW[name]
        words = f"with the kernel in {name}"
        yield Candidate("kernel in another dtype", words, multiply(x, narrow(kernel)) + offset)
        yield Candidate("output in another dtype", f"in {name} at the end", narrow(plain))
        product = narrow(multiply(narrow(x), narrow(kernel)))
        whole = narrow(product + narrow(np.asarray(offset)))
        yield Candidate("computed in another dtype", f"in {name} throughout", whole)


def norm(
    x: Numbers, weight: Numbers, bias: Numbers | None, epsilon: float, centred: bool
) -> Iterator[Candidate]:
    """A norm by mean and variance, or by the mean square alone."""
    shift = np.zeros(()) if bias is None else bias

    def normed(x: Numbers, epsilon: float, *, centred: bool = centred, spare: int = 0) -> Numbers:
        if centred:
            x = x - x.mean(-1, keepdims=True)
        square = np.square(x).sum(-1, keepdims=True) / max(1, x.shape[-1] - spare)
        with np.errstate(divide="ignore", invalid="ignore"):
            return x / np.sqrt(square + epsilon)

    plain = normed(x, epsilon)
    yield Candidate("", "as PyTorch does", plain * weight + shift)
    for other in EPSILONS:
        if not math.isclose(other, epsilon, rel_tol=1e-6):
            value = normed(x, other) * weight + shift
            words = f"with an epsilon of {other:g}, and PyTorch with {epsilon:g}"
            yield Candidate("epsilon", words, value)
    if centred and x.shape[-1] > 1:
        value = normed(x, epsilon, spare=1) * weight + shift
        yield Candidate("norm's variance", "the variance over D - 1 instead of D", value)
    other_kind = "by mean and variance" if not centred else "by the mean square alone"
    value = normed(x, epsilon, centred=not centred) * weight + shift
    yield Candidate("another norm", f"the norm {other_kind}", value)
    yield Candidate("norm's scale", "without the norm's scale", plain + shift)
    yield Candidate("norm's scale", "with 1 + scale", plain * (1 + weight) + shift)
    if bias is not None:
        yield Candidate("bias", "without the norm's bias", plain * weight)
    for name in ("bfloat16", "float16"):
        narrow = NARROW[name]
        inside = normed(narrow(x), epsilon)
        yield Candidate(
            "norm in another dtype",
            f"the norm in {name}",
            narrow(inside) * narrow(weight) + narrow(shift),
        )
        yield Candidate(
            "norm in another dtype", f"the norm of rows in {name}", inside * weight + shift
        )
        rounded = plain * narrow(weight) + narrow(shift)
        yield Candidate("norm in another dtype", f"with the norm's scale in {name}", rounded)
        yield Candidate(
            "norm in another dtype",
            f"the norm to {name} at the end",
            narrow(plain * weight + shift),
        )
        if bias is not None:
            words = f"with the norm's bias in {name}"
            yield Candidate("bias in another dtype", words, plain * weight + narrow(shift))


def activation(x: Numbers, theirs: Numbers) -> Iterator[Candidate]:
    """The non-linearities of Transformers; which of them PyTorch has is seen from its result."""
    from scipy.special import erf, expit

    cube = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    kinds = {
        "gelu by the normal distribution": x * 0.5 * (1 + erf(x / math.sqrt(2))),
        "gelu by tanh": x * 0.5 * (1 + np.tanh(cube)),
        "gelu by a sigmoid of 1.702·x": x * expit(1.702 * x),
        "silu": x * expit(x),
        "relu": np.maximum(x, 0.0),
        "relu squared": np.square(np.maximum(x, 0.0)),
        "tanh": np.tanh(x),
        "nothing": x,
    }
    own = min(kinds, key=lambda kind: off(kinds[kind], theirs))
    known = reproduces(kinds[own], theirs)
    yield Candidate("", "as PyTorch does", theirs)
    for kind, value in kinds.items():
        if kind != own or not known:
            gelus = known and kind.startswith("gelu") and own.startswith("gelu")
            cause = "gelu's variant" if gelus else "another activation"
            said = own if known else "something that is not among those we know"
            yield Candidate(cause, f"{kind}, and PyTorch {said}", value)
    for name in ("bfloat16", "float16"):
        rounded = NARROW[name](theirs)
        yield Candidate("activation in another dtype", f"the activation in {name}", rounded)


def residual(x: Numbers, branch: Numbers) -> Iterator[Candidate]:
    """The sum of a block's input and what a branch makes of it."""
    yield Candidate("", "as PyTorch does", x + branch)
    yield Candidate("residual", "the branch without what it is added to", branch)
    yield Candidate("residual", "without the branch", x)
    for name in ("bfloat16", "float16"):
        narrow = NARROW[name]
        yield Candidate("residual in another dtype", f"the sum in {name}", narrow(x + branch))


def _convolution(
    module: torch.nn.Conv2d, x: Numbers, weight: Numbers, bias: Numbers | None
) -> Iterator[Candidate]:
    """A convolution as channels last, `[B, positions, channels]`."""
    import torch
    from torch.nn.functional import conv2d, pad

    stride, dilation, groups = module.stride, module.dilation, module.groups
    reach = [step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[-2:], strict=True)]

    def run(x: Numbers, weight: Numbers, before: Sides, after: Sides) -> Numbers:
        edges = (before[1], after[1], before[0], after[0])
        wide, kernel = pad(torch.from_numpy(x), edges), torch.from_numpy(weight)
        out = conv2d(wide, kernel, stride=stride, dilation=dilation, groups=groups)
        return out.flatten(2).transpose(1, 2).numpy()

    if module.padding == "same":
        low: Sides = ((reach[0] - 1) // 2, (reach[1] - 1) // 2)
        own: tuple[Sides, Sides] = (low, (reach[0] - 1 - low[0], reach[1] - 1 - low[1]))
    else:
        sides = (0, 0) if module.padding == "valid" else module.padding
        own = ((sides[0], sides[1]), (sides[0], sides[1]))
    offset = 0.0 if bias is None else bias
    plain = run(x, weight, *own)
    yield Candidate("", "as PyTorch does", plain + offset)
    for words, kernel in (
        ("with height and width of the kernel exchanged", weight.swapaxes(2, 3)),
        ("with the kernel flipped", weight[..., ::-1, ::-1]),
    ):
        if kernel.shape == weight.shape:
            value = run(x, np.ascontiguousarray(kernel), *own) + offset
            yield Candidate("transposed kernel", words, value)
    backwards = run(x, np.ascontiguousarray(weight[:, ::-1]), *own) + offset
    yield Candidate("channels", "with the channels in the other order", backwards)
    totals = [
        max((math.ceil(length / step) - 1) * step + size - length, 0)
        for length, step, size in zip(x.shape[-2:], stride, reach, strict=True)
    ]
    low = (totals[0] // 2, totals[1] // 2)
    both = (own[0][0] + own[1][0], own[0][1] + own[1][1])
    paddings: dict[str, tuple[Sides, Sides]] = {
        "VALID": ((0, 0), (0, 0)),
        "SAME": (low, (totals[0] - low[0], totals[1] - low[1])),
        "PyTorch's, all of it behind,": ((0, 0), both),
        "PyTorch's, all of it in front,": (both, (0, 0)),
    }
    for name, (before, after) in paddings.items():
        if (before, after) != own:
            value = run(x, weight, before, after) + offset
            words = (
                f"with padding {name} {before} to {after}, and PyTorch with {own[0]} to {own[1]}"
            )
            yield Candidate("padding", words, value)
    if bias is not None:
        yield Candidate("bias", "without the bias", plain)
        for name in ("bfloat16", "float16"):
            rounded = plain + NARROW[name](bias)
            yield Candidate("bias in another dtype", f"with the bias in {name}", rounded)
    yield from _narrowed(lambda x, kernel: run(x, kernel, *own), x, weight, offset)


def _embedding(x: Numbers, weight: Numbers) -> Iterator[Candidate]:
    rows = weight[x.astype(np.int64)]
    yield Candidate("", "as PyTorch does", rows)
    scaled = rows * math.sqrt(weight.shape[1])
    yield Candidate("embedding scale", "with rows times √D", scaled)
    yield Candidate("embedding scale", "with rows over √D", rows / math.sqrt(weight.shape[1]))
    for name in ("bfloat16", "float16"):
        words = f"with the table in {name}"
        yield Candidate("embedding in another dtype", words, NARROW[name](rows))


def _numbers(parameter: Any) -> Numbers | None:
    return None if parameter is None else parameter.detach().to("cpu").double().numpy()


def _is_norm_of_rows(kind: str) -> bool:
    """Whether a module's name is that of a norm over the last dimension."""
    name = kind.lower()
    return "norm" in name and not any(word in name for word in ("batch", "group", "instance"))


def reproduces(value: Numbers, theirs: Numbers) -> bool:
    """Whether a computation is the one that PyTorch does: some of it may be in float32 there."""
    return off(value, theirs) <= SAME * float(np.sqrt(np.mean(np.square(theirs))))


def off(value: Numbers, told: Numbers) -> float:
    """The root mean square of a difference."""
    return float(np.sqrt(np.mean(np.square(value - told))))
