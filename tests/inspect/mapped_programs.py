"""Every kind of collective in `shard_map`, on meshes with contiguous and strided groups.

The arrays are (64, 128). The table gives a shard's bytes as rows × columns × bytes.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.inspect.expected import (
    Program,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from tests.inspect.meshes import mapped

FLAT = P("X")
GRID = P("X", "Y")
CUBE = P(("X", "Y"), "Z")
RING_4 = [(source, (source + 1) % 4) for source in range(4)]
RING_8 = [(source, (source + 1) % 8) for source in range(8)]


def _tree(x: jax.Array) -> dict[str, jax.Array]:
    return lax.psum({"a": x, "b": x[:, :3] + 1, "c": x[0] * 2}, "X")


SUMS = (
    Program(
        "psum, one axis",
        mapped((8,), lambda x: lax.psum(x, "X"), FLAT),
        (all_reduce("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "psum, minor axis",
        mapped((2, 4), lambda x: lax.psum(x, "Y"), GRID),
        (all_reduce("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "psum, major axis: strided groups",
        mapped((2, 4), lambda x: lax.psum(x, "X"), GRID),
        (all_reduce("X", 2, 32 * 32 * 4),),
    ),
    Program(
        "psum, major axis of (4, 2)",
        mapped((4, 2), lambda x: lax.psum(x, "X"), GRID),
        (all_reduce("X", 4, 16 * 64 * 4),),
    ),
    Program(
        "psum, middle axis of three",
        mapped((2, 2, 2), lambda x: lax.psum(x, "Y"), CUBE),
        (all_reduce("Y", 2, 16 * 64 * 4),),
    ),
    Program(
        "psum, two axes at once",
        mapped((2, 4), lambda x: lax.psum(x, ("X", "Y")), GRID),
        (all_reduce("XY", 8, 32 * 32 * 4),),
    ),
    Program(
        "psum, outer axes of three, named in the other order",
        mapped((2, 2, 2), lambda x: lax.psum(x, ("Z", "X")), CUBE),
        (all_reduce("XZ", 4, 16 * 64 * 4),),
    ),
    Program(
        "psum, axis by axis",
        mapped((2, 4), lambda x: lax.psum(jnp.tanh(lax.psum(x, "X")), "Y"), GRID),
        (all_reduce("X", 2, 32 * 32 * 4), all_reduce("Y", 4, 32 * 32 * 4)),
    ),
    Program(
        "psum, axis of one device",
        mapped((8, 1), lambda x: lax.psum(x, "Y"), GRID),
        (),
    ),
    Program(
        "psum, an axis of one device among two",
        mapped((4, 1, 2), lambda x: lax.psum(x, ("Y", "Z")), CUBE),
        (all_reduce("Z", 2, 16 * 64 * 4),),
    ),
    Program(
        "pmean",
        mapped((2, 4), lambda x: lax.pmean(x, "Y"), GRID),
        (all_reduce("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "pmax",
        mapped((4, 2), lambda x: lax.pmax(x, "Y"), GRID),
        (all_reduce("Y", 2, 16 * 64 * 4),),
    ),
    Program(
        "pmin of a scalar",
        mapped((8,), lambda x: lax.pmin(x.sum(), "X")[None], FLAT),
        (all_reduce("X", 8, 4),),
    ),
    Program(
        "psum of a tree, which XLA may send in one",
        mapped((8,), _tree, FLAT),
        (
            all_reduce("X", 8, 8 * 128 * 4),
            all_reduce("X", 8, 8 * 3 * 4),
            all_reduce("X", 8, 128 * 4),
        ),
        merged=True,
    ),
    Program(
        "psum_scatter, tiled",
        mapped((2, 4), lambda x: lax.psum_scatter(x, "Y", tiled=True), GRID),
        (reduce_scatter("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "psum_scatter, columns over strided groups",
        mapped(
            (2, 4),
            lambda x: lax.psum_scatter(x, "X", scatter_dimension=1, tiled=True),
            GRID,
        ),
        (reduce_scatter("X", 2, 32 * 32 * 4),),
    ),
    Program(
        "psum_scatter, not tiled",
        mapped((8,), lambda x: lax.psum_scatter(x, "X")[None], FLAT),
        (reduce_scatter("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "psum_scatter, two axes at once",
        mapped((2, 4), lambda x: lax.psum_scatter(x, ("X", "Y"), tiled=True), GRID),
        (reduce_scatter("XY", 8, 32 * 32 * 4),),
    ),
)

TRANSFERS = (
    Program(
        "all_gather, tiled",
        mapped((8,), lambda x: lax.all_gather(x, "X", tiled=True), FLAT),
        (all_gather("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "all_gather, columns over the minor axis",
        mapped((2, 4), lambda x: lax.all_gather(x, "Y", axis=1, tiled=True), GRID),
        (all_gather("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "all_gather, not tiled, over strided groups",
        mapped((4, 2), lambda x: lax.all_gather(x, "X").sum(0), GRID),
        (all_gather("X", 4, 16 * 64 * 4),),
    ),
    Program(
        "all_gather, two axes at once",
        mapped((2, 4), lambda x: lax.all_gather(x, ("X", "Y"), tiled=True), GRID),
        (all_gather("XY", 8, 32 * 32 * 4),),
    ),
    Program(
        "all_gather, first and last axis of three",
        mapped((2, 2, 2), lambda x: lax.all_gather(x, ("X", "Z"), tiled=True), CUBE),
        (all_gather("XZ", 4, 16 * 64 * 4),),
    ),
    Program(
        "all_gather, axis of one device",
        mapped((1, 8), lambda x: lax.all_gather(x, "X", tiled=True), GRID),
        (),
    ),
    Program(
        "all_to_all, tiled",
        mapped((8,), lambda x: lax.all_to_all(x, "X", 1, 0, tiled=True), FLAT),
        (all_to_all("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "all_to_all, not tiled",
        mapped((8,), lambda x: lax.all_to_all(x, "X", 0, 0), FLAT),
        (all_to_all("X", 8, 8 * 128 * 4),),
    ),
    Program(
        "all_to_all, strided groups",
        mapped((2, 4), lambda x: lax.all_to_all(x, "X", 0, 1, tiled=True), GRID),
        (all_to_all("X", 2, 32 * 32 * 4),),
    ),
    Program(
        "all_to_all, two axes at once",
        mapped((2, 4), lambda x: lax.all_to_all(x, ("X", "Y"), 0, 1, tiled=True), GRID),
        (all_to_all("XY", 8, 32 * 32 * 4),),
    ),
    Program(
        "ppermute, full ring",
        mapped((8,), lambda x: lax.ppermute(x, "X", RING_8), FLAT),
        (permute("X", 8 * 128 * 4),),
    ),
    Program(
        "ppermute, full ring over the minor axis",
        mapped((2, 4), lambda x: lax.ppermute(x, "Y", RING_4), GRID),
        (permute("Y", 32 * 32 * 4),),
    ),
    Program(
        "ppermute, full ring over the major axis",
        mapped((4, 2), lambda x: lax.ppermute(x, "X", RING_4), GRID),
        (permute("X", 16 * 64 * 4),),
    ),
    Program(
        "ppermute, partial: the last device sends nothing",
        mapped((8,), lambda x: lax.ppermute(x, "X", RING_8[:-1]), FLAT),
        (permute("X", 8 * 128 * 4),),
    ),
    Program(
        "ppermute, one pair only",
        mapped((2, 4), lambda x: lax.ppermute(x, "Y", [(3, 1)]), GRID),
        (permute("Y", 32 * 32 * 4),),
    ),
    Program(
        "ppermute, ring through two axes",
        mapped((2, 4), lambda x: lax.ppermute(x, ("X", "Y"), RING_8), GRID),
        (permute("XY", 32 * 32 * 4),),
    ),
    Program(
        "ppermute, both directions",
        mapped(
            (2, 4),
            lambda x: (
                lax.ppermute(x[:8], "Y", RING_4),
                lax.ppermute(x[8:], "Y", [(target, source) for source, target in RING_4]),
            ),
            GRID,
        ),
        (permute("Y", 8 * 32 * 4), permute("Y", 24 * 32 * 4)),
    ),
)

TYPES = (
    *(
        Program(
            f"bfloat16: {name}",
            mapped((2, 4), body, GRID, dtype=jnp.bfloat16),
            (expected,),
        )
        for name, body, expected in (
            ("psum", lambda x: lax.psum(x, "Y"), all_reduce("Y", 4, 2048, "bfloat16")),
            ("pmax", lambda x: lax.pmax(x, "X"), all_reduce("X", 2, 2048, "bfloat16")),
            (
                "psum_scatter",
                lambda x: lax.psum_scatter(x, "Y", tiled=True),
                reduce_scatter("Y", 4, 2048, "bfloat16"),
            ),
            (
                "all_gather",
                lambda x: lax.all_gather(x, "Y", tiled=True),
                all_gather("Y", 4, 2048, "bfloat16"),
            ),
            (
                "all_to_all",
                lambda x: lax.all_to_all(x, "Y", 0, 1, tiled=True),
                all_to_all("Y", 4, 2048, "bfloat16"),
            ),
            (
                "ppermute",
                lambda x: lax.ppermute(x, "Y", RING_4),
                permute("Y", 2048, "bfloat16"),
            ),
        )
    ),
    Program(
        "bfloat16 summed in float32 on purpose",
        mapped(
            (2, 4),
            lambda x: lax.psum(x.astype(jnp.float32), "Y").astype(jnp.bfloat16),
            GRID,
            dtype=jnp.bfloat16,
        ),
        (all_reduce("Y", 4, 32 * 32 * 4),),
    ),
    Program(
        "bfloat16 and float32 side by side",
        mapped(
            (2, 4),
            lambda x: (lax.psum(x, "Y"), lax.psum(x.astype(jnp.float32) * 2, "X")),
            GRID,
            dtype=jnp.bfloat16,
        ),
        (all_reduce("Y", 4, 2048, "bfloat16"), all_reduce("X", 2, 4096)),
    ),
    Program(
        "bfloat16 and float32 in one tree",
        mapped(
            (8,),
            lambda x: lax.psum({"a": x, "b": x.astype(jnp.float32) * 2}, "X"),
            FLAT,
            dtype=jnp.bfloat16,
        ),
        (all_reduce("X", 8, 8 * 128 * 2, "bfloat16"), all_reduce("X", 8, 8 * 128 * 4)),
        merged=True,
    ),
    Program(
        "bfloat16: psum of a tree",
        mapped((8,), _tree, FLAT, dtype=jnp.bfloat16),
        (
            all_reduce("X", 8, 8 * 128 * 2, "bfloat16"),
            all_reduce("X", 8, 8 * 3 * 2, "bfloat16"),
            all_reduce("X", 8, 128 * 2, "bfloat16"),
        ),
        merged=True,
    ),
    Program(
        "float16: psum",
        mapped((2, 4), lambda x: lax.psum(x, "Y"), GRID, dtype=jnp.float16),
        (all_reduce("Y", 4, 2048, "float16"),),
    ),
    Program(
        "int32: psum",
        mapped((2, 4), lambda x: lax.psum(x, "X"), GRID, dtype=jnp.int32),
        (all_reduce("X", 2, 4096, "int32"),),
    ),
    Program(
        "int8: all_gather",
        mapped((2, 4), lambda x: lax.all_gather(x, "X", tiled=True), GRID, dtype=jnp.int8),
        (all_gather("X", 2, 1024, "int8"),),
    ),
    Program(
        "bool: ppermute",
        mapped((2, 4), lambda x: lax.ppermute(x, "Y", RING_4), GRID, dtype=jnp.bool_),
        (permute("Y", 1024, "bool"),),
    ),
)

SILENT = (
    Program(
        "no communication: a device's own view",
        mapped((4, 2), lambda x: x.mean(keepdims=True), GRID),
        (),
    ),
    Program(
        "no communication: the place in the mesh and its size",
        mapped((2, 4), lambda x: x * lax.axis_index("Y") / lax.psum(1, "X"), GRID),
        (),
    ),
)

MAPPED = (*SUMS, *TRANSFERS, *TYPES, *SILENT)
