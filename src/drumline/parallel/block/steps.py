"""The steps of a Transformer block, written once: the models take them, and the blocks do.

    x → norm → · W_qkv → attention over heads → · W_o   → + x        attention
      → norm → · W_in  → activation           → · W_out → + x        feedforward
      → norm → router, experts and back                 → + x        experts, in its place

What differs between blocks comes in: the weights by name, the norm, what attention sees, the
non-linearity, and the `Projections` that multiply. Weights may have more than the least. With a
`gate` the feed-forward part is gated; with a `*_shift` the norm has an offset; with biases
(`query_bias`, `up_bias` and so on, all of them or none) they are added after each projection.
What each step yields can be tapped: under the name of its weight, or as `mixed` (of attention),
`activation`, `attention` and `feedforward` (the two sums).
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import jax
from jaxtyping import Array, Float

from drumline.parallel.block.projections import Projections
from drumline.parallel.taps import tap

Weights = Mapping[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]
Norm = Callable[..., jax.Array]
"""Of rows, a scale, and a shift where the block has one."""
T = TypeVar("T")


class Attend(Protocol):
    """Mixes the values of a sequence, head by head."""

    def __call__(
        self,
        query: Float[Array, "B S N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
    ) -> Float[Array, "B S N H"]:
        """Of each token, the values of those it attends to."""
        ...


def attention(
    x: Float[Array, "*rows D"],
    w: Weights,
    project: Projections,
    *,
    norm: Norm,
    attend: Attend,
    sequences: tuple[int, ...] | None = None,
) -> Float[Array, "*rows D"]:
    """The block's first part: what each token learns of the others, added to it.

    Args:
        x: tokens, `[B, S, D]`, or one row for each if `sequences` tells them apart.
        w: the weights by name.
        project: multiplies by them.
        norm: of x before it is projected.
        attend: mixes the values.
        sequences: B and S of tokens that come as one row each; None where x has them.
    """
    normed = _normed(norm, x, w, "attention", sequences)
    query, key, value = _spread_out(project, normed, w, ("query", "key", "value"))
    mixed = tap("mixed", attend(query, key, value))
    return tap("attention", x + _bring_back(project, mixed, w, "output", x.shape))


def feedforward(
    x: Float[Array, "*rows D"],
    w: Weights,
    project: Projections,
    *,
    norm: Norm,
    activation: Activation,
    sequences: tuple[int, ...] | None = None,
) -> Float[Array, "*rows D"]:
    """The block's second part: what is made of each token by itself, added to it."""
    normed = _normed(norm, x, w, "feedforward", sequences)
    if "gate" in w:
        gate, up = _spread_out(project, normed, w, ("gate", "up"))
        hidden = tap("activation", activation(gate)) * up
    else:
        (up,) = _spread_out(project, normed, w, ("up",))
        hidden = tap("activation", activation(up))
    return tap("feedforward", x + _bring_back(project, hidden, w, "down", x.shape))


def experts(
    x: Float[Array, "*rows D"],
    w: Weights,
    layer: Callable[[Float[Array, "*rows D"]], tuple[Float[Array, "*rows D"], T]],
    *,
    norm: Norm,
) -> tuple[Float[Array, "*rows D"], T]:
    """The second part where experts take its place; `layer` tells something beside its result."""
    out, told = layer(_normed(norm, x, w, "feedforward"))
    return tap("feedforward", x + tap("experts", out)), told


def _normed(
    norm: Norm, x: jax.Array, w: Weights, part: str, sequences: tuple[int, ...] | None = None
) -> jax.Array:
    names = (f"{part}_norm", f"{part}_shift")
    normed = tap(names[0], norm(x, *(w[name] for name in names if name in w)))
    return normed if sequences is None else normed.reshape(*sequences, -1)


def _spread_out(
    project: Projections, x: jax.Array, w: Weights, names: Sequence[str]
) -> list[jax.Array]:
    weights = [w[name] for name in names]
    if f"{names[0]}_bias" not in w:
        parts = project.spread_out(x, weights)
        return [tap(name, part) for name, part in zip(names, parts, strict=True)]
    # Biases are added where the product is a plain matrix: there cuBLAS adds them itself.
    flat = [weight.reshape(weight.shape[0], -1) for weight in weights]
    biases = [w[f"{name}_bias"].reshape(-1) for name in names]
    parts = project.spread_out(x, flat)
    sums = (part + bias.astype(part.dtype) for part, bias in zip(parts, biases, strict=True))
    return [
        tap(name, part.reshape(*part.shape[:-1], *w[name].shape[1:]))
        for name, part in zip(names, sums, strict=True)
    ]


def _bring_back(
    project: Projections, x: jax.Array, w: Weights, name: str, shape: tuple[int, ...]
) -> jax.Array:
    weight = w[name]
    if f"{name}_bias" not in w:
        return tap(name, project.bring_back(x, weight).reshape(shape))
    x = x.reshape(*x.shape[: x.ndim - weight.ndim + 1], -1)
    out = project.bring_back(x, weight.reshape(-1, weight.shape[-1])).reshape(shape)
    return tap(name, out + w[f"{name}_bias"].astype(out.dtype))
