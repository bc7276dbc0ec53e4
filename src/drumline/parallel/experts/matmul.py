"""A dropless mixture of experts, local and sharded: `Out[i] = A[i] @ W[B[i]]`.

`expert_matmul` sorts the tokens by expert, multiplies the groups, and restores the order. It
creates no array of tokens × matrices or of experts × tokens. Inside `shard_map` it gathers all
tokens (`exchange="allgather"`) or sends them to the experts in rounds with a fixed buffer
(`exchange="alltoall"`). A skewed assignment then needs more rounds, but no more memory. See
docs/experts.md.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from drumline.parallel.axes import AxisName, devices_along
from drumline.parallel.experts.exchange import Axes, Linear, allgather_exchange, alltoall_exchange
from drumline.parallel.grouped.blocks import accumulator, match_varying
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
    """Multiply each token by the matrices of its experts.

    Without `axis_name` the matmul is local. Inside `shard_map`, `axis_name` is the axis that shards
    experts and tokens, and `gather_axis_name` the axis that shards the columns of `a` and `w`:
    `W[E_X, D, F_Y]`, `A[S_X, D_Y]`, `B[S_X]` give `Out[S_X, F_Y]`.

    The result is differentiable in `a`, `w` and `gates`. The backward pass needs only the inputs.
    Sums are float32 for any type of `a`.

    Args:
        a: `[S, D]` tokens; this device's columns under `gather_axis_name`.
        w: `[E, D, F]` matrices; this device's experts under `axis_name`.
        assignment: `int[S]` or `int[S, k]`, numbered over the experts of all devices. An invalid
            number raises ValueError. Under `jit` and `shard_map`, where values are unknown, its
            slot contributes zero and gets no gradient.
        gates: `[S, k]` (or `[S]`) weights of the sum over k; None is the mean over k.
        axis_name: the mesh axis (or axes) of experts and tokens; None is local.
        gather_axis_name: the mesh axis (or axes) of the columns; None if `D` is not sharded.
        exchange: the exchange of tokens; "alltoall" has bounded memory.
        buffer_rows: the rows that a device can send to a peer in a round of "alltoall"; None is a
            quarter of the balanced share. More rows need fewer rounds and more memory.

    Returns:
        `[S, F]` in the type of `a`.
    """
    if gather_axis_name is not None and axis_name is None:
        raise ValueError(f"gather_axis_name is {gather_axis_name!r} but axis_name is missing")
    caller = "expert_matmul"
    devices = 1 if axis_name is None else devices_along(caller, axis_name)
    columns = 1 if gather_axis_name is None else devices_along(caller, gather_axis_name)
    _check(a, w, assignment, gates, columns)
    if exchange not in ("alltoall", "allgather"):
        raise ValueError(f"exchange is {exchange!r}; it can be 'alltoall' or 'allgather'")
    if buffer_rows is not None and buffer_rows < 1:
        raise ValueError(f"buffer_rows is {buffer_rows}; it must be at least 1")
    experts = w.shape[0] * devices
    _check_assignment(assignment, experts)
    a, w = jnp.asarray(a), jnp.asarray(w)
    assignment = _widen(jnp.asarray(assignment).reshape(a.shape[0], -1))
    if gates is None:
        gates = jnp.full(assignment.shape, 1 / assignment.shape[1], accumulator(a.dtype))
    gates = jnp.asarray(gates).reshape(assignment.shape)
    valid = (assignment >= 0) & (assignment < experts)
    keys = jnp.where(valid, assignment, experts).astype(jnp.int32)
    a, w, keys, gates = match_varying(a, w, keys, gates)
    a, w, gates = reverse_only(caller, a, w, gates)
    if a.shape[0] == 0:
        return jnp.zeros_like(a, shape=(0, w.shape[2]))
    if axis_name is None:
        return _local_matmul(a, w, keys, gates)
    axes = Axes(axis_name, gather_axis_name, buffer_rows)
    exchange_rows = alltoall_exchange if exchange == "alltoall" else allgather_exchange
    return exchange_rows(Linear(), axes, a, (w,), keys, gates)


@jax.custom_vjp
def _local_matmul(a: jax.Array, w: jax.Array, keys: jax.Array, gates: jax.Array) -> jax.Array:
    groups = group_rows(keys.reshape(-1), w.shape[0], row_alignment((w,)))
    y = product(groups.to_rows(a, keys.shape[1]), w, groups.sizes, aligned=True)
    return groups.weighted_sum(y, gates)


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _local_forward(
    a: jax.Array, w: jax.Array, keys: jax.Array, gates: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _local_matmul(a, w, keys, gates), (a, w, keys, gates)


def _local_backward(saved: _Saved, dout: jax.Array) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    a, w, keys, gates = saved
    k = keys.shape[1]
    groups = group_rows(keys.reshape(-1), w.shape[0], row_alignment((w,)))
    dy = groups.to_rows(once_only("expert_matmul", dout), k)
    # The gates multiply x and not dy, so dx does not contain them. Its dot product with a is the
    # gradient of the gates, and the experts' outputs need no recomputation.
    dw = outer(groups.to_rows(a, k, gates), dy, groups.sizes, out_dtype=w.dtype, aligned=True)
    dx = product(dy, w, groups.sizes, transpose=True, aligned=True)
    da = groups.weighted_sum(dx, gates)
    return da, dw, None, groups.dots(dx, a).astype(gates.dtype)


_local_matmul.defvjp(_local_forward, _local_backward)


def _widen(numbers: jax.Array) -> jax.Array:
    """Cast indices to a type that also holds the number of experts; int8 ends at 127."""
    return numbers.astype(jnp.int32) if numbers.dtype.itemsize < 4 else numbers


def _check_assignment(assignment: jax.Array, experts: int) -> None:
    if isinstance(assignment, jax.core.Tracer):
        return
    indices = np.asarray(assignment)
    invalid = np.argwhere((indices < 0) | (indices >= experts))
    if invalid.size:
        index = tuple(int(i) for i in invalid[0])
        raise ValueError(
            f"assignment{list(index)} is {indices[index]}, but there are {experts} experts, "
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
        remainder = f" on each of {columns} devices" if columns > 1 else ""
        raise ValueError(f"{shapes}: a has {a.shape[1]} columns{remainder}, w takes {w.shape[1]}")
    if assignment.shape[0] != a.shape[0]:
        raise ValueError(
            f"{shapes}: {a.shape[0]} tokens but {assignment.shape[0]} rows of assignment"
        )
    if assignment.ndim == 2 and assignment.shape[1] == 0:
        raise ValueError(f"{shapes}: assignment names no expert (k is 0)")
    if gates is not None and gates.shape != assignment.shape:
        raise ValueError(f"{shapes}: gates{list(gates.shape)} must have the shape of assignment")
