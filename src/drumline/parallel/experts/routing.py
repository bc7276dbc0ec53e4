"""The routing of tokens to experts: choice, gates, losses and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.experts.rounds import default_buffer_rows, round_count
from drumline.parallel.grouped.blocks import accumulator, match_varying
from drumline.parallel.grouped.rows import group_sizes
from drumline.parallel.typed import by_platform, pmax, pmean, psum

Gate = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Gating:
    """The options of a router, which are arguments of `route`."""

    gate: Gate = "softmax"
    normalize: bool = True
    exact: bool = True
    recall_target: float = 0.95


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["experts", "gates", "balance_loss", "z_loss", "tokens_per_expert", "rounds"],
    meta_fields=["recall_target"],
)
@dataclass(frozen=True)
class Routing:
    """The experts and gates of the tokens, with the losses and statistics of the router."""

    experts: jax.Array
    """int32[S, k], best first."""
    gates: jax.Array
    """float32[S, k]."""
    balance_loss: jax.Array
    """The load-balancing loss: 1 under a uniform load, up to E / k if k experts get all tokens."""
    z_loss: jax.Array
    """The mean square of the logits' log-sum-exp, which is small for small logits."""
    tokens_per_expert: jax.Array
    """int32[E], the number of (token, slot) pairs per expert, on all devices of the axis."""
    rounds: jax.Array
    """The number of rounds of an exchange with this routing; 1 without an exchange."""
    recall_target: float
    """The requested share of true top-k experts: 1.0 if exact."""


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Return `x[S, D] @ router[D, E]` in float32, on a TPU at the highest precision.

    The choice of experts compares these logits. By default a TPU rounds the operands of a float32
    matmul to the eight bits of bfloat16. A GPU uses its default of eleven bits (TF32), because full
    precision would not use its tensor cores.
    """
    dtype = accumulator(x.dtype)
    return _scores(*match_varying(x.astype(dtype), router.astype(dtype)))


@jax.custom_vjp
def _scores(x: jax.Array, router: jax.Array) -> jax.Array:
    return _matmul_highest(x, router)


# Defined explicitly, because JAX would save the residuals of every platform's branch.
_scores.defvjp(
    lambda x, router: (_scores(x, router), (x, router)),
    lambda saved, g: (_matmul_highest(g, saved[1].T), _matmul_highest(saved[0].T, g)),
)


def _matmul_highest(a: jax.Array, b: jax.Array) -> jax.Array:
    return by_platform(a, b, tpu=partial(jnp.matmul, precision="highest"), default=jnp.matmul)


def route(
    logits: jax.Array,
    k: int,
    *,
    exact: bool = True,
    gate: Gate = "softmax",
    normalize: bool = True,
    recall_target: float = 0.95,
    axis_name: AxisName | None = None,
    buffer_rows: int | None = None,
) -> Routing:
    """Choose k experts per token.

    Args:
        logits: `[S, E]`, the router's logits; used in float32.
        k: the number of experts per token.
        exact: True for the exact top k. False uses `approx_max_k`, which is faster and approximate
            on a TPU, and exact on CPU and GPU.
        gate: "softmax" over all experts, or "sigmoid" per expert.
        normalize: True if the gates of a token sum to one.
        recall_target: the requested recall of `approx_max_k`.
        axis_name: the mesh axis of the tokens inside `shard_map`; losses and statistics then cover
            all its devices.
        buffer_rows: the buffer for the count of `rounds`, as in `expert_matmul`.

    Returns:
        Experts, gates, losses and statistics. Gradients flow through gates and losses.
    """
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"logits{list(logits.shape)}, k={k}: expected logits[S, E] and 1 ≤ k ≤ E")
    if gate not in ("softmax", "sigmoid"):
        raise ValueError(f"gate is {gate!r}; it can be 'softmax' or 'sigmoid'")
    if not 0 < recall_target <= 1:
        raise ValueError(f"recall_target is {recall_target}; it must be in (0, 1]")
    devices = 1 if axis_name is None else devices_along("route", axis_name)
    logits = logits.astype(jnp.float32)
    constant_logits = lax.stop_gradient(logits)
    if exact:
        _, experts = lax.top_k(constant_logits, k)
    else:
        _, experts = lax.approx_max_k(constant_logits, k, recall_target=recall_target)
    scores = jax.nn.softmax(logits) if gate == "softmax" else jax.nn.sigmoid(logits)
    gates = jnp.take_along_axis(scores, experts, axis=1)
    if normalize:
        gates = gates / jnp.maximum(gates.sum(1, keepdims=True), 1e-20)

    counts = group_sizes(experts.reshape(-1), logits.shape[1])
    share = scores / scores.sum(1, keepdims=True)
    importance = share.mean(0)
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=1) ** 2)
    is_used, rounds = counts, jnp.int32(1)
    if axis_name is not None:
        is_used = psum(counts, axis_name)
        importance, z_loss = pmean(importance, axis_name), pmean(z_loss, axis_name)
        capacity = buffer_rows or default_buffer_rows(experts.size, devices)
        rounds = _rounds(counts, axis_name, devices, capacity)
    fraction = is_used / jnp.maximum(is_used.sum(), 1)
    balance = logits.shape[1] * jnp.sum(fraction * importance)
    recall = 1.0 if exact else recall_target
    return Routing(experts, gates, balance, z_loss, is_used, rounds, recall)


def _rounds(counts: jax.Array, axis_name: AxisName, devices: int, capacity: int) -> jax.Array:
    if counts.shape[0] % devices:
        raise ValueError(
            f"{counts.shape[0]} experts do not divide over {devices} devices along {axis_name!r}"
        )
    gathered = lax.all_gather(counts, axis_name)
    packed = partial(round_count, devices=devices, buffer_rows=capacity, packed=True)
    dense = partial(round_count, devices=devices, buffer_rows=capacity, packed=False)
    rounds = by_platform(gathered, cpu=dense, default=packed)
    return pmax(rounds, axis_name)
