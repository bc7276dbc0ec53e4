"""Collectives that XLA inserts for the shardings of plain `jit`.

With Auto axes the compiler chooses, with Explicit axes the operation declares the sharding. The
result's sharding is given in both cases, so the expected communication is unique.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.inspect.expected import (
    Program,
    ProgramCall,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
)
from tests.inspect.meshes import COLUMNS, ROWS, mesh_of, shape_on

Argument = tuple[tuple[int, ...], P]


def jitted(
    sizes: tuple[int, ...],
    function: Callable[..., Any],
    *arguments: Argument,
    out: P,
    dtype: Any = jnp.float32,
) -> Callable[[], ProgramCall]:
    """Return a builder of `function` with Auto axes and the given shardings of arguments and
    result.
    """

    def build() -> ProgramCall:
        mesh = mesh_of(sizes)
        shapes = tuple(shape_on(mesh, shape, spec, dtype) for shape, spec in arguments)
        return ProgramCall(jax.jit(function, out_shardings=NamedSharding(mesh, out)), shapes, mesh)

    return build


def explicit(
    sizes: tuple[int, ...],
    function: Callable[..., Any],
    *arguments: Argument,
    dtype: Any = jnp.float32,
) -> Callable[[], ProgramCall]:
    """Return a builder of `function(mesh, *arguments)` with Explicit axes and its own out
    shardings.
    """

    def build() -> ProgramCall:
        mesh = mesh_of(sizes, AxisType.Explicit)
        shapes = tuple(shape_on(mesh, shape, spec, dtype) for shape, spec in arguments)
        return ProgramCall(lambda *args: function(mesh, *args), shapes, mesh)

    return build


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _matmul_in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _shard_averages(x: jax.Array) -> jax.Array:
    return x.reshape(4, ROWS // 4, 2, COLUMNS // 2).mean((1, 3))


def _explicit_matmul(spec: P) -> Callable[..., jax.Array]:
    def matmul(mesh: jax.sharding.Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bd,df->bf", x, w, out_sharding=NamedSharding(mesh, spec))

    return matmul


def _gathered_matmul(mesh: jax.sharding.Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    replicated = jax.sharding.reshard(w, NamedSharding(mesh, P()))
    return jnp.einsum("bd,df->bf", x, replicated, out_sharding=NamedSharding(mesh, P("X")))


def _reshard(spec: P) -> Callable[..., jax.Array]:
    def reshard(mesh: jax.sharding.Mesh, x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return reshard


def _identity(x: jax.Array) -> jax.Array:
    return x


def _devices_in_another_order() -> ProgramCall:
    # A program numbers devices by their position in the mesh, regardless of their IDs.
    order = np.array(jax.devices()[:8])[[3, 0, 6, 1, 7, 2, 5, 4]]
    mesh = jax.sharding.Mesh(order.reshape(2, 4), ("X", "Y"))
    x, w = shape_on(mesh, (64, 128), P("X", "Y")), shape_on(mesh, (128, 64), P("Y"))
    return ProgramCall(jax.jit(_matmul, out_shardings=NamedSharding(mesh, P("X"))), (x, w), mesh)


X_ROWS = ((ROWS, COLUMNS), P("X"))
REPLICATED = ((ROWS, COLUMNS), P())

MATMULS = (
    # x[B_X, D_Y] · w[D_Y, F]: every device has a term of a (32, 64) sum.
    Program(
        "jit: contraction over a sharded dimension",
        jitted((2, 4), _matmul, ((64, 128), P("X", "Y")), ((128, 64), P("Y")), out=P("X")),
        (all_reduce("Y", 4, 32 * 64 * 4),),
    ),
    Program(
        "jit: contraction over the major axis",
        jitted((2, 4), _matmul, ((64, 128), P("Y", "X")), ((128, 64), P("X")), out=P("Y")),
        (all_reduce("X", 2, 16 * 64 * 4),),
    ),
    Program(
        "jit: contraction over two axes",
        jitted(
            (2, 4), _matmul, ((64, 128), P(None, ("X", "Y"))), ((128, 64), P(("X", "Y"))), out=P()
        ),
        (all_reduce("XY", 8, 64 * 64 * 4),),
    ),
    Program(
        "jit: contraction on devices in another order",
        _devices_in_another_order,
        (all_reduce("Y", 4, 32 * 64 * 4),),
    ),
    # x[B_X, D] · w[D_X, F], as in FSDP: 16 rows of weights move, because B is already sharded.
    Program(
        "jit: weights gathered",
        jitted((8,), _matmul, ((512, 128), P("X")), ((128, 64), P("X")), out=P("X")),
        (all_gather("X", 8, 16 * 64 * 4),),
    ),
    Program(
        "jit: weights gathered over strided groups",
        jitted((4, 2), _matmul, ((512, 128), P("X")), ((128, 64), P("X", "Y")), out=P("X", "Y")),
        (all_gather("X", 4, 32 * 32 * 4),),
    ),
    Program(
        "jit: bfloat16 contraction",
        jitted(
            (2, 4),
            _matmul,
            ((64, 128), P("X", "Y")),
            ((128, 64), P("Y")),
            out=P("X"),
            dtype=jnp.bfloat16,
        ),
        (all_reduce("Y", 4, 32 * 64 * 2, "bfloat16"),),
    ),
    Program(
        "jit: bfloat16 contraction that asks for float32",
        jitted(
            (2, 4),
            _matmul_in_float32,
            ((64, 128), P("X", "Y")),
            ((128, 64), P("Y")),
            out=P("X"),
            dtype=jnp.bfloat16,
        ),
        (all_reduce("Y", 4, 32 * 64 * 4),),
    ),
    Program(
        "jit: bfloat16 weights gathered",
        jitted(
            (8,),
            _matmul,
            ((512, 128), P("X")),
            ((128, 64), P("X")),
            out=P("X"),
            dtype=jnp.bfloat16,
        ),
        (all_gather("X", 8, 16 * 64 * 2, "bfloat16"),),
    ),
    Program(
        "jit: sum over a sharded dimension",
        jitted((2, 4), lambda x: x.sum(1), ((64, 128), P("X", "Y")), out=P("X")),
        (all_reduce("Y", 4, 32 * 4),),
    ),
    # Two sharded dimensions are reduced in sequence. One dimension over two axes is reduced at
    # once.
    Program(
        "jit: int32 maximum over two sharded dimensions",
        jitted((2, 4), jnp.max, ((64, 128), P("X", "Y")), out=P(), dtype=jnp.int32),
        (all_reduce("Y", 4, 4, "int32"), all_reduce("X", 2, 4, "int32")),
    ),
    Program(
        "jit: maximum over one dimension that two axes share",
        jitted((2, 4), jnp.max, ((64, 128), P(("X", "Y"))), out=P()),
        (all_reduce("XY", 8, 4),),
    ),
    Program(
        "explicit: contraction over a sharded dimension",
        explicit((2, 4), _explicit_matmul(P("X")), ((64, 128), P("X", "Y")), ((128, 64), P("Y"))),
        (all_reduce("Y", 4, 32 * 64 * 4),),
    ),
    Program(
        "explicit: bfloat16 contraction over the major axis",
        explicit(
            (4, 2),
            _explicit_matmul(P("Y")),
            ((64, 128), P("Y", "X")),
            ((128, 64), P("X")),
            dtype=jnp.bfloat16,
        ),
        (all_reduce("X", 4, 32 * 64 * 2, "bfloat16"),),
    ),
    Program(
        "explicit: weights gathered",
        explicit((8,), _gathered_matmul, ((512, 128), P("X")), ((128, 64), P("X"))),
        (all_gather("X", 8, 16 * 64 * 4),),
    ),
)

RESHARDS = (
    Program(
        "jit: shards become whole",
        jitted((8,), _identity, X_ROWS, out=P()),
        (all_gather("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "jit: bfloat16 shards become whole",
        jitted((8,), _identity, X_ROWS, out=P(), dtype=jnp.bfloat16),
        (all_gather("X", 8, 8 * 128 * 2, "bfloat16"),),
    ),
    Program(
        "jit: rows become columns",
        jitted((8,), _identity, X_ROWS, out=P(None, "X")),
        (all_to_all("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "jit: bfloat16 rows become columns",
        jitted((8,), _identity, X_ROWS, out=P(None, "X"), dtype=jnp.bfloat16),
        (all_to_all("X", 8, 8 * 128 * 2, "bfloat16"),),
    ),
    Program(
        "jit: columns become rows over strided groups",
        jitted((2, 4), _identity, ((64, 128), P("Y", "X")), out=P(("Y", "X"))),
        (all_to_all("X", 2, 16 * 64 * 4),),
    ),
    # A device with half x of the rows must get half y. Devices with x ≠ y exchange theirs.
    Program(
        "jit: from one axis to another of the same size",
        jitted((2, 2, 2), _identity, X_ROWS, out=P("Y")),
        (permute("XY", 32 * 128 * 4),),
    ),
    Program(
        "jit: bfloat16 from one axis to another of the same size",
        jitted((2, 2, 2), _identity, X_ROWS, out=P("Y"), dtype=jnp.bfloat16),
        (permute("XY", 32 * 128 * 2, "bfloat16"),),
    ),
    Program(
        "jit: minor shards gathered",
        jitted((2, 4), _identity, ((64, 128), P(("X", "Y"))), out=P("X")),
        (all_gather("Y", 4, 8 * 128 * 4),),
    ),
    Program(
        "jit: whole becomes shards, by cutting alone",
        jitted((8,), _identity, REPLICATED, out=P("X")),
        (),
    ),
    Program(
        "explicit: shards become whole",
        explicit((2, 4), _reshard(P("X")), ((64, 128), P("X", "Y"))),
        (all_gather("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "explicit: rows become columns",
        explicit((8,), _reshard(P(None, "X")), X_ROWS),
        (all_to_all("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "explicit: from one axis to another of the same size",
        explicit((2, 2, 2), _reshard(P("Y")), X_ROWS),
        (permute("XY", 32 * 128 * 4),),
    ),
)

SILENT = (
    Program(
        "no communication: elementwise",
        jitted((2, 4), lambda x: jnp.tanh(x) * 2, ((64, 128), P("X", "Y")), out=P("X", "Y")),
        (),
    ),
    Program(
        "no communication: the average of each shard",
        jitted((4, 2), _shard_averages, ((ROWS, COLUMNS), P("X", "Y")), out=P("X", "Y")),
        (),
    ),
    Program(
        "no communication: product with whole weights",
        jitted((8,), _matmul, ((64, 128), P("X")), ((128, 64), P()), out=P("X")),
        (),
    ),
    Program(
        "no communication: columns of the weights sharded",
        explicit(
            (2, 4), _explicit_matmul(P("X", "Y")), ((64, 128), P("X")), ((128, 64), P(None, "Y"))
        ),
        (),
    ),
)

JITTED = (*MATMULS, *RESHARDS, *SILENT)
