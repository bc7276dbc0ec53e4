"""The programs of the chapter "Programming TPUs in JAX", at the chapter's sizes.

Each snippet and each problem, as plain `jax.jit`, as `shard_map`, and as the rings of
`drumline.parallel`. Where the chapter leaves a size open it is that of the collective matmul;
where it leaves the type open it is bfloat16, and float32 in the problems that say so. The scripts
in examples/chapter run the same programs, smaller, against exact results.
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

from drumline.inspect.examples.program import Build, Built, Example
from drumline.parallel import (
    allgather_matmul,
    expert_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)

B, D, F = 1024, 2048, 8192
"""Rows, and the two sides of the weights, of the collective matmul."""
E, K = 16, 2
"""Experts, and how many of them a token goes to."""
SHIFT = 5
GRID = {"X": 2, "Y": 4}
TALL = {"X": 4, "Y": 2}
SLICE = "v5litepod-8"


@dataclass(frozen=True)
class Operand:
    """An argument: its shape, where it lies, its type."""

    shape: tuple[int, ...]
    spec: P
    dtype: Any = jnp.bfloat16

    def on(self, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
        """Placed on a mesh."""
        place = NamedSharding(mesh, self.spec)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=place)


GATHERED = (Operand((B, D), P("X", "Y")), Operand((D, F), P(None, "Y")))
"""A[B_X, D_Y] · W[D, F_Y]: A has to come together."""
REDUCED = (Operand((B, D), P("X", "Y")), Operand((D, F), P("Y", None)))
"""A[B_X, D_Y] · W[D_Y, F]: the products have to be summed."""
SCATTERED = (Operand((B, F), P("X", "Y")), Operand((F, D), P("Y", None)))
"""Tmp[B_X, F_Y] · W[F_Y, D]: the products have to be summed and shared out."""
BLOCK = (Operand((B, D), P("X", "Y")), GATHERED[1], SCATTERED[1])
REPLICATED = (Operand((B, D), P("X")), Operand((D, F), P()), Operand((D, F), P()))
"""Rows over X, and weights that every device has whole."""
SHARDS = (Operand((512, 8), P("X", "Y"), jnp.float32),)
MIXTURE = (
    Operand((B, D), P("X", "Y"), jnp.float32),
    Operand((E, D, F), P("X", None, "Y"), jnp.float32),
    Operand((B,), P("X"), jnp.int32),
)
TOP_K = (*MIXTURE[:2], Operand((B, K), P("X"), jnp.int32), Operand((B, K), P("X"), jnp.float32))


def _jitted(body: Callable[..., Any], operands: tuple[Operand, ...], out: P) -> Build:
    """`body` under plain jit, its result's place given: XLA finds the rest."""

    def build(mesh: AbstractMesh) -> Built:
        jitted = jax.jit(body, out_shardings=NamedSharding(mesh, out))
        return jitted, tuple(operand.on(mesh) for operand in operands)

    return build


def _on_shards(body: Callable[..., Any], operands: tuple[Operand, ...], out: P) -> Build:
    """`body` under `shard_map`."""

    def build(mesh: AbstractMesh) -> Built:
        specs = tuple(operand.spec for operand in operands)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)
        return mapped, tuple(operand.on(mesh) for operand in operands)

    return build


# The snippets -----------------------------------------------------------------------------------


def matmul_square(x: jax.Array, w: jax.Array) -> jax.Array:
    """The first program: a product whose contraction is sharded."""
    return jnp.einsum("bd,df->bf", jnp.square(x), w)


def two_matmuls(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Two products; XLA chooses the sharding between them."""
    return jnp.einsum("bf,df->bd", jnp.einsum("bd,df->bf", x, w_in), w_out)


def _constrained(mesh: AbstractMesh) -> Built:
    def constrained_matmuls(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        hidden = jnp.einsum("bd,df->bf", x, w_in)
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("X", "Y")))
        return jnp.einsum("bf,df->bd", hidden, w_out)

    return _jitted(constrained_matmuls, REPLICATED, P("X"))(mesh)


def slice_and_average(x: jax.Array) -> jax.Array:
    """The mean over all devices of the first four numbers on each."""
    mean: jax.Array = lax.pmean(x[:4], ("x", "y"))
    return mean


def matmul(a: jax.Array, w: jax.Array) -> jax.Array:
    """What XLA does with a product."""
    return a @ w


def chapter_ring(a: jax.Array, w: jax.Array) -> jax.Array:
    """The chapter's ring: multiply the chunk that is here while it goes on to the left."""
    devices, here = lax.axis_size("Y"), lax.axis_index("Y")
    depth = a.shape[1]
    left = [(i, (i - 1) % devices) for i in range(devices)]
    out: jax.Array = lax.pcast(
        jnp.zeros((a.shape[0], w.shape[1]), a.dtype), ("X", "Y"), to="varying"
    )
    for step in range(devices):
        owner = (here + step) % devices
        out += a @ lax.dynamic_slice_in_dim(w, owner * depth, depth)
        if step < devices - 1:
            a = lax.ppermute(a, "Y", left)
    return out


def gather_one_way(a: jax.Array, w: jax.Array) -> jax.Array:
    """Whole chunks, one way round the ring."""
    return allgather_matmul(a, w, axis_name="Y", direction="one", loop="unrolled")


def gather_both_ways(a: jax.Array, w: jax.Array) -> jax.Array:
    """Half chunks, both ways round the ring."""
    return allgather_matmul(a, w, axis_name="Y", direction="both", loop="unrolled")


# Problem 1 --------------------------------------------------------------------------------------


def shard_average(x: jax.Array) -> jax.Array:
    """One device's view: its shard is all there is."""
    return x.mean(keepdims=True)


def shard_roll(x: jax.Array) -> jax.Array:
    """One device's view: a roll of its own rows."""
    return jnp.roll(x, SHIFT, axis=0) - x


def _average_by_jit(mesh: AbstractMesh) -> Built:
    rows, columns = mesh.shape["X"], mesh.shape["Y"]

    def average(x: jax.Array) -> jax.Array:
        return x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns).mean((1, 3))

    return _jitted(average, SHARDS, P("X", "Y"))(mesh)


def _roll_by_jit(mesh: AbstractMesh) -> Built:
    def roll(x: jax.Array) -> jax.Array:
        by_shard = x.reshape(mesh.shape["X"], -1, x.shape[1])
        return jnp.roll(by_shard, SHIFT, axis=1).reshape(x.shape) - x

    return _jitted(roll, SHARDS, P("X", "Y"))(mesh)


# Problem 2 --------------------------------------------------------------------------------------


def experts_local(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Tokens sorted by expert, one run of rows for each."""
    return expert_matmul(a, w, assignment)


def experts_gathered(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Every token comes to every device of X."""
    along: Any = {"axis_name": "X", "gather_axis_name": "Y"}
    return expert_matmul(a, w, assignment, exchange="allgather", **along)


def experts_exchanged(a: jax.Array, w: jax.Array, assignment: jax.Array) -> jax.Array:
    """Tokens travel to their experts in rounds of a fixed buffer."""
    return expert_matmul(a, w, assignment, axis_name="X", gather_axis_name="Y")


def experts_top_k(a: jax.Array, w: jax.Array, assignment: jax.Array, gates: jax.Array) -> jax.Array:
    """Each token goes to k experts, whose results are weighed by its gates."""
    return expert_matmul(a, w, assignment, gates, axis_name="X", gather_axis_name="Y")


# Problems 3 and 4 -------------------------------------------------------------------------------


def summed(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then add over Y."""
    out: jax.Array = lax.psum(a @ w, "Y")
    return out


def summed_in_tiles(a: jax.Array, w: jax.Array) -> jax.Array:
    """The chapter's hint: a psum for each quarter of the columns."""
    return jnp.concatenate([summed(a, part) for part in jnp.split(w, 4, axis=1)], axis=1)


def scattered(t: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply, then add and share out over Y."""
    out: jax.Array = lax.psum_scatter(t @ w, "Y", scatter_dimension=1, tiled=True)
    return out


def allreduce_one_way(a: jax.Array, w: jax.Array) -> jax.Array:
    """A ring reduce-scatter and a ring all-gather, one way."""
    return matmul_allreduce(a, w, axis_name="Y", direction="one", loop="unrolled")


def allreduce_both_ways(a: jax.Array, w: jax.Array) -> jax.Array:
    """The same in two streams of half the bytes."""
    return matmul_allreduce(a, w, axis_name="Y", direction="both", loop="unrolled")


def scatter_one_way(t: jax.Array, w: jax.Array) -> jax.Array:
    """Each owner's sum goes round the ring, and each device adds its term."""
    return matmul_reducescatter(t, w, axis_name="Y", direction="one", loop="unrolled")


def scatter_both_ways(t: jax.Array, w: jax.Array) -> jax.Array:
    """The same in two streams of half the bytes."""
    return matmul_reducescatter(t, w, axis_name="Y", direction="both", loop="unrolled")


def block(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Both products of a Transformer's feed-forward part; XLA decides how."""
    return jax.nn.relu(x @ w_in) @ w_out


def block_rings(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """The gathering ring, then the scattering one, both ways."""
    ring = partial(feedforward, axis_name="Y", activation=jax.nn.relu, loop="unrolled")
    return ring(x, w_in, w_out)


# The table --------------------------------------------------------------------------------------


def _auto(name: str, what: str, build: Build, mesh: dict[str, int] = GRID) -> Example:
    """On axes whose shardings XLA propagates, as the chapter had them."""
    return Example(
        name=f"chapter/{name}",
        what=what,
        mesh=mesh,
        on=SLICE,
        build=build,
        axis_type=AxisType.Auto,
    )


def _explicit(name: str, what: str, build: Build, mesh: dict[str, int] = GRID) -> Example:
    """On axes that are a part of each array's type, as `jax.make_mesh` makes them now."""
    return Example(name=f"chapter/{name}", what=what, mesh=mesh, on=SLICE, build=build)


CHAPTER: tuple[Example, ...] = (
    Example(
        name="chapter/first-jit-matmul",
        what="the first snippet: jit adds an all-reduce to a product with a sharded contraction",
        mesh={"X": 2, "Y": 2},
        on="v5litepod-4",
        build=_jitted(
            matmul_square, (Operand((8, D), P("X", "Y")), Operand((D, F), P("Y", None))), P("X")
        ),
        axis_type=AxisType.Auto,
    ),
    _auto(
        "sharding-constraint",
        "two products with the value between them sharded over Y too: an all-reduce",
        _constrained,
        TALL,
    ),
    _auto(
        "no-sharding-constraint",
        "the same two products as XLA likes them: rows over X, and nothing is sent",
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
        "the same as the chapter's own ring, one way (244 µs in the chapter)",
        _on_shards(chapter_ring, GATHERED, P("X", "Y")),
    ),
    _explicit(
        "collective-matmul-one-way",
        "the same as allgather_matmul, one way: sums in float32",
        _on_shards(gather_one_way, GATHERED, P("X", "Y")),
    ),
    _explicit(
        "collective-matmul-both-ways",
        "the same as allgather_matmul, half of A each way round the ring",
        _on_shards(gather_both_ways, GATHERED, P("X", "Y")),
    ),
    _auto(
        "collective-matmul-unsharded",
        "the same with D whole on each device: nothing is sent (224 µs in the chapter)",
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
        what="a mixture of 16 experts on one device, the tokens sorted by expert",
        mesh={"X": 1, "Y": 1},
        on="v5litepod-1",
        build=_jitted(experts_local, MIXTURE, P("X", "Y")),
        axis_type=AxisType.Auto,
    ),
    _auto(
        "problem-2-2-jit",
        "the same under jit, W[E_X, D, F_Y] and A[S_X, D_Y]: every device gets every expert",
        _jitted(experts_local, MIXTURE, P("X", "Y")),
        TALL,
    ),
    _auto(
        "problem-2-3-allgather",
        "the same by shard_map, first pass: every token comes to every device",
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
        "A[B_X, D_Y] · W[D_Y, F], then one all-reduce that waits for the whole product",
        _on_shards(summed, REDUCED, P("X")),
    ),
    _explicit(
        "problem-3-1-tiled",
        "the same with a psum for each of four tiles, which XLA merges again",
        _on_shards(summed_in_tiles, REDUCED, P("X")),
    ),
    _explicit(
        "problem-3-1-ring",
        "the same as matmul_allreduce, one way: permutes alone",
        _on_shards(allreduce_one_way, REDUCED, P("X")),
    ),
    _auto(
        "problem-3-2-jit",
        "Tmp[B_X, F_Y] · W[F_Y, D] → Out[B_X, D_Y] by jit: XLA chooses",
        _jitted(matmul, SCATTERED, P("X", "Y")),
    ),
    _explicit(
        "problem-3-2-psum-scatter",
        "the same by psum_scatter, which waits for the whole product",
        _on_shards(scattered, SCATTERED, P("X", "Y")),
    ),
    _explicit(
        "problem-3-2-ring",
        "the same as matmul_reducescatter, one way: permutes of sums",
        _on_shards(scatter_one_way, SCATTERED, P("X", "Y")),
    ),
    _auto(
        "problem-3-3-jit",
        "a Transformer's feed-forward part by jit",
        _jitted(block, BLOCK, P("X", "Y")),
    ),
    _explicit(
        "problem-3-3-rings",
        "the same as feedforward: one ring behind the other, both ways",
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
