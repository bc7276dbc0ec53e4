"""X"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.experts.rounds import (
    AHEAD,
    DENSE,
    PACKED,
    Rounds,
    Schedule,
    Stages,
    plan_rounds,
)
from drumline.parallel.grouped.blocks import accumulator
from drumline.parallel.grouped.matmul import outer, product, row_alignment
from drumline.parallel.grouped.rows import Grouping, group_rows
from drumline.parallel.transforms import once_only
from drumline.parallel.typed import by_platform, psum_scatter

Matrices = tuple[jax.Array, ...]
Activation = Callable[[jax.Array], jax.Array]


class ExpertFunction(Protocol):
    """What the exchange asks of an expert."""

    @property
    def sums_columns(self) -> bool:
        """Whether devices along the column axis hold summands of an answer, not its columns."""
        ...

    def width(self, matrices: Matrices) -> int:
        """Return the columns of an answer before any are shared out."""
        ...

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return the answers for sorted rows."""
        ...

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return the gradients of rows, matrices and gates; `dy` is not yet weighed by `gate`."""
        ...


@dataclass(frozen=True)
class Linear:
    """`x @ w`, with `w[E, D, F]`."""

    sums_columns: bool = False

    def width(self, matrices: Matrices) -> int:
        """Return F."""
        return matrices[0].shape[2]

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return `x @ w`, by group."""
        return product(x, matrices[0], sizes, aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return gradients; the gate's is `(dy @ wᵀ) · x`, which equals `dy · (x @ w)`."""
        dtype = accumulator(x.dtype)
        dx = product(dy, matrices[0], sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(dx * x.astype(dtype), axis=1)
        dw = outer((gate[:, None] * x).astype(x.dtype), dy, sizes, aligned=True)
        return gate[:, None] * dx, (dw,), dgate


@dataclass(frozen=True)
class GatedFeedforward:
    """`(activation(x @ gate) * (x @ up)) @ w_out`, with `w_in[E, D, 2, F]` and `w_out[E, F, D]`."""

    activation: Activation
    sums_columns: bool = True

    def width(self, matrices: Matrices) -> int:
        """Return D."""
        return matrices[1].shape[2]

    def hidden(self, h: jax.Array) -> jax.Array:
        """Return the gated activation of `h`, which holds gate and up side by side."""
        dtype = accumulator(h.dtype)
        gate, up = jnp.split(h.astype(dtype), 2, axis=1)
        return (self.activation(gate) * up).astype(h.dtype)

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return the layer's answers in float32: they may be summands."""
        w_in, w_out = side_by_side(matrices[0]), matrices[1]
        hidden = self.hidden(product(x, w_in, sizes, aligned=True))
        return product(hidden, w_out, sizes, out_dtype=accumulator(x.dtype), aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return gradients, computing the hidden rows again."""
        w_in, w_out = side_by_side(matrices[0]), matrices[1]
        dtype = accumulator(x.dtype)
        gate = gate[:, None]
        hidden, pull = jax.vjp(self.hidden, product(x, w_in, sizes, aligned=True))
        toward = product(dy, w_out, sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(toward * hidden.astype(dtype), axis=1)
        dw_out = outer((gate * hidden).astype(x.dtype), dy, sizes, aligned=True)
        (dh,) = pull((gate * toward).astype(x.dtype))
        dw_in = outer(x, dh, sizes, aligned=True).reshape(matrices[0].shape)
        dx = product(dh, w_in, sizes, transpose=True, out_dtype=dtype, aligned=True)
        return dx, (dw_in, dw_out), dgate


def side_by_side(w_in: jax.Array) -> jax.Array:
    """Return `[E, D, 2, F]` as `[E, D, 2 F]`: the gate's columns, then those of up."""
    return w_in.reshape(*w_in.shape[:2], -1)


T = TypeVar("T")
_CALLERS = "expert_matmul or moe_feedforward"


class Axes(NamedTuple):
    """Which mesh axes an exchange runs over, and how many rows a buffer has for each peer."""

    experts: AxisName
    columns: AxisName | None
    buffer_rows: int | None = None


_Inputs = tuple[jax.Array, Matrices, jax.Array, jax.Array]
"""Tokens, matrices, keys and gates."""


def _keeping_inputs(
    exchange: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, _Inputs]]:
    """Return the forward of an exchange whose backward needs its inputs and nothing else."""

    def forward(
        function: ExpertFunction, axes: Axes, *inputs: *_Inputs
    ) -> tuple[jax.Array, _Inputs]:
        return exchange(function, axes, *inputs), inputs

    return forward


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def through_experts(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Return the sum over k of `gates[s, k] · function(a[s], expert keys[s, k])`.

    `keys` is `int[S, k]` over the experts of all devices, with their number standing for none.
    """
    return _by_device(partial(_forward_rounds, function, axes), a, matrices, keys, gates)


def _backward(
    function: ExpertFunction, axes: Axes, saved: _Inputs, dout: jax.Array
) -> tuple[jax.Array, Matrices, None, jax.Array]:
    dout = once_only(_CALLERS, dout)
    da, dmatrices, dgates = _by_device(partial(_backward_rounds, function, axes), *saved, dout)
    return da, dmatrices, None, dgates


through_experts.defvjp(_keeping_inputs(through_experts), _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def among_everyone(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Return what `through_experts` does, with all tokens brought to every device at once."""
    everyone = _bring_everyone(axes, a, matrices, keys, gates)
    groups = everyone.groups
    x = groups.spread(everyone.tokens, keys.shape[1])
    y = function.forward(matrices, x, groups.sizes)
    # In float32 until all devices have added theirs: they are terms of one sum.
    out = groups.weighted_sum(y, everyone.gates, accumulator(a.dtype))
    out = psum_scatter(out, axes.experts)
    if function.sums_columns:
        out = _share(out, axes)
    return out.astype(a.dtype)


def _among_backward(
    function: ExpertFunction, axes: Axes, saved: _Inputs, dout: jax.Array
) -> tuple[jax.Array, Matrices, None, jax.Array]:
    a, matrices, keys, gates = saved
    k, dtype = keys.shape[1], accumulator(a.dtype)
    everyone = _bring_everyone(axes, a, matrices, keys, gates)
    groups = everyone.groups
    dy = lax.all_gather(once_only(_CALLERS, dout), axes.experts, tiled=True)
    if function.sums_columns:
        dy = _whole(dy, axes)
    dx, dmatrices, dgate = function.backward(
        matrices,
        groups.spread(everyone.tokens, k),
        groups.spread(everyone.gates.reshape(-1, 1))[:, 0],
        groups.spread(dy, k),
        groups.sizes,
    )
    da = groups.weighted_sum(dx, jnp.ones_like(everyone.gates), dtype)
    da = _share(psum_scatter(da, axes.experts), axes).astype(a.dtype)
    dgates = groups.collect(dgate[:, None]).reshape(everyone.gates.shape)
    return (
        da,
        tuple(d.astype(matrix.dtype) for d, matrix in zip(dmatrices, matrices, strict=True)),
        None,
        psum_scatter(dgates, axes.experts).astype(gates.dtype),
    )


among_everyone.defvjp(_keeping_inputs(among_everyone), _among_backward)


class _Everyone(NamedTuple):
    """The tokens of all devices, whole, their gates, and which of them are for experts here."""

    tokens: jax.Array
    gates: jax.Array
    groups: Grouping


def _bring_everyone(
    axes: Axes, a: jax.Array, matrices: Matrices, keys: jax.Array, gates: jax.Array
) -> _Everyone:
    experts = matrices[0].shape[0]
    tokens = _whole(lax.all_gather(a, axes.experts, tiled=True), axes)
    keys, gates = (lax.all_gather(v, axes.experts, tiled=True) for v in (keys, gates))
    local = keys - lax.axis_index(axes.experts) * experts
    mine = (local >= 0) & (local < experts)
    groups = _grouped(jnp.where(mine, local, experts).reshape(-1), matrices)
    return _Everyone(tokens, gates.astype(accumulator(a.dtype)), groups)


def _by_device(rounds: Callable[..., T], *operands: Any) -> T:
    """Use packed buffers where `ragged_all_to_all` exists, dense ones elsewhere.

    A TPU sends them while it multiplies.
    """
    schedules = {"cpu": DENSE, "tpu": AHEAD, "default": PACKED}
    branches = {name: partial(rounds, schedule=each) for name, each in schedules.items()}
    return by_platform(*operands, **branches)


def _plan(axes: Axes, matrices: Matrices, keys: jax.Array, schedule: Schedule) -> Rounds:
    experts = matrices[0].shape[0] * lax.axis_size(axes.experts)
    buffers = {"packed": schedule.packed, "ahead": schedule.ahead}
    return plan_rounds(keys.reshape(-1), experts, axes.experts, axes.buffer_rows, **buffers)


def _whole(x: jax.Array, axes: Axes) -> jax.Array:
    return x if axes.columns is None else lax.all_gather(x, axes.columns, axis=1, tiled=True)


def _share(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum over the devices along the column axis and keep this device's columns."""
    if axes.columns is None:
        return x
    return psum_scatter(x, axes.columns, 1)


def _forward_rounds(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
    *,
    schedule: Schedule,
) -> jax.Array:
    tokens, k = keys.shape
    plan = _plan(axes, matrices, keys, schedule)
    dtype = accumulator(a.dtype)
    weight = gates.reshape(-1).astype(dtype)

    def send(r: jax.Array) -> jax.Array:
        # A row without a pair has the token past the last.
        return plan.travel(_rows(a, plan.sent(r) // k), r)

    def work(r: jax.Array, arrived: jax.Array, _: tuple[()]) -> tuple[jax.Array, tuple[()]]:
        groups = _grouped(plan.received(r), matrices)
        y = function.forward(matrices, _whole(groups.spread(arrived), axes), groups.sizes)
        if function.sums_columns:
            y = _share(y, axes)
        return groups.collect(y.astype(a.dtype)), ()

    def add(r: jax.Array, answers: jax.Array, out: jax.Array) -> jax.Array:
        pair = plan.sent(r)
        y = plan.travel(answers, r, back=True).astype(dtype)
        return out.at[pair // k].add(_rows(weight, pair)[:, None] * y, mode="drop")

    width = function.width(matrices)
    if function.sums_columns and axes.columns is not None:
        width //= lax.axis_size(axes.columns)
    answers = jnp.zeros_like(a, shape=(plan.rows, width))
    out = jnp.zeros_like(a, shape=(tokens, width), dtype=dtype)
    total: jax.Array
    total, _ = schedule(plan.count, Stages(send, work, add), answers, out, ())
    return total.astype(a.dtype)


def _backward_rounds(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
    dout: jax.Array,
    *,
    schedule: Schedule,
) -> tuple[jax.Array, Matrices, jax.Array]:
    k = keys.shape[1]
    plan = _plan(axes, matrices, keys, schedule)
    dtype = accumulator(a.dtype)
    weight = gates.reshape(-1).astype(dtype)
    Pair = tuple[jax.Array, jax.Array]  # noqa: N806

    def send(r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        pair = plan.sent(r)
        token = pair // k
        rows = (_rows(a, token), _rows(dout, token), _rows(weight, pair)[:, None])
        x, dy, gate = (plan.travel(each, r) for each in rows)
        return x, dy, gate

    def work(
        r: jax.Array, arrived: tuple[jax.Array, jax.Array, jax.Array], totals: Matrices
    ) -> tuple[Pair, Matrices]:
        groups = _grouped(plan.received(r), matrices)
        x, dy, gate = (groups.spread(each) for each in arrived)
        if function.sums_columns:
            dy = _whole(dy, axes)
        dx, more, dgate = function.backward(matrices, _whole(x, axes), gate[:, 0], dy, groups.sizes)
        totals = tuple(total + part for total, part in zip(totals, more, strict=True))
        dx = groups.collect(_share(dx, axes).astype(a.dtype))
        return (dx, groups.collect(dgate)[:, None]), totals

    def add(r: jax.Array, answers: Pair, sums: Pair) -> Pair:
        pair = plan.sent(r)
        dx, dgate = (plan.travel(each, r, back=True) for each in answers)
        da, dweight = sums
        return (
            da.at[pair // k].add(dx.astype(dtype), mode="drop"),
            dweight.at[pair].set(dgate[:, 0], mode="drop"),
        )

    answers = (
        jnp.zeros_like(a, shape=(plan.rows, a.shape[1])),
        jnp.zeros_like(a, shape=(plan.rows, 1), dtype=dtype),
    )
    sums = (jnp.zeros_like(a, dtype=dtype), jnp.zeros_like(weight))
    totals = tuple(jnp.zeros_like(matrix, dtype=dtype) for matrix in matrices)
    (da, dweight), dmatrices = schedule(plan.count, Stages(send, work, add), answers, sums, totals)
    return (
        da.astype(a.dtype),
        tuple(d.astype(matrix.dtype) for d, matrix in zip(dmatrices, matrices, strict=True)),
        dweight.reshape(gates.shape).astype(gates.dtype),
    )


def _grouped(experts: jax.Array, matrices: Matrices) -> Grouping:
    alignment = row_alignment(matrices)
    return group_rows(experts, matrices[0].shape[0], alignment)


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index; an index past the last gives some row, which nobody will read."""
    return jnp.take(array, jnp.minimum(index, array.shape[0] - 1), axis=0)
