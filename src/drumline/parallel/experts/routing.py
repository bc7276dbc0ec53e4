"""Which experts a token goes to, with what weight, and how evenly that turned out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.experts.rounds import default_buffer_rows, rounds_needed
from drumline.parallel.grouped.blocks import accumulator, alike
from drumline.parallel.grouped.rows import group_sizes
from drumline.parallel.typed import by_platform, pmax, pmean, psum

Gate = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Gating:
    """How a layer's router chooses and weighs; each field is an argument of `route`."""

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
    """Where each token goes, and what the router should be told about it."""

    experts: jax.Array
    """int32[S, k], best first."""
    gates: jax.Array
    """float32[S, k]."""
    balance_loss: jax.Array
    """1 when experts are used evenly, up to E / k when k of them get everything."""
    z_loss: jax.Array
    """Mean square of the logits' log-sum-exp; small when logits stay small."""
    tokens_per_expert: jax.Array
    """int32[E], (token, slot) pairs for each expert, over all devices of the axis."""
    rounds: jax.Array
    """Rounds that an exchange of this routing takes; 1 where nothing is exchanged."""
    recall_target: float
    """The share of true top-k experts that was asked for: 1.0 when exact."""


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Return `x[S, D] @ router[D, E]` in float32; on a TPU to all its digits.

    A choice between experts is a comparison of these, and by default a TPU rounds the operands of a
    float32 product to the eight bits of bfloat16. A GPU keeps eleven (TF32), and to keep all would
    make it leave its fast units: it stays as it is there.
    """
    dtype = accumulator(x.dtype)
    return _scores(*alike(x.astype(dtype), router.astype(dtype)))


@jax.custom_vjp
def _scores(x: jax.Array, router: jax.Array) -> jax.Array:
    return _to_all_digits(x, router)


# Written out, as of a choice between platforms JAX would keep what each of them needs.
_scores.defvjp(
    lambda x, router: (_scores(x, router), (x, router)),
    lambda saved, g: (_to_all_digits(g, saved[1].T), _to_all_digits(saved[0].T, g)),
)


def _to_all_digits(a: jax.Array, b: jax.Array) -> jax.Array:
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
    """Choose k experts for each token.

    Args:
        logits: `[S, E]`, the router's scores; used in float32.
        k: experts for each token.
        exact: whether to take the true top k. If not, `approx_max_k` finds them faster on TPU and
            may miss some: `recall_target` is what it is asked for, and is reported as such. On
            CPU and GPU it finds the true top k all the same.
        gate: "softmax" over all experts, or a "sigmoid" for each.
        normalize: whether the gates of a token sum to one.
        recall_target: see `exact`.
        axis_name: mesh axis of the tokens inside `shard_map`; losses and statistics are then
            those of all its devices.
        buffer_rows: the buffer that `rounds` is counted for, as in `expert_matmul`.

    Returns:
        Experts, gates, losses and statistics. Gradients flow through gates and losses.
    """
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"logits{list(logits.shape)}, k={k}: expected logits[S, E] and 1 ≤ k ≤ E")
    if gate not in ("softmax", "sigmoid"):
        raise ValueError(f"gate is {gate!r}; it can be 'softmax' or 'sigmoid'")
    if not 0 < recall_target <= 1:
        raise ValueError(f"recall_target is {recall_target}; it must be in (0, 1]")
    peers = 1 if axis_name is None else devices_along("route", axis_name)
    logits = logits.astype(jnp.float32)
    chosen_by = lax.stop_gradient(logits)
    if exact:
        _, experts = lax.top_k(chosen_by, k)
    else:
        _, experts = lax.approx_max_k(chosen_by, k, recall_target=recall_target)
    scores = jax.nn.softmax(logits) if gate == "softmax" else jax.nn.sigmoid(logits)
    gates = jnp.take_along_axis(scores, experts, axis=1)
    if normalize:
        gates = gates / jnp.maximum(gates.sum(1, keepdims=True), 1e-20)

    counts = group_sizes(experts.reshape(-1), logits.shape[1])
    share = scores / scores.sum(1, keepdims=True)
    importance = share.mean(0)
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=1) ** 2)
    used, rounds = counts, jnp.int32(1)
    if axis_name is not None:
        used = psum(counts, axis_name)
        importance, z_loss = pmean(importance, axis_name), pmean(z_loss, axis_name)
        capacity = buffer_rows or default_buffer_rows(experts.size, peers)
        rounds = _rounds(counts, axis_name, peers, capacity)
    fraction = used / jnp.maximum(used.sum(), 1)
    balance = logits.shape[1] * jnp.sum(fraction * importance)
    recall = 1.0 if exact else recall_target
    return Routing(experts, gates, balance, z_loss, used, rounds, recall)


def _rounds(counts: jax.Array, axis_name: AxisName, peers: int, capacity: int) -> jax.Array:
    if counts.shape[0] % peers:
        raise ValueError(
            f"{counts.shape[0]} experts do not divide over {peers} devices along {axis_name!r}"
        )
    everyone = lax.all_gather(counts, axis_name)
    packed = partial(rounds_needed, peers=peers, buffer_rows=capacity, packed=True)
    dense = partial(rounds_needed, peers=peers, buffer_rows=capacity, packed=False)
    rounds = by_platform(everyone, cpu=dense, default=packed)
    return pmax(rounds, axis_name)
