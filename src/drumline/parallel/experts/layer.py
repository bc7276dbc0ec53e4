"""The mixture-of-experts feed-forward layer, and a residual block around it.

`moe_feedforward` routes, sends tokens to their experts once, applies both matrices there, and
brings one weighted sum back: hidden rows never travel. `MoEBlock` is the layer with its norm and
its residual, for a stack of Transformer blocks.
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
    among_everyone,
    side_by_side,
    through_experts,
)
from drumline.parallel.experts.matmul import Exchange
from drumline.parallel.experts.routing import Gate, Gating, Routing, route, router_logits
from drumline.parallel.grouped.blocks import accumulator, alike
from drumline.parallel.grouped.matmul import grouped_matmul, row_alignment
from drumline.parallel.grouped.rows import Grouping, group_rows
from drumline.parallel.transforms import reverse_only
from drumline.parallel.typed import psum

_SOFTMAX = Gating()


class Feedforward(NamedTuple):
    """What the layer computed, and how it was routed."""

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

    Local with no `axis_name`. Inside `shard_map`: `x[S_X, D_Y]`, `router[D_Y, E]`,
    `w_in[E_X, D, 2, F_Y]` (gate and up), `w_out[E_X, F_Y, D]` give `out[S_X, D_Y]`.

    Args:
        x: `[S, D]` tokens.
        router: `[D, E]`; its rows are split like the columns of `x`.
        w_in: `[E, D, 2, F]`: `w_in[:, :, 0]` is the gate, `w_in[:, :, 1]` is up.
        w_out: `[E, F, D]`.
        k: experts for each token.
        gating: how logits become gates.
        activation: applied to the gate's half.
        axis_name: mesh axis of tokens and experts.
        gather_axis_name: mesh axis of columns, or None where they are whole.
        exchange: as in `expert_matmul`.
        buffer_rows: as in `expert_matmul`.

    Returns:
        The sum of the experts' answers weighted by their gates, without the residual, and the
        routing with its losses.
    """
    caller = "moe_feedforward"
    columns = 1 if gather_axis_name is None else devices_along(caller, gather_axis_name)
    peers = 1 if axis_name is None else devices_along(caller, axis_name)
    _check(x, router, w_in, w_out, columns, peers)
    logits = router_logits(x, router)
    if gather_axis_name is not None:
        logits = psum(logits, gather_axis_name)
    routing = route(logits, k, **asdict(gating), axis_name=axis_name, buffer_rows=buffer_rows)
    keys, gates = routing.experts, routing.gates
    x, w_in, w_out, keys, gates = alike(x, w_in, w_out, keys, gates)
    x, w_in, w_out, gates = reverse_only(caller, x, w_in, w_out, gates)
    function = GatedFeedforward(activation)
    if axis_name is None:
        return Feedforward(_sorted_feedforward(function, x, w_in, w_out, keys, gates), routing)
    axes = Axes(axis_name, gather_axis_name, buffer_rows)
    travel = through_experts if exchange == "alltoall" else among_everyone
    return Feedforward(travel(function, axes, x, (w_in, w_out), keys, gates), routing)


def _sorted_feedforward(
    function: GatedFeedforward,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Sort, apply both matrices by group, and put back.

    Ordinary differentiation keeps the hidden rows here, which is the fast choice where they fit;
    wrap the layer in `jax.checkpoint` where they do not.
    """
    groups = group_rows(keys.reshape(-1), w_in.shape[0], row_alignment((w_in, w_out)))
    k = keys.shape[1]
    sizes = groups.sizes
    by_group = partial(grouped_matmul, aligned=True, zero_rest=False)
    h = by_group(_spread(k, x, groups), side_by_side(w_in), sizes)
    y = by_group(function.hidden(h), w_out, sizes)
    # The gate goes on in sorted order, where its gradient is a sum over rows of y.
    weight = groups.spread(gates.reshape(-1))[:, None]
    return _collect(k, (y.astype(accumulator(x.dtype)) * weight).astype(x.dtype), groups)


# Both directions between tokens and sorted rows are gathers: left to itself, differentiation would
# turn each into a scatter-add, which is slow on accelerators and sums in the type of x.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(k: int, x: jax.Array, groups: Grouping) -> jax.Array:
    return groups.spread(x, k)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect(k: int, y: jax.Array, groups: Grouping) -> jax.Array:
    ones = jnp.ones((groups.row.shape[0] // k, k), accumulator(y.dtype))
    return groups.weighted_sum(y, ones)


_spread.defvjp(
    lambda k, x, groups: (_spread(k, x, groups), groups),
    lambda k, groups, dy: (_collect(k, dy, groups), None),
)
_collect.defvjp(
    lambda k, y, groups: (_collect(k, y, groups), groups),
    lambda k, groups, dout: (_spread(k, dout, groups), None),
)


def _check(
    x: jax.Array, router: jax.Array, w_in: jax.Array, w_out: jax.Array, columns: int, peers: int
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
    if router.shape[1] != experts * peers:
        raise ValueError(f"{shapes}: router scores {router.shape[1]} experts of {experts * peers}")


class MoEBlock(eqx.Module):
    """A pre-norm residual block: `x + moe_feedforward(norm(x))`.

    Fields are split over a mesh as `moe_feedforward` says; `scale[D]` like the columns of `x`.
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
        """Draw matrices with variance 1 / fan-in; the router in float32, as its choices are."""
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

        # A scale of a wider type makes the block's result wider too.
        x = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        norm = partial(rms_norm, axis_name=gather_axis_name)
        return Feedforward(*expert_layer(x, {"feedforward_norm": self.scale}, layer, norm=norm))
