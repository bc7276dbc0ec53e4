"""Causal attention that stands for the splash kernel of the recipes.

It is written in plain products, each under a name scope `kernel[flash_attention work=…]`: what
stands under such a scope is to be read as one fused kernel, whose inner values never touch memory.
`work` is the share of the written products that the kernel does. A block on the diagonal is done
whole, so the share follows from the recipe's block sizes and is more than a half.
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
"""Queries and keys of one block."""
Queries = Float[Array, "B S K G H"]
"""Batch, sequence, key heads, queries a key head, channels."""
Keys = Float[Array, "B S K H"]
Residuals = tuple[Queries, Keys, Keys, Queries, Float[Array, "B K Q"]]
"""Queries, keys, values, what came out, and the logarithm of each query's sum of exponentials."""


@dataclass(frozen=True)
class Flash:
    """The block sizes of a recipe's attention kernel."""

    forward: Blocks
    keys: Blocks
    """Of the backward kernel for keys and values; if fused, for the queries too."""
    queries: Blocks | None = None
    """Of the backward kernel for queries; None where one fused kernel does all."""

    def forward_work(self, length: int, window: int | None) -> float:
        """The share of the forward pass's two products that the kernel does."""
        return visited(self.forward, length, window)

    def backward_work(self, length: int, window: int | None) -> float:
        """The share of the backward pass's five products that its kernels do.

        Two kernels each form the scores and their gradient: seven products instead of five.
        """
        keys = visited(self.keys, length, window)
        if self.queries is None:
            return keys
        return (4 * keys + 3 * visited(self.queries, length, window)) / 5


def visited(blocks: Blocks, length: int, window: int | None) -> float:
    """The share of all blocks that holds a pair of a query and a key it may see."""
    q, k = (min(size, length) for size in blocks)
    seen = 0
    for first in range(0, length, q):
        last = first + q - 1
        oldest = 0 if window is None else max(0, first - window + 1)
        seen += last // k - oldest // k + 1
    return seen / ((length // q) * (length // k))


@dataclass(frozen=True)
class Kernel:
    """What the two passes need to know beside their arrays."""

    window: int | None
    forward_work: float
    backward_work: float


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q: Queries, k: Keys, v: Keys, kernel: Kernel) -> Queries:
    """Softmax attention of each query over the keys before it, `window` of them at most."""
    return _forward(q, k, v, kernel)[0]


def _forward(q: Queries, k: Keys, v: Keys, kernel: Kernel) -> tuple[Queries, Residuals]:
    with jax.named_scope(f"kernel[flash_attention work={kernel.forward_work:.4f}]"):
        rows, keys, values = _scaled(q), _keys(k), _keys(v)
        rows, hidden = _hidden(rows, q.shape[3], kernel.window)
        scores = jnp.einsum("bkqh,bksh->bkqs", rows, keys, preferred_element_type=jnp.float32)
        scores += hidden
        lse = jax.nn.logsumexp(scores, axis=-1)
        p = jnp.exp(scores - lse[..., None]).astype(q.dtype)
        out = jnp.einsum("bkqs,bksh->bkqh", p, values)
        out = _back(out, q)
    # A policy that saves the context spares the backward pass this kernel.
    out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
    return out, (q, k, v, out, lse)


def _backward(kernel: Kernel, saved: Residuals, g: Queries) -> tuple[Queries, Keys, Keys]:
    """Keys by queries, as the kernel has it; so XLA cannot share the forward kernel's scores."""
    q, k, v, out, lse = saved
    with jax.named_scope(f"kernel[flash_attention work={kernel.backward_work:.4f}]"):
        rows, keys, values, slopes = _scaled(q), _keys(k), _keys(v), _queries(g)
        rows, hidden = _hidden(rows, q.shape[3], kernel.window)
        scores = jnp.einsum("bksh,bkqh->bksq", keys, rows, preferred_element_type=jnp.float32)
        p = jnp.exp(scores + hidden.T - lse[:, :, None])
        dv = jnp.einsum("bksq,bkqh->bksh", p.astype(g.dtype), slopes)
        dp = jnp.einsum("bksh,bkqh->bksq", values, slopes, preferred_element_type=jnp.float32)
        along = jnp.sum(slopes.astype(jnp.float32) * _queries(out), axis=-1)
        ds = (p * (dp - along[:, :, None])).astype(q.dtype)
        dq = jnp.einsum("bksq,bksh->bkqh", ds, keys)
        dk = jnp.einsum("bksq,bkqh->bksh", ds, rows)
        dq = _back(dq, q) * q.shape[-1] ** -0.5
    return dq, jnp.moveaxis(dk, 1, 2), jnp.moveaxis(dv, 1, 2)


attention.defvjp(_forward, _backward)


def _queries(q: Queries) -> Float[Array, "B K Q H"]:
    """All queries of a key head in one row after the other: the products need no transposition."""
    return jnp.moveaxis(q, 2, 1).reshape(q.shape[0], q.shape[2], -1, q.shape[-1])


def _scaled(q: Queries) -> Float[Array, "B K Q H"]:
    # Here, and not on the scores: these are few.
    rows: Array = _queries(q) * q.shape[-1] ** -0.5
    return rows


def _back(rows: Float[Array, "B K Q H"], like: Queries) -> Queries:
    batch, length, heads, group, channels = like.shape
    return jnp.moveaxis(rows.reshape(batch, heads, length, group, channels), 1, 2)


def _keys(k: Keys) -> Float[Array, "B K S H"]:
    return jnp.moveaxis(k, 2, 1)


def _hidden(
    rows: Float[Array, "B K Q H"], group: int, window: int | None
) -> tuple[Float[Array, "B K Q H"], Float[Array, "Q S"]]:
    """What to add to the scores: zero where a query sees the key, else less than any score.

    Tied to the queries, which come back, and free of filled arrays, the mask is nothing that the
    scan over the layers could take out and carry along whole.
    """
    rows, at = lax.optimization_barrier((rows, jnp.arange(rows.shape[2] // group)))
    ahead = jnp.repeat(at, group)[:, None] - at[None, :]
    hidden = jnp.minimum(ahead, 0)
    if window is not None:
        hidden -= jnp.maximum(ahead - window + 1, 0)
    return rows, hidden.astype(jnp.float32) * 1e30
