"""A mixture of experts with a capacity, computed with mask matmuls like MaxText's dropping one.

Each expert takes at most its capacity of tokens from a sequence, so every matmul has a static
shape. Two matmuls with a mask of tokens by slots dispatch the tokens to the experts and combine
their outputs. The published steps include their cost too.
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


class Sharder(Protocol):
    """An object that shards an array over a mesh by its logical axes."""

    def put(self, x: Array, *axes: str | None) -> Array:
        """Return the array with its sharding."""
        ...


def mixture(x: Hidden, w: dict[str, Any], sizes: Experts, placement: Sharder) -> Hidden:
    """Return the outputs of each token's chosen experts, weighted by the router."""
    combine = masks(jnp.einsum("bsd,de->bse", x, w["router"]), sizes)
    combine = placement.put(combine, "batch", None, None, None)
    dispatched = jnp.einsum("bsd,bsec->ebcd", x, (combine > 0).astype(x.dtype))
    dispatched = placement.put(dispatched, "experts", "batch", None, None)
    gate = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", dispatched, w["gate"]), "mlpwi_0")
    up = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", dispatched, w["up"]), "mlpwi_1")
    out = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, w["down"])
    out = checkpoint_name(placement.put(out, "experts", "batch", None, None), "mlpwo")
    combined = jnp.einsum("ebcd,bsec->bsd", out, combine)
    return placement.put(combined, "batch", None, None)


def masks(logits: Float[Array, "B S E"], sizes: Experts) -> Mask:
    """Return the router's weight of each token for its slot in each expert, zero without a slot."""
    # Repeated argmax, because the partitioner would gather all tokens for `top_k`.
    remaining, picks = logits, []
    for _ in range(sizes.chosen):
        picks.append(jax.nn.one_hot(jnp.argmax(remaining, axis=-1), sizes.count, dtype=jnp.int32))
        remaining = jnp.where(picks[-1] == 1, -jnp.inf, remaining)
    assignment = jnp.stack(picks, axis=2)
    chosen_logits = jnp.sum(logits[:, :, None] * assignment, axis=-1)
    weights = jax.nn.softmax(chosen_logits.astype(jnp.float32), axis=-1).astype(logits.dtype)
    capacity = sizes.capacity(logits.shape[1])
    flat_assignment = assignment.reshape(assignment.shape[0], -1, sizes.count)
    slots = (jnp.cumsum(flat_assignment, axis=1) * flat_assignment).reshape(assignment.shape)
    # Slots count from 1. Slots past the capacity, and 0, become rows of zeros.
    slot = jnp.sum(slots, axis=2)
    share = jnp.sum(assignment.astype(logits.dtype) * weights[..., None], axis=2)
    return share[..., None] * jax.nn.one_hot(slot - 1, capacity, dtype=logits.dtype)
