"""The programs of the chapter "Programming TPUs in JAX", at the chapter's sizes.

Each snippet and problem has variants with plain `jax.jit`, with `shard_map`, and with the rings of
`drumline.parallel`. Sizes that the chapter leaves open are those of the collective matmul. Dtypes
that it leaves open are bfloat16. The scripts in examples/chapter run the same programs with smaller
sizes and compare them with exact results.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.examples.program import Example, Program, ProgramBuilder
from drumline.parallel import (
    allgather_matmul,
    expert_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)

B, D, F = 1024, 2048, 8192
"""The batch size and the two dimensions of the weights of the collective matmul."""
E, K = 16, 2
"""The number of experts, and the number of experts per token."""
SHIFT = 5
GRID = {"X": 2, "Y": 4}
TALL = {"X": 4, "Y": 2}
SLICE = "v5litepod-8"


@dataclass(frozen=True)
class Operand:
    """The shape, sharding and dtype of an argument."""

    shape: tuple[int, ...]
    spec: P
    dtype: Any = jnp.bfloat16

    def on(self, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
        """Return the argument on a mesh."""
        sharding = NamedSharding(mesh, self.spec)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)


GATHERED = (Operand((B, D), P("X", "Y")), Operand((D, F), P(None, "Y")))
"""A[B_X, D_Y] · W[D, F_Y], which needs an all-gather of A."""
REDUCED = (Operand((B, D), P("X", "Y")), Operand((D, F), P("Y", None)))
"""A[B_X, D_Y] · W[D_Y, F], which needs an all-reduce of the result."""
SCATTERED = (Operand((B, F), P("X", "Y")), Operand((F, D), P("Y", None)))
"""Tmp[B_X, F_Y] · W[F_Y, D], which needs a reduce-scatter of the result."""
BLOCK = (Operand((B, D), P("X", "Y")), GATHERED[1], SCATTERED[1])
REPLICATED = (Operand((B, D), P("X")), Operand((D, F), P()), Operand((D, F), P()))
"""Rows sharded over X, and replicated weights."""
SHARDS = (Operand((512, 8), P("X", "Y"), jnp.float32),)
MIXTURE = (
    Operand((B, D), P("X", "Y"), jnp.float32),
    Operand((E, D, F), P("X", None, "Y"), jnp.float32),
    Operand((B,), P("X"), jnp.int32),
)
TOP_K = (*MIXTURE[:2], Operand((B, K), P("X"), jnp.int32), Operand((B, K), P("X"), jnp.float32))


def _jitted(body: Callable[..., Any], operands: tuple[Operand, ...], out: P) -> ProgramBuilder:
    """Run `body` under plain jit, with the sharding of its result."""

    def build(mesh: AbstractMesh) -> Program:
        jitted = jax.jit(body, out_shardings=NamedSharding(mesh, out))
        return jitted, tuple(operand.on(mesh) for operand in operands)

    return build


def _on_shards(body: Callable[..., Any], operands: tuple[Operand, ...], out: P) -> ProgramBuilder:
    """Run `body` under `shard_map`."""

    def build(mesh: AbstractMesh) -> Program:
        specs = tuple(operand.spec for operand in operands)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)
        return mapped, tuple(operand.on(mesh) for operand in operands)

    return build


# The snippets -----------------------------------------------------------------------------------


def matmul_square(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply with a sharded contraction, as the first snippet does."""
    return jnp.einsum("bd,df->bf", jnp.square(x), w)


def two_matmuls(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Multiply twice. XLA chooses the sharding of the value in between."""
    return jnp.einsum("bf,df->bd", jnp.einsum("bd,df->bf", x, w_in), w_out)


def _constrained(mesh: AbstractMesh) -> Program:
    def constrained_matmuls(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        hidden = jnp.einsum("bd,df->bf", x, w_in)
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("X", "Y")))
        return jnp.einsum("bf,df->bd", hidden, w_out)

    return _jitted(constrained_matmuls, REPLICATED, P("X"))(mesh)


def slice_and_average(x: jax.Array) -> jax.Array:
    """Average the first four numbers of each device over all devices."""
    mean: jax.Array = lax.pmean(x[:4], ("x", "y"))
    return mean


def matmul(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply under jit alone."""
    return a @ w


def chapter_ring(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply each chunk while it is sent to the left, as the chapter's ring does."""
    devices, rank = lax.axis_size("Y"), lax.axis_index("Y")
    depth = a.shape[1]
    left = [(i, (i - 1) % devices) for i in range(devices)]
    out: jax.Array = lax.pcast(
        jnp.zeros((a.shape[0], w.shape[1]), a.dtype), ("X", "Y"), to="varying"
    )
    for step in range(devices):
        owner = (rank + step) % devices
        out += a @ lax.dynamic_slice_in_dim(w, owner * depth, depth)
        if step < devices - 1:
            a = lax.ppermute(a, "Y", left)
    return out


def gather_one_way(a: jax.Array, w: jax.Array) -> jax.Array:
    """Send whole chunks in one direction around the ring."""
    return allgather_matmul(a, w, axis_name="Y", direction="one", loop="unrolled")


def gather_both_ways(a: jax.Array, w: jax.Array) -> jax.Array:
    """Send half chunks in both directions around the ring."""
    return allgather_matmul(a, w, axis_name="Y", direction="both", loop="unrolled")


# Problem 1 --------------------------------------------------------------------------------------


def shard_average(x: jax.Array) -> jax.Array:
    """Average the shard of a device."""
    return x.mean(keepdims=True)


def shard_roll(x: jax.Array) -> jax.Array:
    """Roll the rows of a device's shard."""
    return jnp.roll(x, SHIFT, axis=0) - x


def _average_by_jit(mesh: AbstractMesh) -> Program:
    rows, columns = mesh.shape["X"], mesh.shape["Y"]

    def average(x: jax.Array) -> jax.Array:
        return x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns).mean((1, 3))

    return _jitted(average, SHARDS, P("X", "Y"))(mesh)


def _roll_by_jit(mesh: AbstractMesh) -> Program:
    def roll(x: jax.Array) -> jax.Array:
        by_shard = x.reshape(mesh.shape["X"], -1, x.shape[1])
        return jnp.roll(by_shard, SHIFT, axis=1).reshape(x.shape) - x

    return _jitted(roll, SHARDS, P("X", "Y"))(mesh)


# Problem 2 --------------------------------------------------------------------------------------


def experts_local(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Sort the tokens by expert and multiply each group of rows."""
    return expert_matmul(a, w, assignment)


def experts_gathered(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Gather all tokens on every device of X."""
    axes: Any = {"axis_name": "X", "gather_axis_name": "Y"}
    return expert_matmul(a, w, assignment, exchange="allgather", **axes)


def experts_exchanged(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Send tokens to their experts in rounds with a fixed buffer."""
    return expert_matmul(a, w, assignment, axis_name="X", gather_axis_name="Y")


def experts_top_k(a: jax.Array, w: jax.Array, assignment: jax.Array, gates: jax.Array) -> jax.Array:
    """Send each token to k experts and weight their results by its gates."""
    return expert_matmul(a, w, assignment, gates, axis_name="X", gather_axis_name="Y")


# Problems 3 and 4 -------------------------------------------------------------------------------


def multiply_and_sum(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then all-reduce over Y."""
    out: jax.Array = lax.psum(a @ w, "Y")
    return out


def sum_in_tiles(a: jax.Array, w: jax.Array) -> jax.Array:
    """Run a psum for each quarter of the columns, as the chapter hints."""
    return jnp.concatenate([multiply_and_sum(a, part) for part in jnp.split(w, 4, axis=1)], axis=1)


def multiply_and_scatter(t: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then reduce-scatter over Y."""
    out: jax.Array = lax.psum_scatter(t @ w, "Y", scatter_dimension=1, tiled=True)
    return out


def allreduce_one_way(a: jax.Array, w: jax.Array) -> jax.Array:
    """Run a ring reduce-scatter and a ring all-gather in one direction."""
    return matmul_allreduce(a, w, axis_name="Y", direction="one", loop="unrolled")


def allreduce_both_ways(a: jax.Array, w: jax.Array) -> jax.Array:
    """Run both in two directions with half the bytes each."""
    return matmul_allreduce(a, w, axis_name="Y", direction="both", loop="unrolled")


def scatter_one_way(t: jax.Array, w: jax.Array) -> jax.Array:
    """Send each partial sum around the ring, where each device adds its term."""
    return matmul_reducescatter(t, w, axis_name="Y", direction="one", loop="unrolled")


def scatter_both_ways(t: jax.Array, w: jax.Array) -> jax.Array:
    """Send partial sums in two directions with half the bytes each."""
    return matmul_reducescatter(t, w, axis_name="Y", direction="both", loop="unrolled")


def block(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Run both matmuls of a Transformer's feed-forward layer under jit alone."""
    return jax.nn.relu(x @ w_in) @ w_out


def block_rings(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Run the all-gather ring and the reduce-scatter ring in both directions."""
    ring = partial(feedforward, axis_name="Y", activation=jax.nn.relu, loop="unrolled")
    return ring(x, w_in, w_out)


# The table --------------------------------------------------------------------------------------


def _auto(
    name: str, description: str, build: ProgramBuilder, mesh: dict[str, int] = GRID
) -> Example:
    """Make an example with Auto axes, as in the chapter."""
    return Example(
        name=f"chapter/{name}",
        description=description,
        mesh=mesh,
        on=SLICE,
        build=build,
        axis_type=AxisType.Auto,
    )


def _explicit(
    name: str, description: str, build: ProgramBuilder, mesh: dict[str, int] = GRID
) -> Example:
    """Make an example with Explicit axes, the default of `jax.make_mesh`."""
    return Example(
        name=f"chapter/{name}", description=description, mesh=mesh, on=SLICE, build=build
    )


CHAPTER: tuple[Example, ...] = (
    Example(
        name="chapter/first-jit-matmul",
        description="the first snippet: jit adds an all-reduce for the sharded contraction",
        mesh={"X": 2, "Y": 2},
        on="v5litepod-4",
        build=_jitted(
            matmul_square, (Operand((8, D), P("X", "Y")), Operand((D, F), P("Y", None))), P("X")
        ),
        axis_type=AxisType.Auto,
    ),
    _auto(
        "sharding-constraint",
        "two matmuls with the value between them sharded over Y too: an all-reduce",
        _constrained,
        TALL,
    ),
    _auto(
        "no-sharding-constraint",
        "the same matmuls as XLA shards them: rows over X, and nothing is sent",
        _jitted(two_matmuls, REPLICATED, P("X")),
        TALL,
    ),
    _explicit(
        "slice-and-average",
        "shard_map's first example: the mean of the first four numbers of each device",
        _on_shards(slice_and_average, (Operand((512,), P(("x", "y")), jnp.int32),), P()),
        {"x": 2, "y": 4},
    ),
    _auto(
        "collective-matmul-jit",
        "A[B_X, D_Y] · W[D, F_Y] by jit: A is gathered first (311 µs in the chapter)",
        _jitted(matmul, GATHERED, P("X", "Y")),
    ),
    _explicit(
        "collective-matmul-ring",
        "the same with the chapter's own ring, one way (244 µs in the chapter)",
        _on_shards(chapter_ring, GATHERED, P("X", "Y")),
    ),
    _explicit(
        "collective-matmul-one-way",
        "the same with allgather_matmul, one way: sums in float32",
        _on_shards(gather_one_way, GATHERED, P("X", "Y")),
    ),
    _explicit(
        "collective-matmul-both-ways",
        "the same with allgather_matmul, half of A in each direction",
        _on_shards(gather_both_ways, GATHERED, P("X", "Y")),
    ),
    _auto(
        "collective-matmul-unsharded",
        "the same with D not sharded: nothing is sent (224 µs in the chapter)",
        _jitted(matmul, (Operand((B, D), P("X")), GATHERED[1]), P("X", "Y")),
    ),
    _explicit(
        "problem-1-1-shard-map",
        "the average of each shard, by shard_map: nothing is sent",
        _on_shards(shard_average, SHARDS, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-1-1-jit",
        "the average of each shard, by jit and reshapes: nothing is sent",
        _average_by_jit,
        TALL,
    ),
    _explicit(
        "problem-1-2-shard-map",
        "a roll within each shard, by shard_map: nothing is sent",
        _on_shards(shard_roll, SHARDS, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-1-2-jit",
        "a roll within each shard, by jit and reshapes",
        _roll_by_jit,
        TALL,
    ),
    Example(
        name="chapter/problem-2-1-local",
        description="a mixture of 16 experts on one device, the tokens sorted by expert",
        mesh={"X": 1, "Y": 1},
        on="v5litepod-1",
        build=_jitted(experts_local, MIXTURE, P("X", "Y")),
        axis_type=AxisType.Auto,
    ),
    _auto(
        "problem-2-2-jit",
        "the same by jit, W[E_X, D, F_Y] and A[S_X, D_Y]: every device gets every expert",
        _jitted(experts_local, MIXTURE, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-2-3-allgather",
        "the same by shard_map, first pass: every device gathers all tokens",
        _on_shards(experts_gathered, MIXTURE, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-2-3-alltoall",
        "the same by shard_map, second pass: all_to_all inside a while_loop",
        _on_shards(experts_exchanged, MIXTURE, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-2-4-top-k",
        "the second pass with two experts for each token",
        _on_shards(experts_top_k, TOP_K, P("X", "Y")),
        TALL,
    ),
    _explicit(
        "problem-3-1-naive",
        "A[B_X, D_Y] · W[D_Y, F], then one all-reduce that waits for the whole matmul",
        _on_shards(multiply_and_sum, REDUCED, P("X")),
    ),
    _explicit(
        "problem-3-1-tiled",
        "the same with a psum for each of four tiles, which XLA merges again",
        _on_shards(sum_in_tiles, REDUCED, P("X")),
    ),
    _explicit(
        "problem-3-1-ring",
        "the same with matmul_allreduce, one way: only permutes",
        _on_shards(allreduce_one_way, REDUCED, P("X")),
    ),
    _auto(
        "problem-3-2-jit",
        "Tmp[B_X, F_Y] · W[F_Y, D] → Out[B_X, D_Y] by jit: XLA chooses",
        _jitted(matmul, SCATTERED, P("X", "Y")),
    ),
    _explicit(
        "problem-3-2-psum-scatter",
        "the same by psum_scatter, which waits for the whole matmul",
        _on_shards(multiply_and_scatter, SCATTERED, P("X", "Y")),
    ),
    _explicit(
        "problem-3-2-ring",
        "the same with matmul_reducescatter, one way: permutes of partial sums",
        _on_shards(scatter_one_way, SCATTERED, P("X", "Y")),
    ),
    _auto(
        "problem-3-3-jit",
        "a Transformer's feed-forward layer by jit",
        _jitted(block, BLOCK, P("X", "Y")),
    ),
    _explicit(
        "problem-3-3-rings",
        "the same with feedforward: one ring after the other, both ways",
        _on_shards(block_rings, BLOCK, P("X", "Y")),
    ),
    _explicit(
        "problem-4-allreduce",
        "problem 3.1's ring in both directions",
        _on_shards(allreduce_both_ways, REDUCED, P("X")),
    ),
    _explicit(
        "problem-4-reducescatter",
        "problem 3.2's ring in both directions",
        _on_shards(scatter_both_ways, SCATTERED, P("X", "Y")),
    ),
)
