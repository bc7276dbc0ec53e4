"""The programs send only permutes, with exactly the bytes that the ring requires."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from tests.cases import sampled
from tests.pairwise import pairwise
from tests.parallel.rings.layouts import (
    BY_NAME,
    RING,
    Layout,
    abstract,
    mesh_of,
    shape,
    sharded,
)
from tests.parallel.rings.permutes import bytes_per_direction

DIMS = {"b": 2, "s": 48, "d": 24 * 8, "f": 24 * 16}
B, S, D, F = DIMS["b"], DIMS["s"], DIMS["d"], DIMS["f"]
# The bytes of each moving array, for bfloat16 operands: shards unchanged, sums in float32.
MOVED_BYTES = {
    "gather contraction": [2 * B * S * D],
    "gather rows": [2 * B * S * D],
    "scatter columns": [4 * B * S * D],
    "scatter rows": [4 * B * S * D],
    "allreduce": [4 * B * S * D, 2 * B * S * D],
    "feedforward columns": [2 * B * S * D, 4 * B * S * D],
    "feedforward rows": [2 * B * S * D, 4 * B * S * D],
}
# The gradient of a gather scatters and gathers. That of a scatter gathers once for both operands.
MOVED_BYTES_BACKWARD = {
    "gather contraction": [4 * B * S * D, 2 * B * S * D],
    "gather rows": [4 * B * S * D, 2 * B * S * D],
    "scatter columns": [2 * B * S * D],
    "scatter rows": [2 * B * S * D],
    "allreduce": [],
    "feedforward columns": [2 * B * S * D, 4 * B * S * D, 2 * B * S * D],
    "feedforward rows": [2 * B * S * D, 4 * B * S * D, 2 * B * S * D],
}


# The loop forms of the rings, with meshes: the ring alone, as the last axis and as the first.
PROGRAMS = [
    ("unrolled", (3,), 0),
    ("unrolled", (2, 4), 1),
    ("rolled", (8,), 0),
    ("rolled", (4, 2), 0),
]


def arguments(
    layout: Layout, groups: int = 1, *, cotangent: bool = False
) -> list[jax.ShapeDtypeStruct]:
    dimensions = (*layout.operands, layout.result) if cotangent else layout.operands
    return [abstract(shape(d, groups, DIMS), jnp.bfloat16) for d in dimensions]


def expected_bytes(direction: str, array_bytes: Sequence[int], size: int) -> dict[int, int]:
    total = sum(array_bytes) * (size - 1) // size
    if not total:
        return {}
    return {1: total} if direction == "one" else {1: total // 2, -1: total // 2}


OPTIONS = (list(BY_NAME), ("one", "both"))


@pytest.mark.parametrize(
    ("name", "direction", "program"),
    sampled(product(*OPTIONS, PROGRAMS), pairwise(*OPTIONS, PROGRAMS[1:3])),
)
def test_each_link_carries_the_expected_bytes(
    name: str, direction: str, program: tuple[str, tuple[int, ...], int]
) -> None:
    loop, sizes, ring_position = program
    layout = BY_NAME[name]
    mesh, other_axes = mesh_of(sizes, ring_position)
    size = sizes[ring_position]
    groups = mesh.size // size
    function = sharded(layout, mesh, other_axes, direction=direction, loop=loop)

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *operands, cotangent = arrays
        return tuple(jax.vjp(function, *operands)[1](cotangent))

    forward = jax.jit(function).lower(*arguments(layout, groups))
    assert bytes_per_direction(forward, mesh, RING) == expected_bytes(
        direction, MOVED_BYTES[name], size
    )
    # The gradient runs the same rings. A feed-forward's gradient also gathers for the hidden layer.
    backward = jax.jit(gradients).lower(*arguments(layout, groups, cotangent=True))
    array_bytes = MOVED_BYTES_BACKWARD[name] + (
        MOVED_BYTES[name][:1] if "feedforward" in name else []
    )
    assert bytes_per_direction(backward, mesh, RING) == expected_bytes(direction, array_bytes, size)


def test_no_collective_but_permutes_is_compiled() -> None:
    mesh, other_axes = mesh_of((4,), 0)
    # The feed-forwards gather and scatter both columns and rows.
    layouts = [BY_NAME[name] for name in ("feedforward columns", "feedforward rows", "allreduce")]

    def run_all(arrays: list[list[jax.Array]]) -> list[list[jax.Array]]:
        results = []
        for layout, (*operands, cotangent) in zip(layouts, arrays, strict=True):
            out, vjp_function = jax.vjp(sharded(layout, mesh, other_axes), *operands)
            results.append([out, *vjp_function(cotangent)])
        return results

    in_specs = [[*layout.specs(other_axes)[0], layout.specs(other_axes)[1]] for layout in layouts]
    arrays = [
        [
            abstract(a.shape, a.dtype, jax.NamedSharding(mesh, spec))
            for a, spec in zip(arguments(layout, cotangent=True), specs, strict=True)
        ]
        for layout, specs in zip(layouts, in_specs, strict=True)
    ]
    lowered = jax.jit(run_all).lower(arrays)
    collective = r"(all.gather|all.reduce|reduce.scatter|all.to.all)[^\n]{0,8}\("
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert text is not None
        assert "collective" in text
        assert not re.findall(collective, text)


@pytest.mark.parametrize("name", BY_NAME)
def test_one_device_compiles_to_a_matmul(name: str) -> None:
    mesh, other_axes = mesh_of((1,), 0)
    text = (
        jax.jit(sharded(BY_NAME[name], mesh, other_axes)).lower(*arguments(BY_NAME[name])).as_text()
    )
    operations = re.findall(r"stablehlo\.(\w+)", text)
    data_movement = {
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "collective_permute",
        "while",
    }
    assert not data_movement & set(operations)
    assert operations.count("dot_general") == (2 if "feedforward" in name else 1)
    assert "f32" not in text  # the matmul's output has the operands' type
