"""A ring over several mesh axes follows the order in which the axes are named.

`PartitionSpec(("Y", "X"))` divides a dimension along Y first, for any position of Y in the mesh.
The ring over `("Y", "X")` must return the pieces in that order too.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh

from tests.cases import rare
from tests.parallel.rings.layouts import LAYOUTS, Layout, expected, shape, sharded
from tests.parallel.rings.rounding import exact_input, relative_error

# Rings over the whole mesh in another order, and over a part of a mesh in the other order.
RINGS = [
    ((2, 4), ("X", "Y"), ("Y", "X")),
    ((2, 2, 2), ("X", "Y", "Z"), ("Z", "X")),
    ((2, 2, 2), ("X", "Y", "Z"), ("Y", "Z", "X")),
]
FORMS = list(product(("one", "both"), ("unrolled", "rolled")))


def mesh_over(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


@pytest.mark.parametrize(("sizes", "names", "ring"), [RINGS[1], *rare(RINGS[0], RINGS[2])])
def test_rings_over_axes_in_another_order_than_the_mesh_are_exact(
    sizes: tuple[int, ...], names: tuple[str, ...], ring: tuple[str, ...]
) -> None:
    mesh = mesh_over(sizes, names)
    other_axes = tuple(name for name in names if name not in ring)
    groups = int(np.prod([mesh.shape[name] for name in other_axes], dtype=int))
    ring_size = mesh.size // groups
    dims = {"b": 2, "s": 3 * ring_size, "d": 2 * ring_size, "f": 4 * ring_size}
    rng = np.random.default_rng(ring_size)
    # Each mesh is tested with every direction and loop form, and each function with three of the
    # four.
    mesh_index = RINGS.index((sizes, names, ring))
    cases = [(layout, *FORMS[(index + mesh_index) % 4]) for index, layout in enumerate(LAYOUTS)]

    def random_operands(layout: Layout) -> list[npt.NDArray[np.float32]]:
        dimensions = (*layout.operands, layout.result)
        return [rng.normal(size=shape(d, groups, dims)).astype(np.float32) for d in dimensions]

    @jax.jit
    def run_all(inputs: Any) -> list[list[jax.Array]]:
        results = []
        for (layout, direction, loop), (*operands, cotangent) in zip(cases, inputs, strict=True):
            function = sharded(layout, mesh, other_axes, ring=ring, direction=direction, loop=loop)
            out, vjp_function = jax.vjp(function, *operands)
            results.append([out, *vjp_function(cotangent)])
        return results

    inputs = [random_operands(layout) for layout, *_ in cases]
    for (layout, *form), arrays, results in zip(cases, inputs, run_all(inputs), strict=True):
        *operands, cotangent = (exact_input(array, jnp.dtype(jnp.float32)) for array in arrays)
        relative_errors = list(map(relative_error, results, expected(operands, cotangent)))
        assert max(relative_errors) <= 1, (
            f"{layout.name}, {form} over {ring} of {names}: {relative_errors}"
        )
