"""Every function, both ways and one way, in every type, on rings of 1 to 8 devices, is as exact
as one float32-accumulated matmul: forward and all gradients against float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel.layouts import LAYOUTS, QUICK, expected, mesh_of, shape, sharded
from tests.parallel.rounding import exactly, excess

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DIRECTIONS = ("one", "both")

# For each ring size: the ring as the first axis, the last one, and the middle one of three.
MESHES = {
    1: ((1, 4), (4, 1), (2, 1, 4)),
    2: ((2, 4), (4, 2), (2, 2, 2)),
    3: ((3, 2), (2, 3), (1, 3, 2)),
    4: ((4, 2), (2, 4), (1, 4, 2)),
    8: ((8, 1), (1, 8), (1, 8, 1)),
}
PLACES = ("first", "last", "middle")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", MESHES)
def test_results_and_gradients_are_as_exact_as_one_matmul(size: int, place: str) -> None:
    number = PLACES.index(place)
    sizes = MESHES[size][number]
    mesh, others = mesh_of(sizes, (0, len(sizes) - 1, 1)[number])
    groups = int(np.prod(sizes)) // size
    # Three rows and five or four columns on each device: halves of odd and even lengths.
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    rng = np.random.default_rng(size * 10 + number)

    calls = {}
    for layout in LAYOUTS:
        for way, direction in enumerate(DIRECTIONS):
            # Over the three places each direction meets each type.
            dtype = DTYPES[(number + way) % len(DTYPES)]
            shapes = [shape(d, groups, dims) for d in (*layout.operands, layout.result)]
            arrays = [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]
            calls[layout.name, direction] = (
                sharded(layout, mesh, others, direction=direction),
                arrays,
            )

    @partial(jax.jit, compiler_options=QUICK)
    def run_all(
        arrays: dict[tuple[str, str], list[jax.Array]],
    ) -> dict[tuple[str, str], list[jax.Array]]:
        results = {}
        for name, (function, _) in calls.items():
            *operands, cotangent = arrays[name]
            out, pull = jax.vjp(function, *operands)
            results[name] = [out, *pull(cotangent)]
        return results

    results = run_all({name: arrays for name, (_, arrays) in calls.items()})
    for name, (_, arrays) in calls.items():
        dtype = arrays[0].dtype
        *operands, cotangent = (exactly(array, dtype) for array in arrays)
        excesses = [
            excess(result, known)
            for result, known in zip(results[name], expected(operands, cotangent), strict=True)
        ]
        assert all(result.dtype == dtype for result in results[name])
        assert max(excesses) <= 1, f"{name} in {dtype} on {mesh.shape}: {excesses}"
