"""A mixture of experts with a capacity, moved by products with masks as MaxText's dropping one.

Each expert takes as many tokens of a sequence as its capacity and no more, so every product has
its shape before any token is seen. Two products with a mask of tokens by places send the tokens
to the experts and bring them back; they cost what they cost on the published steps too.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from published.models import Experts

Hidden = Float[Array, "B S D"]
Mask = Float[Array, "B S E C"]


class Placed(Protocol):
    """Lays an array out on a mesh by its logical axes."""

    def put(self, x: Array, *axes: str | None) -> Array:
        """The same array, laid out."""
        ...


def mixture(x: Hidden, w: dict[str, Any], sizes: Experts, placed: Placed) -> Hidden:
    """Each token through its chosen experts, weighed by the router."""
    combine = masks(jnp.einsum("bsd,de->bse", x, w["router"]), sizes)
    combine = placed.put(combine, "batch", None, None, None)
    sent = jnp.einsum("bsd,bsec->ebcd", x, (combine > 0).astype(x.dtype))
    sent = placed.put(sent, "experts", "batch", None, None)
    gate = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", sent, w["gate"]), "mlpwi_0")
    up = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", sent, w["up"]), "mlpwi_1")
    out = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, w["down"])
    out = checkpoint_name(placed.put(out, "experts", "batch", None, None), "mlpwo")
    back = jnp.einsum("ebcd,bsec->bsd", out, combine)
    return placed.put(back, "batch", None, None)


def masks(logits: Float[Array, "B S E"], sizes: Experts) -> Mask:
    """The router's weight of each token at its place in each expert; zero where it has none."""
    # Largest after largest: the partitioner would gather all tokens for `top_k`.
    left, picks = logits, []
    for _ in range(sizes.chosen):
        picks.append(jax.nn.one_hot(jnp.argmax(left, axis=-1), sizes.count, dtype=jnp.int32))
        left = jnp.where(picks[-1] == 1, -jnp.inf, left)
    to = jnp.stack(picks, axis=2)
    best = jnp.sum(logits[:, :, None] * to, axis=-1)
    weights = jax.nn.softmax(best.astype(jnp.float32), axis=-1).astype(logits.dtype)
    capacity = sizes.capacity(logits.shape[1])
    flat = to.reshape(to.shape[0], -1, sizes.count)
    place = (jnp.cumsum(flat, axis=1) * flat).reshape(to.shape)
    # Places count from 1; those past the capacity, and 0, are rows of zeros.
    at = jnp.sum(place, axis=2)
    share = jnp.sum(to.astype(logits.dtype) * weights[..., None], axis=2)
    return share[..., None] * jax.nn.one_hot(at - 1, capacity, dtype=logits.dtype)
