"""Mixture of experts that drops nothing: `Out[i] = A[i] @ W[B[i]]`, local and sharded.

Tokens are sorted into one group an expert, multiplied by group, and put back, so that no array of
tokens × matrices nor of experts × tokens ever exists. Inside `shard_map` the tokens come to the
experts: all of them at once (`exchange="allgather"`), or in rounds of a fixed buffer
(`exchange="alltoall"`), where a skewed assignment costs more rounds and not more memory.
docs/experts.md has the arithmetic.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.experts.exchange import Axes, Linear, among_everyone, through_experts
from drumline.parallel.grouped.blocks import accumulator, alike
from drumline.parallel.grouped.matmul import outer, product, row_alignment
from drumline.parallel.grouped.rows import group_rows
from drumline.parallel.transforms import once_only, reverse_only

Exchange = Literal["alltoall", "allgather"]


def expert_matmul(
    a: jax.Array,
    w: jax.Array,
    assignment: jax.Array,
    gates: jax.Array | None = None,
    *,
    axis_name: AxisName | None = None,
    gather_axis_name: AxisName | None = None,
    exchange: Exchange = "alltoall",
    buffer_rows: int | None = None,
) -> jax.Array:
    """Multiply each token by the matrices of the experts it is assigned to.

    With no `axis_name` everything is local. Inside `shard_map`, `axis_name` is the axis that both
    experts and tokens are split over, and `gather_axis_name` the one over which the columns of
    `a` and of `w` are: `W[E_X, D, F_Y]`, `A[S_X, D_Y]`, `B[S_X]` give `Out[S_X, F_Y]`.

    Differentiable in `a`, `w` and `gates`; the backward pass keeps only the inputs and sends by
    the same rounds. Sums are in float32 whatever the type of `a`.

    Args:
        a: `[S, D]` tokens; the columns are this device's share under `gather_axis_name`.
        w: `[E, D, F]` matrices; the experts are this device's share under `axis_name`.
        assignment: `int[S]` or `int[S, k]`, numbered over the experts of all devices. A number
            outside them is a ValueError where its value is known; under `jit` and `shard_map`,
            where it is not, that slot contributes zero and receives no gradient.
        gates: `[S, k]` (or `[S]`) weights of the sum over k; the mean over k if None.
        axis_name: mesh axis (or axes) of experts and tokens, or None for a local product.
        gather_axis_name: mesh axis (or axes) of the columns, or None where `D` is whole.
        exchange: how tokens reach their experts; "alltoall" is bounded in memory.
        buffer_rows: rows a device can send each peer in one round of "alltoall"; a quarter of
            the balanced share if None. More rows make fewer rounds and take more memory.

    Returns:
        `[S, F]` in the type of `a`.
    """
    if gather_axis_name is not None and axis_name is None:
        raise ValueError(f"gather_axis_name is {gather_axis_name!r} but axis_name is missing")
    caller = "expert_matmul"
    peers = 1 if axis_name is None else devices_along(caller, axis_name)
    columns = 1 if gather_axis_name is None else devices_along(caller, gather_axis_name)
    _check(a, w, assignment, gates, columns)
    if exchange not in ("alltoall", "allgather"):
        raise ValueError(f"exchange is {exchange!r}; it can be 'alltoall' or 'allgather'")
    if buffer_rows is not None and buffer_rows < 1:
        raise ValueError(f"buffer_rows is {buffer_rows}; it must be at least 1")
    experts = w.shape[0] * peers
    _check_range(assignment, experts)
    a, w = jnp.asarray(a), jnp.asarray(w)
    assignment = _wide_enough(jnp.asarray(assignment).reshape(a.shape[0], -1))
    if gates is None:
        gates = jnp.full(assignment.shape, 1 / assignment.shape[1], accumulator(a.dtype))
    gates = jnp.asarray(gates).reshape(assignment.shape)
    inside = (assignment >= 0) & (assignment < experts)
    keys = jnp.where(inside, assignment, experts).astype(jnp.int32)
    a, w, keys, gates = alike(a, w, keys, gates)
    a, w, gates = reverse_only(caller, a, w, gates)
    if a.shape[0] == 0:
        return jnp.zeros_like(a, shape=(0, w.shape[2]))
    if axis_name is None:
        return _sorted_matmul(a, w, keys, gates)
    axes = Axes(axis_name, gather_axis_name, buffer_rows)
    travel = through_experts if exchange == "alltoall" else among_everyone
    return travel(Linear(), axes, a, (w,), keys, gates)


@jax.custom_vjp
def _sorted_matmul(a: jax.Array, w: jax.Array, keys: jax.Array, gates: jax.Array) -> jax.Array:
    groups = group_rows(keys.reshape(-1), w.shape[0], row_alignment((w,)))
    y = product(groups.spread(a, keys.shape[1]), w, groups.sizes, aligned=True)
    return groups.weighted_sum(y, gates)


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _sorted_forward(
    a: jax.Array, w: jax.Array, keys: jax.Array, gates: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _sorted_matmul(a, w, keys, gates), (a, w, keys, gates)


def _sorted_backward(
    saved: _Saved, dout: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    a, w, keys, gates = saved
    k = keys.shape[1]
    groups = group_rows(keys.reshape(-1), w.shape[0], row_alignment((w,)))
    dy = groups.spread(once_only("expert_matmul", dout), k)
    # The gate weighs x here and not dy, so that dx is free of it: its dot product with a is then
    # the gate's own gradient, and the experts' outputs need not be computed again.
    dw = outer(groups.spread(a, k, gates), dy, groups.sizes, out_dtype=w.dtype, aligned=True)
    dx = product(dy, w, groups.sizes, transpose=True, aligned=True)
    da = groups.weighted_sum(dx, gates)
    return da, dw, None, groups.dots(dx, a).astype(gates.dtype)


_sorted_matmul.defvjp(_sorted_forward, _sorted_backward)


def _wide_enough(numbers: jax.Array) -> jax.Array:
    """Return the numbers in a type that holds the count of experts too: int8 ends at 127."""
    return numbers.astype(jnp.int32) if numbers.dtype.itemsize < 4 else numbers


def _check_range(assignment: jax.Array, experts: int) -> None:
    if isinstance(assignment, jax.core.Tracer):
        return
    known = np.asarray(assignment)
    wrong = np.argwhere((known < 0) | (known >= experts))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"assignment{list(at)} is {known[at]}, but there are {experts} experts, "
            f"numbered 0 to {experts - 1}"
        )


def _check(
    a: jax.Array,
    w: jax.Array,
    assignment: jax.Array,
    gates: jax.Array | None,
    columns: int,
) -> None:
    shapes = f"a{list(a.shape)}, w{list(w.shape)}, assignment{list(assignment.shape)}"
    if a.ndim != 2 or w.ndim != 3 or assignment.ndim not in (1, 2):
        raise ValueError(f"{shapes}: expected a[S, D], w[E, D, F] and assignment[S] or [S, k]")
    if not jnp.issubdtype(assignment.dtype, jnp.integer):
        raise ValueError(f"assignment holds {assignment.dtype}; it must hold integers")
    if a.dtype != w.dtype or not jnp.issubdtype(a.dtype, jnp.floating):
        raise ValueError(f"a holds {a.dtype} and w {w.dtype}; give both the same float type")
    if a.shape[1] * columns != w.shape[1]:
        over = f" on each of {columns} devices" if columns > 1 else ""
        raise ValueError(f"{shapes}: a has {a.shape[1]} columns{over}, w takes {w.shape[1]}")
    if assignment.shape[0] != a.shape[0]:
        raise ValueError(
            f"{shapes}: {a.shape[0]} tokens but {assignment.shape[0]} rows of assignment"
        )
    if assignment.ndim == 2 and assignment.shape[1] == 0:
        raise ValueError(f"{shapes}: assignment names no expert (k is 0)")
    if gates is not None and gates.shape != assignment.shape:
        raise ValueError(f"{shapes}: gates{list(gates.shape)} must have the shape of assignment")
