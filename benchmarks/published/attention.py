"""Causal attention that represents the splash kernel of the recipes.

It is written in plain matmuls, each under a name scope `kernel[flash_attention work=…]`. Such a
scope is read as one fused kernel with inner values that never reach memory. `work` is the fraction
of the written matmuls that the kernel computes. A block on the diagonal is computed entirely, so
the fraction follows from the recipe's block sizes and is more than a half.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

Blocks = tuple[int, int]
"""The queries and keys of one block."""
Queries = Float[Array, "B S K G H"]
"""Batch, sequence, key heads, queries per key head, channels."""
Keys = Float[Array, "B S K H"]
Residuals = tuple[Queries, Keys, Keys, Queries, Float[Array, "B K Q"]]
"""Queries, keys, values, output, and the logarithm of each query's sum of exponentials."""


@dataclass(frozen=True)
class Flash:
    """The block sizes of a recipe's attention kernel."""

    forward: Blocks
    keys: Blocks
    """The blocks of the backward kernel for keys and values; if fused, for the queries too."""
    queries: Blocks | None = None
    """The blocks of the backward kernel for queries; None for a fused kernel."""

    def forward_work(self, length: int, window: int | None) -> float:
        """Return the fraction of the forward pass's two matmuls that the kernel computes."""
        return visited_fraction(self.forward, length, window)

    def backward_work(self, length: int, window: int | None) -> float:
        """Return the fraction of the backward pass's five matmuls that its kernels compute.

        Two kernels each compute the scores and their gradient: seven matmuls instead of five.
        """
        keys = visited_fraction(self.keys, length, window)
        if self.queries is None:
            return keys
        return (4 * keys + 3 * visited_fraction(self.queries, length, window)) / 5


def visited_fraction(blocks: Blocks, length: int, window: int | None) -> float:
    """Return the fraction of blocks with at least one pair of a query and a visible key."""
    q, k = (min(size, length) for size in blocks)
    visible_blocks = 0
    for first_query in range(0, length, q):
        last_query = first_query + q - 1
        oldest_key = 0 if window is None else max(0, first_query - window + 1)
        visible_blocks += last_query // k - oldest_key // k + 1
    return visible_blocks / ((length // q) * (length // k))


@dataclass(frozen=True)
class Kernel:
    """The parameters of the two passes beside their arrays."""

    window: int | None
    forward_work: float
    backward_work: float


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q: Queries, k: Keys, v: Keys, kernel: Kernel) -> Queries:
    """Return softmax attention of each query over at most `window` previous keys."""
    return _forward(q, k, v, kernel)[0]


def _forward(q: Queries, k: Keys, v: Keys, kernel: Kernel) -> tuple[Queries, Residuals]:
    with jax.named_scope(f"kernel[flash_attention work={kernel.forward_work:.4f}]"):
        rows, keys, values = _scaled(q), _keys(k), _keys(v)
        rows, mask = _mask(rows, q.shape[3], kernel.window)
        scores = jnp.einsum("bkqh,bksh->bkqs", rows, keys, preferred_element_type=jnp.float32)
        scores += mask
        lse = jax.nn.logsumexp(scores, axis=-1)
        p = jnp.exp(scores - lse[..., None]).astype(q.dtype)
        out = jnp.einsum("bkqs,bksh->bkqh", p, values)
        out = _unflatten(out, q)
    # With a policy that saves the context, the backward pass does not run this kernel again.
    out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
    return out, (q, k, v, out, lse)


def _backward(kernel: Kernel, saved: Residuals, g: Queries) -> tuple[Queries, Keys, Keys]:
    """Compute keys by queries like the kernel, so that XLA cannot share the forward kernel's
    scores.
    """
    q, k, v, out, lse = saved
    with jax.named_scope(f"kernel[flash_attention work={kernel.backward_work:.4f}]"):
        rows, keys, values, output_gradient = _scaled(q), _keys(k), _keys(v), _queries(g)
        rows, mask = _mask(rows, q.shape[3], kernel.window)
        scores = jnp.einsum("bksh,bkqh->bksq", keys, rows, preferred_element_type=jnp.float32)
        p = jnp.exp(scores + mask.T - lse[:, :, None])
        dv = jnp.einsum("bksq,bkqh->bksh", p.astype(g.dtype), output_gradient)
        dp = jnp.einsum(
            "bksh,bkqh->bksq", values, output_gradient, preferred_element_type=jnp.float32
        )
        output_dot = jnp.sum(output_gradient.astype(jnp.float32) * _queries(out), axis=-1)
        ds = (p * (dp - output_dot[:, :, None])).astype(q.dtype)
        dq = jnp.einsum("bksq,bksh->bkqh", ds, keys)
        dk = jnp.einsum("bksq,bkqh->bksh", ds, rows)
        dq = _unflatten(dq, q) * q.shape[-1] ** -0.5
    return dq, jnp.moveaxis(dk, 1, 2), jnp.moveaxis(dv, 1, 2)


attention.defvjp(_forward, _backward)


def _queries(q: Queries) -> Float[Array, "B K Q H"]:
    """Return all queries of a key head as consecutive rows, so the matmuls need no
    transposition.
    """
    return jnp.moveaxis(q, 2, 1).reshape(q.shape[0], q.shape[2], -1, q.shape[-1])


def _scaled(q: Queries) -> Float[Array, "B K Q H"]:
    # Scaling the queries is cheaper than scaling the scores.
    rows: Array = _queries(q) * q.shape[-1] ** -0.5
    return rows


def _unflatten(rows: Float[Array, "B K Q H"], reference: Queries) -> Queries:
    batch, length, heads, group, channels = reference.shape
    return jnp.moveaxis(rows.reshape(batch, heads, length, group, channels), 1, 2)


def _keys(k: Keys) -> Float[Array, "B K S H"]:
    return jnp.moveaxis(k, 2, 1)


def _mask(
    rows: Float[Array, "B K Q H"], group: int, window: int | None
) -> tuple[Float[Array, "B K Q H"], Float[Array, "Q S"]]:
    """Return the mask to add: zero for a visible key, otherwise less than any score.

    The mask depends on the queries, which are returned, and contains no constant arrays. The scan
    over the layers therefore cannot hoist it.
    """
    rows, positions = lax.optimization_barrier((rows, jnp.arange(rows.shape[2] // group)))
    distance = jnp.repeat(positions, group)[:, None] - positions[None, :]
    mask = jnp.minimum(distance, 0)
    if window is not None:
        mask -= jnp.maximum(distance - window + 1, 0)
    return rows, mask.astype(jnp.float32) * 1e30
