"""Collectives in loops and branches, with their number of executions in one call."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
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


def _add_psum(x: jax.Array) -> jax.Array:
    """Depend on x, so that no loop can drop the sum or move it out. The result varies like x."""
    return jnp.tanh(x + lax.psum(x, "Y"))


def _permute_once(x: jax.Array) -> jax.Array:
    return jnp.tanh(lax.ppermute(x, "Y", RING))


def _scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (_add_psum(c), None), x, length=5)[0]


def _nested_scan(x: jax.Array) -> jax.Array:
    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(lambda d, _: (_permute_once(d), None), _add_psum(c), length=4)[0], None

    return lax.scan(outer, x, length=3)[0]


def _scan_of_unused_gathers(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = lax.all_gather(row, "Y", tiled=True)
        return c + total.sum(), jnp.tanh(row)

    return lax.scan(step, x.sum(), x)[1]


def _unrolled_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (_permute_once(c), None), x, length=6, unroll=2)[0]


def _fori(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 7, lambda _, c: _permute_once(c), x)


def _fori_from_three(x: jax.Array) -> jax.Array:
    return lax.fori_loop(3, 9, lambda i, c: _permute_once(c + i), x)


def _while_by_twos(x: jax.Array) -> jax.Array:
    state = (jnp.int32(0), x)
    return lax.while_loop(lambda s: s[0] < 11, lambda s: (s[0] + 2, _permute_once(s[1])), state)[1]


def _while_down(x: jax.Array) -> jax.Array:
    state = (jnp.int32(8), x)
    return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, _permute_once(s[1])), state)[1]


def _while_by_data(x: jax.Array) -> jax.Array:
    # All devices take part in the test, so they agree. The test is not part of the body.
    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return state[1] > 1.0

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = _permute_once(state[0])
        return x, lax.pmax(jnp.abs(x).max(), ("X", "Y"))

    return lax.while_loop(unfinished, step, (x, jnp.float32(2.0)))[0]


def _scan_in_while_by_data(x: jax.Array) -> jax.Array:
    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = _scan(state[0])
        return x, lax.pmax(jnp.abs(x).max(), ("X", "Y"))

    return lax.while_loop(lambda s: s[1] > 1.0, step, (x, jnp.float32(2.0)))[0]


def _cond(x: jax.Array) -> jax.Array:
    any_positive = lax.pmax(x.max(), ("X", "Y")) > 0
    return lax.cond(any_positive, _permute_once, jnp.sin, x)


def _cond_in_scan(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(index % 2 == 0, _permute_once, jnp.sin, c), None

    return lax.scan(step, x, jnp.arange(6))[0]


def _map(x: jax.Array) -> jax.Array:
    rows = x.reshape(4, 8, 32)
    exchanged = lax.map(lambda part: lax.all_to_all(part, "Y", 0, 1, tiled=True), rows)
    return exchanged.reshape(32, 32)


def _scatter_in_scan(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        part = lax.psum_scatter(c, "Y", tiled=True)
        return jnp.tanh(lax.all_gather(part, "Y", tiled=True)) * c, None

    return lax.scan(step, x, length=2)[0]


def _layers_with_auto_axes() -> ProgramCall:
    mesh = mesh_of((2, 4))

    def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            # x[B_X, D_Y] · w[D_Y, D] is summed over Y, and sharded again for the next layer.
            total = lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("X")))
            return lax.with_sharding_constraint(jnp.tanh(total), NamedSharding(mesh, GRID)), None

        return lax.scan(layer, x, stack)[0]

    arguments = (
        shape_on(mesh, (64, 128), GRID),
        shape_on(mesh, (5, 128, 128), P(None, "Y")),
    )
    return ProgramCall(jax.jit(layers, out_shardings=NamedSharding(mesh, GRID)), arguments, mesh)


LOOPED = (
    Program("scan", mapped((2, 4), _scan, GRID), (all_reduce("Y", 4, SHARD, count=5),)),
    Program(
        "scan in a scan",
        mapped((2, 4), _nested_scan, GRID),
        (all_reduce("Y", 4, SHARD, count=3), permute("Y", SHARD, count=12)),
    ),
    # The sums of the gathered rows are unused, so XLA drops them.
    Program(
        "scan whose gathers nobody needs",
        mapped((2, 4), _scan_of_unused_gathers, GRID),
        (),
    ),
    Program(
        "scan, two steps at a time",
        mapped((2, 4), _unrolled_scan, GRID),
        (permute("Y", SHARD, count=6),),
    ),
    Program(
        "scan of layers with Auto axes",
        _layers_with_auto_axes,
        (all_reduce("Y", 4, 32 * 128 * 4, count=5),),
    ),
    Program(
        "scatter and gather in a scan",
        mapped((2, 4), _scatter_in_scan, GRID),
        (reduce_scatter("Y", 4, SHARD, count=2), all_gather("Y", 4, SHARD // 4, count=2)),
    ),
    Program("fori_loop", mapped((2, 4), _fori, GRID), (permute("Y", SHARD, count=7),)),
    Program(
        "fori_loop that does not begin at 0",
        mapped((2, 4), _fori_from_three, GRID),
        (permute("Y", SHARD, count=6),),
    ),
    Program(
        "while_loop with a count, in steps of two",
        mapped((2, 4), _while_by_twos, GRID),
        (permute("Y", SHARD, count=6),),
    ),
    Program(
        "while_loop that counts down",
        mapped((2, 4), _while_down, GRID),
        (permute("Y", SHARD, count=8),),
    ),
    Program(
        "while_loop until the data say so",
        mapped((2, 4), _while_by_data, GRID),
        (permute("Y", SHARD), all_reduce("XY", 8, 4)),
        at_least=True,
    ),
    Program(
        "scan in a while_loop until the data say so",
        mapped((2, 4), _scan_in_while_by_data, GRID),
        (all_reduce("Y", 4, SHARD, count=5), all_reduce("XY", 8, 4)),
        at_least=True,
    ),
    # An unknown branch counts as taken.
    Program(
        "cond, one branch",
        mapped((2, 4), _cond, GRID),
        (permute("Y", SHARD), all_reduce("XY", 8, 4)),
    ),
    Program(
        "cond in a scan",
        mapped((2, 4), _cond_in_scan, GRID),
        (permute("Y", SHARD, count=6),),
    ),
    Program("map", mapped((2, 4), _map, GRID), (all_to_all("Y", 4, 8 * 32 * 4, count=4),)),
)
