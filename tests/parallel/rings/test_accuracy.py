"""Every function, both ways and one way, in every type, on rings of 1 to 8 devices wherever they
lie in the mesh, is as exact as one float32-accumulated matmul: forward and all gradients against
float64.

Each function, both ways and one way, meets each size, place and type, and these each other; with
DRUMLINE_EVERY_CASE=1 all of them meet in every way.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiling import EVERY_CASE
from tests.pairwise import pairwise
from tests.parallel.rings.layouts import BY_NAME, expected, mesh_of, shape, sharded
from tests.parallel.rings.rounding import exactly, excess

FUNCTIONS = list(product(BY_NAME, ("one", "both")))
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
OPTIONS = (FUNCTIONS, list(MESHES), PLACES, DTYPES)


@pytest.mark.parametrize(
    ("function", "size", "place", "dtype"),
    product(*OPTIONS) if EVERY_CASE else pairwise(*OPTIONS),
)
def test_results_and_gradients_are_as_exact_as_one_matmul(
    function: tuple[str, str], size: int, place: str, dtype: jnp.dtype
) -> None:
    name, direction = function
    layout, number = BY_NAME[name], PLACES.index(place)
    sizes = MESHES[size][number]
    mesh, others = mesh_of(sizes, (0, len(sizes) - 1, 1)[number])
    groups = int(np.prod(sizes)) // size
    # Three rows and five or four columns on each device: halves of odd and even lengths.
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    rng = np.random.default_rng(size * 10 + number)
    in_specs, out_spec = layout.specs(others)
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
        out, pull = jax.vjp(sharded(layout, mesh, others, direction=direction), *operands)
        return [out, *pull(cotangent)]

    results = run(*arrays)
    *operands, cotangent = (exactly(array, jnp.dtype(dtype)) for array in arrays)
    excesses = list(map(excess, results, expected(operands, cotangent)))
    assert all(result.dtype == dtype for result in results)
    assert max(excesses) <= 1, excesses
