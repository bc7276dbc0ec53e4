"""The sizes and weights of a Transformer block: names, dimensions, logical axes, initial scales.

The models stack this table by layer and map its logical axes to mesh axes. `TransformerBlock` and
`MoEBlock` create their fields from it. The callers draw the random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class BlockShape:
    """The sizes and the fixed options of a Transformer block.

    Attributes:
        width: D, the model dimension.
        heads: N, the number of query heads.
        kv_heads: K, the number of key and value heads; N/K queries share one.
        head_dim: H, the dimension of a head.
        hidden: F, the hidden dimension of the feed-forward layer.
        gated: True for a gated feed-forward layer.
        causal: True if a token attends only to itself and earlier tokens.
        rotary_base: the base of the rotary position embedding: the slowest pair has a wavelength of
            2π times this. None for no rotary embedding.
        epsilon: added to the mean square in the norms.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    gated: bool = True
    causal: bool = True
    rotary_base: float | None = 10_000.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Check the heads."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} queries cannot share {self.kv_heads} kv_heads evenly"
            )
        if self.rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary positions need pairs")


@dataclass(frozen=True)
class Weight:
    """The declaration of a weight.

    Attributes:
        axes: the logical axes of the dimensions ("embed", "heads", "hidden" or "experts"), or None
            for dimensions that are never sharded.
        dims: the lengths of the dimensions.
        fan_in: the number of terms in a sum of the matmul; 0 for weights that start as a constant.
        ends_branch: True if its result is added to the residual stream.
        fill: the initial value if `fan_in` is 0.
    """

    axes: tuple[str | None, ...]
    dims: tuple[int, ...]
    fan_in: int = 0
    ends_branch: bool = False
    fill: float = 0.0


def attention_weights(shape: BlockShape, *, biased: bool = False) -> dict[str, Weight]:
    """Return the weights of the attention layer; `biased` adds biases and a shift of the norm."""
    d, n, k, h = shape.width, shape.heads, shape.kv_heads, shape.head_dim
    weights = {
        "query": Weight(("embed", "heads", None), (d, n, h), fan_in=d),
        "key": Weight(("embed", "heads", None), (d, k, h), fan_in=d),
        "value": Weight(("embed", "heads", None), (d, k, h), fan_in=d),
        "output": Weight(("heads", None, "embed"), (n, h, d), fan_in=n * h, ends_branch=True),
    }
    return {**_norm("attention", d, biased), **weights, **(_biases(weights) if biased else {})}


def feedforward_weights(shape: BlockShape, *, biased: bool = False) -> dict[str, Weight]:
    """Return the weights of the feed-forward layer; `biased` as for `attention_weights`."""
    d, f = shape.width, shape.hidden
    weights = {
        "gate": Weight(("embed", "hidden"), (d, f), fan_in=d),
        "up": Weight(("embed", "hidden"), (d, f), fan_in=d),
        "down": Weight(("hidden", "embed"), (f, d), fan_in=f, ends_branch=True),
    }
    if not shape.gated:
        del weights["gate"]
    return {**_norm("feedforward", d, biased), **weights, **(_biases(weights) if biased else {})}


def expert_weights(width: int, hidden: int, experts: int) -> dict[str, Weight]:
    """Return the weights of a mixture of experts. The router is small and never sharded."""
    d, f = width, hidden
    return {
        **_norm("feedforward", d, biased=False),
        "router": Weight((None, None), (d, experts), fan_in=d),
        "experts_in": Weight(("experts", "embed", None, None), (experts, d, 2, f), fan_in=d),
        "experts_out": Weight(
            ("experts", None, "embed"), (experts, f, d), fan_in=f, ends_branch=True
        ),
    }


def stack_layers(weights: Mapping[str, Weight], count: int) -> dict[str, Weight]:
    """Add a leading dimension for the layers to the weights."""
    return {
        name: replace(weight, axes=(None, *weight.axes), dims=(count, *weight.dims))
        for name, weight in weights.items()
    }


def logical_axes(weights: Mapping[str, Weight]) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes of the weights by name."""
    return {name: weight.axes for name, weight in weights.items()}


def init(
    weights: Mapping[str, Weight], draw: Callable[[Weight], jax.Array], dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Create the weights: constants for norms and biases, `draw` for all others, in table order."""
    return {
        name: draw(weight) if weight.fan_in else jnp.full(weight.dims, weight.fill, dtype)
        for name, weight in weights.items()
    }


def _norm(layer: str, width: int, biased: bool) -> dict[str, Weight]:
    scale = {f"{layer}_norm": Weight((None,), (width,), fill=1.0)}
    return {**scale, f"{layer}_shift": Weight((None,), (width,))} if biased else scale


def _biases(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Declare biases, sharded like the results of their weights."""
    return {
        f"{name}_bias": Weight((None,), weight.dims[-1:])
        if weight.ends_branch
        else Weight(weight.axes[1:], weight.dims[1:])
        for name, weight in weights.items()
    }
