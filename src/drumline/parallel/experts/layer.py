"""The mixture-of-experts feed-forward layer, and a residual block around it.

`moe_feedforward` routes the tokens, sends a token to its experts once, computes the layer there,
and returns the weighted sum. It never sends hidden rows. `MoEBlock` adds the norm and the residual.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.block.layers import expert_layer, rms_norm
from drumline.parallel.block.weights import Weight, expert_weights, init
from drumline.parallel.experts.exchange import (
    Activation,
    Axes,
    GatedFeedforward,
    allgather_exchange,
    alltoall_exchange,
    join_gate_and_up,
)
from drumline.parallel.experts.matmul import Exchange
from drumline.parallel.experts.routing import Gate, Gating, Routing, route, router_logits
from drumline.parallel.grouped.blocks import accumulator, match_varying
from drumline.parallel.grouped.matmul import grouped_matmul, row_alignment
from drumline.parallel.grouped.rows import Grouping, group_rows
from drumline.parallel.transforms import reverse_only
from drumline.parallel.typed import psum

_SOFTMAX = Gating()


class Feedforward(NamedTuple):
    """The output of the layer, and its routing."""

    out: jax.Array
    routing: Routing


def moe_feedforward(
    x: jax.Array,
    router: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    k: int,
    gating: Gating = _SOFTMAX,
    activation: Activation = jax.nn.silu,
    axis_name: AxisName | None = None,
    gather_axis_name: AxisName | None = None,
    exchange: Exchange = "alltoall",
    buffer_rows: int | None = None,
) -> Feedforward:
    """Apply a gated feed-forward layer of k experts to each token.

    Without `axis_name` everything is local. Inside `shard_map`: `x[S_X, D_Y]`, `router[D_Y, E]`,
    `w_in[E_X, D, 2, F_Y]` (gate and up), `w_out[E_X, F_Y, D]` give `out[S_X, D_Y]`.

    Args:
        x: `[S, D]` tokens.
        router: `[D, E]`; its rows are sharded like the columns of `x`.
        w_in: `[E, D, 2, F]`: `w_in[:, :, 0]` is the gate, `w_in[:, :, 1]` is up.
        w_out: `[E, F, D]`.
        k: the number of experts per token.
        gating: the computation of gates from logits.
        activation: applied to the gate's half.
        axis_name: the mesh axis of tokens and experts.
        gather_axis_name: the mesh axis of the columns, or None if they are not sharded.
        exchange: as in `expert_matmul`.
        buffer_rows: as in `expert_matmul`.

    Returns:
        The sum of the experts' answers weighted by their gates, without the residual, and the
            routing with its losses.
    """
    caller = "moe_feedforward"
    columns = 1 if gather_axis_name is None else devices_along(caller, gather_axis_name)
    devices = 1 if axis_name is None else devices_along(caller, axis_name)
    _check(x, router, w_in, w_out, columns, devices)
    logits = router_logits(x, router)
    if gather_axis_name is not None:
        logits = psum(logits, gather_axis_name)
    routing = route(logits, k, **asdict(gating), axis_name=axis_name, buffer_rows=buffer_rows)
    keys, gates = routing.experts, routing.gates
    x, w_in, w_out, keys, gates = match_varying(x, w_in, w_out, keys, gates)
    x, w_in, w_out, gates = reverse_only(caller, x, w_in, w_out, gates)
    function = GatedFeedforward(activation)
    if axis_name is None:
        return Feedforward(_local_feedforward(function, x, w_in, w_out, keys, gates), routing)
    axes = Axes(axis_name, gather_axis_name, buffer_rows)
    exchange_rows = alltoall_exchange if exchange == "alltoall" else allgather_exchange
    return Feedforward(exchange_rows(function, axes, x, (w_in, w_out), keys, gates), routing)


def _local_feedforward(
    function: GatedFeedforward,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Sort the rows, apply the experts, and reorder the results.

    Automatic differentiation saves the hidden rows, which is fastest if they fit in memory. If they
    do not, wrap the layer in `jax.checkpoint`.
    """
    groups = group_rows(keys.reshape(-1), w_in.shape[0], row_alignment((w_in, w_out)))
    k = keys.shape[1]
    sizes = groups.sizes
    by_group = partial(grouped_matmul, aligned=True, zero_rest=False)
    h = by_group(_to_rows(k, x, groups), join_gate_and_up(w_in), sizes)
    y = by_group(function.hidden(h), w_out, sizes)
    # The gates multiply sorted rows, so their gradient is a sum over rows of y.
    weight = groups.to_rows(gates.reshape(-1))[:, None]
    return _to_pairs(k, (y.astype(accumulator(x.dtype)) * weight).astype(x.dtype), groups)


# The gradients of these gathers are gathers. Automatic differentiation would use scatter-adds,
# which are slow on accelerators and sum in the type of x.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_rows(k: int, x: jax.Array, groups: Grouping) -> jax.Array:
    return groups.to_rows(x, k)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_pairs(k: int, y: jax.Array, groups: Grouping) -> jax.Array:
    ones = jnp.ones((groups.row.shape[0] // k, k), accumulator(y.dtype))
    return groups.weighted_sum(y, ones)


_to_rows.defvjp(
    lambda k, x, groups: (_to_rows(k, x, groups), groups),
    lambda k, groups, dy: (_to_pairs(k, dy, groups), None),
)
_to_pairs.defvjp(
    lambda k, y, groups: (_to_pairs(k, y, groups), groups),
    lambda k, groups, dout: (_to_rows(k, dout, groups), None),
)


def _check(
    x: jax.Array, router: jax.Array, w_in: jax.Array, w_out: jax.Array, columns: int, devices: int
) -> None:
    shapes = (
        f"x{list(x.shape)}, router{list(router.shape)}, "
        f"w_in{list(w_in.shape)}, w_out{list(w_out.shape)}"
    )
    if (x.ndim, router.ndim, w_in.ndim, w_out.ndim) != (2, 2, 4, 3) or w_in.shape[2] != 2:
        raise ValueError(
            f"{shapes}: expected x[S, D], router[D, E], w_in[E, D, 2, F], w_out[E, F, D]"
        )
    experts, width, _, hidden = w_in.shape
    if w_out.shape != (experts, hidden, width):
        raise ValueError(f"{shapes}: w_out must be [{experts}, {hidden}, {width}] to follow w_in")
    if x.shape[1] * columns != width or router.shape[0] != x.shape[1]:
        raise ValueError(f"{shapes}: x, router and w_in disagree about the columns of a token")
    if router.shape[1] != experts * devices:
        raise ValueError(
            f"{shapes}: router scores {router.shape[1]} experts of {experts * devices}"
        )


class MoEBlock(eqx.Module):
    """A pre-norm residual block: `x + moe_feedforward(norm(x))`.

    Its fields are sharded as `moe_feedforward` requires, and `scale[D]` like the columns of `x`.
    """

    scale: jax.Array
    router: jax.Array
    w_in: jax.Array
    w_out: jax.Array
    k: int = eqx.field(static=True)
    gate: Gate = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        k: int,
        key: jax.Array,
        gate: Gate = "softmax",
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        """Draw matrices with variance 1/fan-in. The router stays in float32."""
        keys = iter(jax.random.split(key, 3))

        def draw(weight: Weight) -> jax.Array:
            scale: float = weight.fan_in**-0.5
            return jax.random.normal(next(keys), weight.dims) * scale

        drawn = init(expert_weights(width, hidden, experts), draw)
        self.scale, self.router = drawn["feedforward_norm"].astype(dtype), drawn["router"]
        self.w_in = drawn["experts_in"].astype(dtype)
        self.w_out = drawn["experts_out"].astype(dtype)
        self.k, self.gate = k, gate

    def __call__(
        self,
        x: jax.Array,
        *,
        axis_name: AxisName | None = None,
        gather_axis_name: AxisName | None = None,
        exchange: Exchange = "alltoall",
        buffer_rows: int | None = None,
    ) -> Feedforward:
        """Return `[..., D]` with the residual added, and the routing."""

        def layer(normed: jax.Array) -> Feedforward:
            out, routing = moe_feedforward(
                normed.reshape(-1, normed.shape[-1]),
                self.router,
                self.w_in,
                self.w_out,
                k=self.k,
                gating=Gating(self.gate),
                axis_name=axis_name,
                gather_axis_name=gather_axis_name,
                exchange=exchange,
                buffer_rows=buffer_rows,
            )
            return Feedforward(out.reshape(normed.shape), routing)

        # The scale may have a wider type than x, and the result has the wider one.
        x = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        norm = partial(rms_norm, axis_name=gather_axis_name)
        return Feedforward(*expert_layer(x, {"feedforward_norm": self.scale}, layer, norm=norm))
