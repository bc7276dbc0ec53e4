"""Experts on sorted rows, and the exchange of tokens between devices.

An expert function takes sorted rows and the local matrices. Its backward pass also computes the
gradients of the gates, from matmuls that it needs for other gradients, so it does not recompute the
outputs of the experts. The gradients of the matrices are summed in float32 and then rounded. Groups
of rows are aligned as `row_alignment` requires.

The exchanges work inside `shard_map`, with tokens `A[S_X, D_Y]` and experts sharded over X.
`allgather_exchange` gathers all tokens on every device. `alltoall_exchange` has rounds. In a round,
a device sends a slice of its rows to the devices with their experts. Every device gathers the
columns of its received rows over the second axis, applies its experts, and returns the answers,
which the sender adds to the result. The expert axis transfers only the local columns.

The exchanges save only their inputs for the backward pass, and send the rows again. A backward
round sends the tokens, the gradients of their outputs and their gates to the experts, and returns
the gradients of tokens and gates. The gradients of the experts are summed locally in float32.
"""

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
    DENSE,
    PACKED,
    PACKED_OVERLAPPED,
    Rounds,
    Schedule,
    Stages,
    plan_exchange,
)
from drumline.parallel.grouped.blocks import accumulator
from drumline.parallel.grouped.matmul import outer, product, row_alignment
from drumline.parallel.grouped.rows import Grouping, group_rows
from drumline.parallel.transforms import once_only
from drumline.parallel.typed import by_platform, psum_scatter

Matrices = tuple[jax.Array, ...]
Activation = Callable[[jax.Array], jax.Array]


class ExpertFunction(Protocol):
    """The interface of an expert."""

    @property
    def sums_columns(self) -> bool:
        """True if the column axis shards the terms of a sum instead of the columns of answers."""
        ...

    def width(self, matrices: Matrices) -> int:
        """Return the number of columns of an answer before a scatter."""
        ...

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return the answers for sorted rows."""
        ...

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return the gradients of rows, matrices and gates; `dy` is not weighted by `gate`."""
        ...


@dataclass(frozen=True)
class Linear:
    """A matmul `x @ w`, with `w[E, D, F]`."""

    sums_columns: bool = False

    def width(self, matrices: Matrices) -> int:
        """Return F."""
        return matrices[0].shape[2]

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return `x @ w` for each group."""
        return product(x, matrices[0], sizes, aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return the gradients. `(dy @ wᵀ) · x` for the gate equals `dy · (x @ w)`."""
        dtype = accumulator(x.dtype)
        dx = product(dy, matrices[0], sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(dx * x.astype(dtype), axis=1)
        dw = outer((gate[:, None] * x).astype(x.dtype), dy, sizes, aligned=True)
        return gate[:, None] * dx, (dw,), dgate


@dataclass(frozen=True)
class GatedFeedforward:
    """A gated layer `(activation(x @ gate) * (x @ up)) @ w_out` with `w_in[E, D, 2, F]`."""

    activation: Activation
    sums_columns: bool = True

    def width(self, matrices: Matrices) -> int:
        """Return D."""
        return matrices[1].shape[2]

    def hidden(self, h: jax.Array) -> jax.Array:
        """Return the gated activation of `h`, the concatenated columns of gate and up."""
        dtype = accumulator(h.dtype)
        gate, up = jnp.split(h.astype(dtype), 2, axis=1)
        return (self.activation(gate) * up).astype(h.dtype)

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return float32 answers, because they may be terms of a sum."""
        w_in, w_out = join_gate_and_up(matrices[0]), matrices[1]
        hidden = self.hidden(product(x, w_in, sizes, aligned=True))
        return product(hidden, w_out, sizes, out_dtype=accumulator(x.dtype), aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return the gradients. Recompute the hidden rows."""
        w_in, w_out = join_gate_and_up(matrices[0]), matrices[1]
        dtype = accumulator(x.dtype)
        gate = gate[:, None]
        hidden, pullback = jax.vjp(self.hidden, product(x, w_in, sizes, aligned=True))
        dhidden = product(dy, w_out, sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(dhidden * hidden.astype(dtype), axis=1)
        dw_out = outer((gate * hidden).astype(x.dtype), dy, sizes, aligned=True)
        (dh,) = pullback((gate * dhidden).astype(x.dtype))
        dw_in = outer(x, dh, sizes, aligned=True).reshape(matrices[0].shape)
        dx = product(dh, w_in, sizes, transpose=True, out_dtype=dtype, aligned=True)
        return dx, (dw_in, dw_out), dgate


def join_gate_and_up(w_in: jax.Array) -> jax.Array:
    """Reshape `[E, D, 2, F]` to `[E, D, 2 F]`: the columns of the gate, then those of up."""
    return w_in.reshape(*w_in.shape[:2], -1)


T = TypeVar("T")
_CALLERS = "expert_matmul or moe_feedforward"


class Axes(NamedTuple):
    """The mesh axes of an exchange, and the buffer rows for each peer."""

    experts: AxisName
    columns: AxisName | None
    buffer_rows: int | None = None


_Inputs = tuple[jax.Array, Matrices, jax.Array, jax.Array]
"""Tokens, matrices, keys and gates."""


def _save_inputs(
    exchange: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, _Inputs]]:
    """Return the forward pass of an exchange that saves only its inputs."""

    def forward(
        function: ExpertFunction, axes: Axes, *inputs: *_Inputs
    ) -> tuple[jax.Array, _Inputs]:
        return exchange(function, axes, *inputs), inputs

    return forward


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def alltoall_exchange(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Return the sum over k of `gates[s, k] · function(a[s], expert keys[s, k])`.

    `keys` is `int[S, k]`, indices of the experts of all devices, or their number for no expert.
    """
    return _run_on_platform(partial(_forward_rounds, function, axes), a, matrices, keys, gates)


def _alltoall_backward(
    function: ExpertFunction, axes: Axes, saved: _Inputs, dout: jax.Array
) -> tuple[jax.Array, Matrices, None, jax.Array]:
    dout = once_only(_CALLERS, dout)
    da, dmatrices, dgates = _run_on_platform(
        partial(_backward_rounds, function, axes), *saved, dout
    )
    return da, dmatrices, None, dgates


alltoall_exchange.defvjp(_save_inputs(alltoall_exchange), _alltoall_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def allgather_exchange(
    function: ExpertFunction,
    axes: Axes,
    a: jax.Array,
    matrices: Matrices,
    keys: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Return the result of `alltoall_exchange`, but gather all tokens on every device."""
    gathered = _gather_tokens(axes, a, matrices, keys, gates)
    groups = gathered.groups
    x = groups.to_rows(gathered.tokens, keys.shape[1])
    y = function.forward(matrices, x, groups.sizes)
    # float32, because the terms of all devices are summed.
    out = groups.weighted_sum(y, gathered.gates, accumulator(a.dtype))
    out = psum_scatter(out, axes.experts)
    if function.sums_columns:
        out = _scatter_columns(out, axes)
    return out.astype(a.dtype)


def _allgather_backward(
    function: ExpertFunction, axes: Axes, saved: _Inputs, dout: jax.Array
) -> tuple[jax.Array, Matrices, None, jax.Array]:
    a, matrices, keys, gates = saved
    k, dtype = keys.shape[1], accumulator(a.dtype)
    gathered = _gather_tokens(axes, a, matrices, keys, gates)
    groups = gathered.groups
    dy = lax.all_gather(once_only(_CALLERS, dout), axes.experts, tiled=True)
    if function.sums_columns:
        dy = _gather_columns(dy, axes)
    dx, dmatrices, dgate = function.backward(
        matrices,
        groups.to_rows(gathered.tokens, k),
        groups.to_rows(gathered.gates.reshape(-1, 1))[:, 0],
        groups.to_rows(dy, k),
        groups.sizes,
    )
    da = groups.weighted_sum(dx, jnp.ones_like(gathered.gates), dtype)
    da = _scatter_columns(psum_scatter(da, axes.experts), axes).astype(a.dtype)
    dgates = groups.to_pairs(dgate[:, None]).reshape(gathered.gates.shape)
    return (
        da,
        tuple(d.astype(matrix.dtype) for d, matrix in zip(dmatrices, matrices, strict=True)),
        None,
        psum_scatter(dgates, axes.experts).astype(gates.dtype),
    )


allgather_exchange.defvjp(_save_inputs(allgather_exchange), _allgather_backward)


class _GatheredTokens(NamedTuple):
    """The tokens of all devices, their gates, and their grouping by the local experts."""

    tokens: jax.Array
    gates: jax.Array
    groups: Grouping


def _gather_tokens(
    axes: Axes, a: jax.Array, matrices: Matrices, keys: jax.Array, gates: jax.Array
) -> _GatheredTokens:
    experts = matrices[0].shape[0]
    tokens = _gather_columns(lax.all_gather(a, axes.experts, tiled=True), axes)
    keys, gates = (lax.all_gather(v, axes.experts, tiled=True) for v in (keys, gates))
    local = keys - lax.axis_index(axes.experts) * experts
    is_local = (local >= 0) & (local < experts)
    groups = _group_rows(jnp.where(is_local, local, experts).reshape(-1), matrices)
    return _GatheredTokens(tokens, gates.astype(accumulator(a.dtype)), groups)


def _run_on_platform(rounds: Callable[..., T], *operands: Any) -> T:
    """Run the rounds with the schedule of the platform. CPUs have no `ragged_all_to_all`."""
    schedules = {"cpu": DENSE, "tpu": PACKED_OVERLAPPED, "default": PACKED}
    branches = {
        platform: partial(rounds, schedule=schedule) for platform, schedule in schedules.items()
    }
    return by_platform(*operands, **branches)


def _plan(axes: Axes, matrices: Matrices, keys: jax.Array, schedule: Schedule) -> Rounds:
    experts = matrices[0].shape[0] * lax.axis_size(axes.experts)
    buffers = {"packed": schedule.packed, "overlapped": schedule.overlapped}
    return plan_exchange(keys.reshape(-1), experts, axes.experts, axes.buffer_rows, **buffers)


def _gather_columns(x: jax.Array, axes: Axes) -> jax.Array:
    return x if axes.columns is None else lax.all_gather(x, axes.columns, axis=1, tiled=True)


def _scatter_columns(x: jax.Array, axes: Axes) -> jax.Array:
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
        # A row without a pair has an index past the last token.
        return plan.exchange_rows(_rows(a, plan.sent(r) // k), r)

    def work(r: jax.Array, arrived: jax.Array, _: tuple[()]) -> tuple[jax.Array, tuple[()]]:
        groups = _group_rows(plan.received(r), matrices)
        y = function.forward(matrices, _gather_columns(groups.to_rows(arrived), axes), groups.sizes)
        if function.sums_columns:
            y = _scatter_columns(y, axes)
        return groups.to_pairs(y.astype(a.dtype)), ()

    def add(r: jax.Array, answers: jax.Array, out: jax.Array) -> jax.Array:
        pair = plan.sent(r)
        y = plan.exchange_rows(answers, r, back=True).astype(dtype)
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
    Answers = tuple[jax.Array, jax.Array]  # noqa: N806

    def send(r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        pair = plan.sent(r)
        token = pair // k
        rows = (_rows(a, token), _rows(dout, token), _rows(weight, pair)[:, None])
        x, dy, gate = (plan.exchange_rows(array, r) for array in rows)
        return x, dy, gate

    def work(
        r: jax.Array, arrived: tuple[jax.Array, jax.Array, jax.Array], totals: Matrices
    ) -> tuple[Answers, Matrices]:
        groups = _group_rows(plan.received(r), matrices)
        x, dy, gate = (groups.to_rows(array) for array in arrived)
        if function.sums_columns:
            dy = _gather_columns(dy, axes)
        dx, new_totals, dgate = function.backward(
            matrices, _gather_columns(x, axes), gate[:, 0], dy, groups.sizes
        )
        totals = tuple(total + part for total, part in zip(totals, new_totals, strict=True))
        dx = groups.to_pairs(_scatter_columns(dx, axes).astype(a.dtype))
        return (dx, groups.to_pairs(dgate)[:, None]), totals

    def add(r: jax.Array, answers: Answers, sums: Answers) -> Answers:
        pair = plan.sent(r)
        dx, dgate = (plan.exchange_rows(array, r, back=True) for array in answers)
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


def _group_rows(experts: jax.Array, matrices: Matrices) -> Grouping:
    alignment = row_alignment(matrices)
    return group_rows(experts, matrices[0].shape[0], alignment)


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index, with an arbitrary row for an index past the end."""
    return jnp.take(array, jnp.minimum(index, array.shape[0] - 1), axis=0)
