"""Rings of `drumline.parallel`, and a training step of a two-layer network in three layouts.

The network is y = tanh(x · w1) · w2 with x[B, D], w1[D, F], w2[F, D] and the loss mean(y²), with
one step of gradient descent; B, D, F = 64, 32, 128, all float32 unless stated otherwise.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import allgather_matmul, matmul_allreduce, matmul_reducescatter
from tests.inspect.expected import (
    Expected,
    Program,
    ProgramCall,
    all_gather,
    all_reduce,
    permute,
    reduce_scatter,
)
from tests.inspect.meshes import mesh_of, shape_on

B, D, F = 64, 32, 128
W1, W2 = D * F * 4, F * D * 4
"""The bytes of the two weights."""

Weights = tuple[jax.Array, jax.Array]


def _ring(
    function: Callable[..., jax.Array], specs: tuple[P, P], out: P, **options: Any
) -> Callable[[], ProgramCall]:
    """Return a builder of a ring matmul on a ring of four, the minor axis of (2, 4), in
    bfloat16.
    """

    def build() -> ProgramCall:
        mesh = mesh_of((2, 4))
        matmul = jax.shard_map(
            partial(function, axis_name="Y", **options), mesh=mesh, in_specs=specs, out_specs=out
        )
        x = shape_on(mesh, (B, D), specs[0], jnp.bfloat16)
        return ProgramCall(matmul, (x, shape_on(mesh, (D, F), specs[1], jnp.bfloat16)), mesh)

    return build


def _ring_programs(loop: str, direction: str) -> tuple[Program, ...]:
    options = {"loop": loop, "direction": direction}
    lanes = 1 if direction == "one" else 2

    def permutes_of(shard: int, dtype: str) -> Expected:
        # Three permutes of the shard, or of each of its halves.
        return permute("Y", shard // lanes, dtype, count=3 * lanes)

    # x[32, 8] on each device is bfloat16. The device's share of the sums[32, 32] is sent in
    # float32. An all-reduce's shares[8, 128] are summed in float32 and gathered in bfloat16.
    by_x, by_w = (P("X", "Y"), P(None, "Y")), (P("X", "Y"), P("Y"))
    return (
        Program(
            f"allgather_matmul, {loop}, {direction}",
            _ring(allgather_matmul, by_x, P("X", "Y"), **options),
            (permutes_of(32 * 8 * 2, "bfloat16"),),
        ),
        Program(
            f"matmul_reducescatter, {loop}, {direction}",
            _ring(matmul_reducescatter, by_w, P("X", "Y"), **options),
            (permutes_of(32 * 32 * 4, "float32"),),
        ),
        Program(
            f"matmul_allreduce, {loop}, {direction}",
            _ring(matmul_allreduce, by_w, P("X"), **options),
            (permutes_of(8 * 128 * 4, "float32"), permutes_of(8 * 128 * 2, "bfloat16")),
        ),
    )


def _loss(weights: Weights, x: jax.Array) -> jax.Array:
    w1, w2 = weights
    return jnp.mean((jnp.tanh(x @ w1) @ w2) ** 2)


def _update_weights(weights: Weights, gradients: Weights) -> Weights:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def _step(weights: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    loss, gradients = jax.value_and_grad(_loss)(weights, x)
    return loss, _update_weights(weights, gradients)


def _train(sizes: tuple[int, ...], x_spec: P, w1_spec: P, w2_spec: P) -> Callable[[], ProgramCall]:
    """Return a builder of the step under plain jit, which only sets the shardings of batch and
    weights.
    """

    def build() -> ProgramCall:
        mesh = mesh_of(sizes)
        weights = shape_on(mesh, (D, F), w1_spec), shape_on(mesh, (F, D), w2_spec)
        layout = NamedSharding(mesh, w1_spec), NamedSharding(mesh, w2_spec)
        step = jax.jit(_step, out_shardings=(NamedSharding(mesh, P()), layout))
        return ProgramCall(step, (weights, shape_on(mesh, (B, D), x_spec)), mesh)

    return build


def _fsdp_by_jit() -> ProgramCall:
    mesh = mesh_of((8,))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("X"))

    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        replicated_weights = jax.tree.map(
            lambda w: lax.with_sharding_constraint(w, replicated), weights
        )
        return _loss(replicated_weights, x)

    def step(weights: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, _update_weights(weights, gradients)

    weights = shape_on(mesh, (D, F), P("X")), shape_on(mesh, (F, D), P("X"))
    jitted = jax.jit(step, out_shardings=(replicated, (sharded, sharded)))
    return ProgramCall(jitted, (weights, shape_on(mesh, (B, D), P("X"))), mesh)


def _fsdp_by_shard_map() -> ProgramCall:
    mesh = mesh_of((8,))
    sharded = (P("X"), P("X"))

    def loss(shards: Weights, x: jax.Array) -> jax.Array:
        w1, w2 = (lax.all_gather(shard, "X", tiled=True) for shard in shards)
        return jnp.sum((jnp.tanh(x @ w1) @ w2) ** 2) / (B * D)

    @partial(jax.shard_map, mesh=mesh, in_specs=(sharded, P("X")), out_specs=(P(), sharded))
    def step(shards: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
        value, gradients = jax.value_and_grad(loss)(shards, x)
        return lax.psum(value, "X"), _update_weights(shards, gradients)

    weights = shape_on(mesh, (D, F), P("X")), shape_on(mesh, (F, D), P("X"))
    return ProgramCall(step, (weights, shape_on(mesh, (B, D), P("X"))), mesh)


STEPS = (
    # Every device has all weights. The gradients of both, and the loss, are summed.
    Program(
        "training: data parallel",
        _train((8,), P("X"), P(), P()),
        (all_reduce("X", 8, W1), all_reduce("X", 8, W2), all_reduce("X", 8, 4)),
        merged=True,
    ),
    Program(
        "training: data parallel over two axes",
        _train((2, 4), P(("X", "Y")), P(), P()),
        (all_reduce("XY", 8, W1), all_reduce("XY", 8, W2), all_reduce("XY", 8, 4)),
        merged=True,
    ),
    Program(
        "training: FSDP by shard_map",
        _fsdp_by_shard_map,
        (
            all_gather("X", 8, W1 // 8),
            all_gather("X", 8, W2 // 8),
            reduce_scatter("X", 8, W1),
            reduce_scatter("X", 8, W2),
            all_reduce("X", 8, 4),
        ),
        merged=True,
    ),
    # A reduce-scatter would suffice for the gradients. jit sums them fully and slices.
    Program(
        "training: FSDP by jit",
        _fsdp_by_jit,
        (
            all_gather("X", 8, W1 // 8),
            all_gather("X", 8, W2 // 8),
            all_reduce("X", 8, W1),
            all_reduce("X", 8, W2),
            all_reduce("X", 8, 4),
        ),
        merged=True,
    ),
    # Forward, the terms of y[B_X, D] are summed over Y. Backward, each device has the columns and
    # rows that its gradients need, and a quarter of each weight is summed over X.
    Program(
        "training: tensor and data parallel",
        _train((2, 4), P("X"), P(None, "Y"), P("Y")),
        (
            all_reduce("Y", 4, B // 2 * D * 4),
            all_reduce("X", 2, W1 // 4),
            all_reduce("X", 2, W2 // 4),
            all_reduce("X", 2, 4),
        ),
        merged=True,
    ),
    Program(
        "training: tensor parallel alone",
        _train((8,), P(), P(None, "X"), P("X")),
        (all_reduce("X", 8, B * D * 4),),
    ),
)

TRAINING = (
    *_ring_programs("unrolled", "one"),
    *_ring_programs("unrolled", "both"),
    *_ring_programs("rolled", "one"),
    *_ring_programs("rolled", "both"),
    *STEPS,
)
