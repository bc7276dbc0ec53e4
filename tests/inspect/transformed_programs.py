"""Collectives under JAX's transformations: gradients, batching, rematerialisation, nested jit."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.inspect.expected import (
    Program,
    ProgramCall,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from tests.inspect.meshes import mapped, mesh_of, shape_on

GRID = P("X", "Y")
SHARD = 32 * 32 * 4
RING = [(source, (source + 1) % 4) for source in range(4)]


def _gradient(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return the gradient of a device's own loss, taken inside the map."""
    return jax.grad(lambda x: jnp.sin(body(x)).sum())


def _gather_over_y(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, "Y", tiled=True)


def _layers(x: jax.Array, *, checkpoint: bool) -> tuple[jax.Array, jax.Array]:
    """Return three layers in a scan, each of which gathers its operands."""

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gathered = lax.all_gather(x, "Y", tiled=True)
        return jnp.tanh(gathered * gathered).sum(0) * x, None

    def loss(x: jax.Array) -> jax.Array:
        checkpointed = jax.checkpoint(layer) if checkpoint else layer
        return lax.scan(checkpointed, x, length=3)[0].sum()

    value, gradient = jax.value_and_grad(loss)(x)
    return value[None, None], gradient


@jax.custom_vjp
def _summed_both_ways(x: jax.Array) -> jax.Array:
    return lax.pcast(lax.psum(x, "Y"), "Y", to="varying")


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _summed_both_ways(x), None


def _backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (lax.ppermute(g, "X", [(0, 1), (1, 0)]),)


_summed_both_ways.defvjp(_forward, _backward)


@jax.jit
def _inner(x: jax.Array) -> jax.Array:
    return jnp.tanh(lax.ppermute(x, "Y", RING))


@jax.jit
def _outer(x: jax.Array) -> jax.Array:
    return _inner(_inner(x))


def _replicated_weight_gradient() -> ProgramCall:
    # w is the same on all devices, but the losses differ, so the gradients are summed.
    mesh = mesh_of((8,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("X"), P()), out_specs=P())
    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sin(x @ w).sum())(w)

    return ProgramCall(
        gradient, (shape_on(mesh, (64, 128), P("X")), shape_on(mesh, (128, 32), P())), mesh
    )


def _gradient_outside() -> ProgramCall:
    mesh = mesh_of((2, 4))
    psum_over_y = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "Y"), mesh=mesh, in_specs=GRID, out_specs=P("X")
    )
    gradient = jax.grad(lambda x: (psum_over_y(x) ** 2).sum())
    return ProgramCall(gradient, (shape_on(mesh, (64, 128), GRID),), mesh)


def _over_a_batch(spmd_axis_name: str | None) -> Callable[[], ProgramCall]:
    # The batch has 6 entries or, with its own axis, 8: 4 on each of its two devices.
    def build() -> ProgramCall:
        mesh = mesh_of((2, 4))
        psum_over_y = jax.shard_map(
            lambda x: lax.psum(x, "Y"), mesh=mesh, in_specs=P("Y"), out_specs=P()
        )
        batched = jax.vmap(psum_over_y, spmd_axis_name=spmd_axis_name)
        spec, batch = (P(None, "Y"), 6) if spmd_axis_name is None else (P("X", "Y"), 8)
        return ProgramCall(batched, (shape_on(mesh, (batch, 64, 16), spec),), mesh)

    return build


def _named_batch_axis() -> ProgramCall:
    # vmap sums over the batch. The sharded batch makes the sum communicate.
    mesh = mesh_of((2, 4))
    averaged = jax.vmap(lambda x: x - lax.pmean(x, "batch"), axis_name="batch")
    sharding = jax.NamedSharding(mesh, P("Y"))
    function = jax.jit(averaged, out_shardings=sharding)
    return ProgramCall(function, (shape_on(mesh, (64, 128), P("Y")),), mesh)


TRANSFORMED = (
    # The factor of the sum varies between devices, so its cotangents vary and are summed.
    Program(
        "gradient of psum, used differently everywhere",
        mapped((2, 4), _gradient(lambda x: lax.psum(x, "Y") * x), GRID),
        (all_reduce("Y", 4, SHARD, count=2),),
    ),
    # The cotangent of this sum is the same everywhere, and every device already has it.
    Program("gradient of psum, taken outside", _gradient_outside, (all_reduce("Y", 4, SHARD),)),
    Program(
        "gradient of all_gather",
        mapped((2, 4), _gradient(_gather_over_y), GRID),
        (all_gather("Y", 4, SHARD), reduce_scatter("Y", 4, 4 * SHARD)),
    ),
    Program(
        "gradient of psum_scatter",
        mapped((2, 4), _gradient(lambda x: lax.psum_scatter(x, "Y", tiled=True)), GRID),
        (reduce_scatter("Y", 4, SHARD), all_gather("Y", 4, SHARD // 4)),
    ),
    Program(
        "gradient of ppermute",
        mapped((2, 4), _gradient(lambda x: lax.ppermute(x, "Y", RING)), GRID),
        (permute("Y", SHARD, count=2),),
    ),
    Program(
        "gradient of a linear ppermute needs the way back alone",
        mapped((2, 4), jax.grad(lambda x: (lax.ppermute(x, "Y", RING) * 3).sum()), GRID),
        (permute("Y", SHARD),),
    ),
    Program(
        "gradient of all_to_all",
        mapped((2, 4), _gradient(lambda x: lax.all_to_all(x, "Y", 0, 1, tiled=True)), GRID),
        (all_to_all("Y", 4, SHARD, count=2),),
    ),
    Program(
        "bfloat16: gradient of all_gather",
        mapped((2, 4), _gradient(_gather_over_y), GRID, dtype=jnp.bfloat16),
        (
            all_gather("Y", 4, SHARD // 2, "bfloat16"),
            reduce_scatter("Y", 4, 2 * SHARD, "bfloat16"),
        ),
    ),
    Program(
        "gradient of weights that every device has",
        _replicated_weight_gradient,
        (all_reduce("X", 8, 128 * 32 * 4),),
    ),
    Program(
        "layers without checkpoint: gathered once each",
        mapped((2, 4), partial(_layers, checkpoint=False), GRID, out=(GRID, GRID)),
        (all_gather("Y", 4, SHARD, count=3), reduce_scatter("Y", 4, 4 * SHARD, count=3)),
    ),
    # The layers run in a scan, because otherwise the CPU's compiler merges both passes' gathers.
    Program(
        "layers with checkpoint: gathered again in the backward pass",
        mapped((2, 4), partial(_layers, checkpoint=True), GRID, out=(GRID, GRID)),
        (all_gather("Y", 4, SHARD, count=6), reduce_scatter("Y", 4, 4 * SHARD, count=3)),
    ),
    Program(
        "custom_vjp: one collective forward, another one back",
        mapped((2, 4), _gradient(_summed_both_ways), GRID),
        (all_reduce("Y", 4, SHARD), permute("X", SHARD)),
    ),
    Program(
        "vmap of a psum: one collective for the batch",
        _over_a_batch(None),
        (all_reduce("Y", 4, 6 * 16 * 16 * 4),),
    ),
    Program(
        "vmap of a psum, the batch over an axis of its own",
        _over_a_batch("X"),
        (all_reduce("Y", 4, 4 * 16 * 16 * 4),),
    ),
    Program(
        "vmap over a sharded batch that is averaged",
        _named_batch_axis,
        (all_reduce("Y", 4, 128 * 4),),
    ),
    Program(
        "jit in jit, the inner one called twice",
        mapped((2, 4), _outer, GRID),
        (permute("Y", SHARD, count=2),),
    ),
)
