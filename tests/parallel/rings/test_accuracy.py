"""Every ring function is as accurate as one float32-accumulated matmul, forward and backward.

The tests compare with float64, on rings of 1 to 8 devices anywhere in the mesh, in both directions
and one, for every type. Function, direction, position and type are combined pairwise, and every
size runs with several of these cases; DRUMLINE_EVERY_CASE=1 tests all combinations.
"""

from __future__ import annotations

from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import sampled
from tests.pairwise import pairwise
from tests.parallel.rings.layouts import BY_NAME, expected, mesh_of, shape, sharded
from tests.parallel.rings.rounding import exact_input, relative_error

# The ring is the first axis, the last one, and the middle one of three, for each ring size.
MESHES = {
    1: ((1, 4), (4, 1), (2, 1, 4)),
    2: ((2, 4), (4, 2), (2, 2, 2)),
    3: ((3, 2), (2, 3), (1, 3, 2)),
    4: ((4, 2), (2, 4), (1, 4, 2)),
    8: ((8, 1), (1, 8), (1, 8, 1)),
}
POSITIONS = ("first", "last", "middle")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
OPTIONS = (list(BY_NAME), ("one", "both"), POSITIONS, DTYPES)
SAMPLE = [(size, *case) for size, case in zip(cycle(MESHES), pairwise(*OPTIONS), strict=False)]


@pytest.mark.parametrize(
    ("size", "name", "direction", "position", "dtype"),
    sampled(product(MESHES, *OPTIONS), SAMPLE),
)
def test_results_and_gradients_are_as_exact_as_one_matmul(
    size: int, name: str, direction: str, position: str, dtype: jnp.dtype
) -> None:
    layout, index = BY_NAME[name], POSITIONS.index(position)
    sizes = MESHES[size][index]
    mesh, other_axes = mesh_of(sizes, (0, len(sizes) - 1, 1)[index])
    groups = int(np.prod(sizes)) // size
    # Three rows and five or four columns per device give halves of odd and even lengths.
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    rng = np.random.default_rng(size * 10 + index)
    in_specs, out_spec = layout.specs(other_axes)
    arrays = [
        jax.device_put(
            rng.normal(size=shape(dimensions, groups, dims)).astype(dtype),
            jax.NamedSharding(mesh, spec),
        )
        for dimensions, spec in zip(
            (*layout.operands, layout.result), (*in_specs, out_spec), strict=True
        )
    ]

    @jax.jit
    def run(*arrays: jax.Array) -> list[jax.Array]:
        *operands, cotangent = arrays
        out, vjp_function = jax.vjp(
            sharded(layout, mesh, other_axes, direction=direction), *operands
        )
        return [out, *vjp_function(cotangent)]

    results = run(*arrays)
    *operands, cotangent = (exact_input(array, jnp.dtype(dtype)) for array in arrays)
    relative_errors = list(map(relative_error, results, expected(operands, cotangent)))
    assert all(result.dtype == dtype for result in results)
    assert max(relative_errors) <= 1, relative_errors
