"""The weights of a Transformer block: their names, their dimensions, and how each begins.

One table for all. The models stack it by layer and map its logical axes to mesh axes;
`TransformerBlock` and `MoEBlock` make their fields of it. How a weight is drawn is left to them,
and what it depends on stands here: the length it is summed over, and whether it ends a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from drumline.parallel.block.shape import BlockShape


@dataclass(frozen=True)
class Weight:
    """A weight of a block, before it has numbers.

    Attributes:
        axes: the logical axis of each dimension: "embed" (a token's vector), "heads", "hidden",
            "experts"; None for one that is not divided.
        dims: the length of each dimension.
        summed: how many products make one number of the result; 0 where nothing is drawn.
        ends: whether its result is added to the block's input.
        value: what it is filled with where nothing is drawn.
    """

    axes: tuple[str | None, ...]
    dims: tuple[int, ...]
    summed: int = 0
    ends: bool = False
    value: float = 0.0


def attention_weights(shape: BlockShape, *, biased: bool = False) -> dict[str, Weight]:
    """Those of the first part; `biased` adds a bias to each product and a shift to the norm."""
    d, n, k, h = shape.width, shape.heads, shape.kv_heads, shape.head_dim
    weights = {
        "query": Weight(("embed", "heads", None), (d, n, h), summed=d),
        "key": Weight(("embed", "heads", None), (d, k, h), summed=d),
        "value": Weight(("embed", "heads", None), (d, k, h), summed=d),
        "output": Weight(("heads", None, "embed"), (n, h, d), summed=n * h, ends=True),
    }
    return {**_norm("attention", d, biased), **weights, **(_biases(weights) if biased else {})}


def feedforward_weights(shape: BlockShape, *, biased: bool = False) -> dict[str, Weight]:
    """Those of the second part, likewise."""
    d, f = shape.width, shape.hidden
    weights = {
        "gate": Weight(("embed", "hidden"), (d, f), summed=d),
        "up": Weight(("embed", "hidden"), (d, f), summed=d),
        "down": Weight(("hidden", "embed"), (f, d), summed=f, ends=True),
    }
    if not shape.gated:
        del weights["gate"]
    return {**_norm("feedforward", d, biased), **weights, **(_biases(weights) if biased else {})}


def expert_weights(width: int, hidden: int, experts: int) -> dict[str, Weight]:
    """Those of a second part of experts; the router is small, whole and to stay in float32."""
    d, f = width, hidden
    return {
        **_norm("feedforward", d, biased=False),
        "router": Weight((None, None), (d, experts), summed=d),
        "experts_in": Weight(("experts", "embed", None, None), (experts, d, 2, f), summed=d),
        "experts_out": Weight(("experts", None, "embed"), (experts, f, d), summed=f, ends=True),
    }


def stacked(weights: Mapping[str, Weight], count: int) -> dict[str, Weight]:
    """The weights of several blocks, one behind the other in a first dimension."""
    return {
        name: replace(weight, axes=(None, *weight.axes), dims=(count, *weight.dims))
        for name, weight in weights.items()
    }


def axes_by_name(weights: Mapping[str, Weight]) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of each, in a tree like that of the weights."""
    return {name: weight.axes for name, weight in weights.items()}


def begin(
    weights: Mapping[str, Weight], draw: Callable[[Weight], jax.Array], dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Numbers for each: norms are one, biases zero, and all else is drawn, in this order."""
    return {
        name: draw(weight) if weight.summed else jnp.full(weight.dims, weight.value, dtype)
        for name, weight in weights.items()
    }


def _norm(part: str, width: int, biased: bool) -> dict[str, Weight]:
    scale = {f"{part}_norm": Weight((None,), (width,), value=1.0)}
    return {**scale, f"{part}_shift": Weight((None,), (width,))} if biased else scale


def _biases(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """A bias lies as its product does: along heads or features, or whole where a branch ends."""
    return {
        f"{name}_bias": Weight((None,), weight.dims[-1:])
        if weight.ends
        else Weight(weight.axes[1:], weight.dims[1:])
        for name, weight in weights.items()
    }
