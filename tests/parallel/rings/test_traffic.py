"""What the programs send: only permutes, and exactly the bytes that the ring has to move."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from tests.parallel.rings.layouts import (
    BY_NAME,
    LAYOUTS,
    RING,
    Layout,
    abstract,
    mesh_of,
    shape,
    sharded,
)
from tests.parallel.rings.permutes import bytes_each_way

DIMS = {"b": 2, "s": 48, "d": 24 * 8, "f": 24 * 16}
B, S, D, F = DIMS["b"], DIMS["s"], DIMS["d"], DIMS["f"]
# Bytes of the full array that travels, for bfloat16 operands: shards as they are, sums in float32.
TRAVELS = {
    "gather contraction": [2 * B * S * D],
    "gather rows": [2 * B * S * D],
    "scatter columns": [4 * B * S * D],
    "scatter rows": [4 * B * S * D],
    "allreduce": [4 * B * S * D, 2 * B * S * D],
    "feedforward columns": [2 * B * S * D, 4 * B * S * D],
    "feedforward rows": [2 * B * S * D, 4 * B * S * D],
}
# The gradient of a gather scatters and gathers; that of a scatter gathers once for both operands.
TRAVELS_BACK = {
    "gather contraction": [4 * B * S * D, 2 * B * S * D],
    "gather rows": [4 * B * S * D, 2 * B * S * D],
    "scatter columns": [2 * B * S * D],
    "scatter rows": [2 * B * S * D],
    "allreduce": [],
    "feedforward columns": [2 * B * S * D, 4 * B * S * D, 2 * B * S * D],
    "feedforward rows": [2 * B * S * D, 4 * B * S * D, 2 * B * S * D],
}


# How the rings are written, and the meshes they lie in: alone, as the last axis and as the first.
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


def ways(direction: str, travels: Sequence[int], size: int) -> dict[int, int]:
    moved = sum(travels) * (size - 1) // size
    if not moved:
        return {}
    return {1: moved} if direction == "one" else {1: moved // 2, -1: moved // 2}


@pytest.mark.parametrize(("loop", "sizes", "ring_at"), PROGRAMS)
@pytest.mark.parametrize("direction", ["one", "both"])
@pytest.mark.parametrize("name", BY_NAME)
def test_each_link_carries_the_expected_bytes(
    name: str, direction: str, loop: str, sizes: tuple[int, ...], ring_at: int
) -> None:
    layout = BY_NAME[name]
    mesh, others = mesh_of(sizes, ring_at)
    size = sizes[ring_at]
    groups = mesh.size // size
    function = sharded(layout, mesh, others, direction=direction, loop=loop)

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *operands, cotangent = arrays
        return tuple(jax.vjp(function, *operands)[1](cotangent))

    forward = jax.jit(function).lower(*arguments(layout, groups))
    assert bytes_each_way(forward, mesh, RING) == ways(direction, TRAVELS[name], size)
    # The gradient runs rings again and no more; a feed-forward's needs the hidden layer besides.
    backward = jax.jit(gradients).lower(*arguments(layout, groups, cotangent=True))
    travels = TRAVELS_BACK[name] + (TRAVELS[name][:1] if "feedforward" in name else [])
    assert bytes_each_way(backward, mesh, RING) == ways(direction, travels, size)


def test_no_collective_but_permutes_is_compiled() -> None:
    mesh, others = mesh_of((4,), 0)

    def run_all(arrays: list[list[jax.Array]]) -> list[list[jax.Array]]:
        results = []
        for layout, (*operands, cotangent) in zip(LAYOUTS, arrays, strict=True):
            out, pull = jax.vjp(sharded(layout, mesh, others), *operands)
            results.append([out, *pull(cotangent)])
        return results

    in_specs = [[*layout.specs(others)[0], layout.specs(others)[1]] for layout in LAYOUTS]
    arrays = [
        [
            abstract(a.shape, a.dtype, jax.NamedSharding(mesh, spec))
            for a, spec in zip(arguments(layout, cotangent=True), specs, strict=True)
        ]
        for layout, specs in zip(LAYOUTS, in_specs, strict=True)
    ]
    lowered = jax.jit(run_all).lower(arrays)
    collective = r"(all.gather|all.reduce|reduce.scatter|all.to.all)[^\n]{0,8}\("
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert text is not None
        assert "collective" in text
        assert not re.findall(collective, text)


@pytest.mark.parametrize("name", BY_NAME)
def test_one_device_compiles_to_a_matmul(name: str) -> None:
    mesh, others = mesh_of((1,), 0)
    text = jax.jit(sharded(BY_NAME[name], mesh, others)).lower(*arguments(BY_NAME[name])).as_text()
    operations = re.findall(r"stablehlo\.(\w+)", text)
    moving = {"dynamic_slice", "dynamic_update_slice", "concatenate", "collective_permute", "while"}
    assert not moving & set(operations)
    assert operations.count("dot_general") == (2 if "feedforward" in name else 1)
    assert "f32" not in text  # the product is written in the operands' type at once
