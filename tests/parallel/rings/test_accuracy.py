"""Every function, both ways and one way, in every type, on rings of 1 to 8 devices wherever they
lie in the mesh, is as exact as one float32-accumulated matmul: forward and all gradients against
float64.

Each size meets each place and each type, and each place each type; with DRUMLINE_EVERY_CASE=1 all
three meet in every way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiling import EVERY_CASE
from tests.parallel.rings.layouts import LAYOUTS, Layout, expected, mesh_of, shape, sharded
from tests.parallel.rings.rounding import exactly, excess

CASES = [(layout, direction) for layout in LAYOUTS for direction in ("one", "both")]

# For each ring size: the ring as the first axis, the last one, and the middle one of three.
MESHES = {
    1: ((1, 4), (4, 1), (2, 1, 4)),
    2: ((2, 4), (4, 2), (2, 2, 2)),
    3: ((3, 2), (2, 3), (1, 3, 2)),
    4: ((4, 2), (2, 4), (1, 4, 2)),
    8: ((8, 1), (1, 8), (1, 8, 1)),
}
PLACES = ("first", "last", "middle")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
GRID = [
    (size, place, dtype)
    for row, size in enumerate(MESHES)
    for column, place in enumerate(PLACES)
    for number, dtype in enumerate(DTYPES)
    if EVERY_CASE or (row + column + number) % 3 == 0
]


@pytest.mark.parametrize(("size", "place", "dtype"), GRID)
def test_results_and_gradients_are_as_exact_as_one_matmul(
    size: int, place: str, dtype: jnp.dtype
) -> None:
    number = PLACES.index(place)
    sizes = MESHES[size][number]
    mesh, others = mesh_of(sizes, (0, len(sizes) - 1, 1)[number])
    groups = int(np.prod(sizes)) // size
    # Three rows and five or four columns on each device: halves of odd and even lengths.
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    rng = np.random.default_rng(size * 10 + number)

    def draw(layout: Layout) -> list[jax.Array]:
        in_specs, out_spec = layout.specs(others)
        return [
            jax.device_put(
                rng.normal(size=shape(dimensions, groups, dims)).astype(dtype),
                jax.NamedSharding(mesh, spec),
            )
            for dimensions, spec in zip(
                (*layout.operands, layout.result), (*in_specs, out_spec), strict=True
            )
        ]

    @jax.jit
    def run_all(inputs: list[list[jax.Array]]) -> list[list[jax.Array]]:
        results = []
        for (layout, direction), (*operands, cotangent) in zip(CASES, inputs, strict=True):
            function = sharded(layout, mesh, others, direction=direction)
            out, pull = jax.vjp(function, *operands)
            results.append([out, *pull(cotangent)])
        return results

    inputs = [draw(layout) for layout, _ in CASES]
    for (layout, direction), arrays, results in zip(CASES, inputs, run_all(inputs), strict=True):
        *operands, cotangent = (exactly(array, jnp.dtype(dtype)) for array in arrays)
        excesses = list(map(excess, results, expected(operands, cotangent)))
        assert all(result.dtype == dtype for result in results)
        assert max(excesses) <= 1, f"{layout.name}, {direction} on {mesh.shape}: {excesses}"
