"""A ring over several mesh axes, named in any order, follows the order in which they are named.

`PartitionSpec(("Y", "X"))` cuts a dimension along Y first, wherever Y stands in the mesh. The ring
over `("Y", "X")` must bring the pieces in that order too.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.parallel.rings.layouts import LAYOUTS, Layout, expected, shape, sharded
from tests.parallel.rings.rounding import exactly, excess

# Each with the whole mesh in another order than its own, and a part of one in the other order.
RINGS = [
    ((2, 4), ("X", "Y"), ("Y", "X")),
    ((2, 2, 2), ("X", "Y", "Z"), ("Z", "X")),
    ((2, 2, 2), ("X", "Y", "Z"), ("Y", "Z", "X")),
]
WRITTEN = list(product(("one", "both"), ("unrolled", "rolled")))


def mesh_over(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


@pytest.mark.parametrize(("sizes", "names", "ring"), RINGS)
def test_rings_over_axes_in_another_order_than_the_mesh_are_exact(
    sizes: tuple[int, ...], names: tuple[str, ...], ring: tuple[str, ...]
) -> None:
    mesh = mesh_over(sizes, names)
    others = tuple(name for name in names if name not in ring)
    groups = int(np.prod([mesh.shape[name] for name in others], dtype=int))
    around = mesh.size // groups
    dims = {"b": 2, "s": 3 * around, "d": 2 * around, "f": 4 * around}
    rng = np.random.default_rng(around)
    # Each mesh meets every direction and loop form, and each function three of the four.
    turn = RINGS.index((sizes, names, ring))
    cases = [(layout, *WRITTEN[(at + turn) % 4]) for at, layout in enumerate(LAYOUTS)]

    def draw(layout: Layout) -> list[jax.Array]:
        dimensions = (*layout.operands, layout.result)
        return [jnp.asarray(rng.normal(size=shape(d, groups, dims)), "float32") for d in dimensions]

    @jax.jit
    def run_all(inputs: list[list[jax.Array]]) -> list[list[jax.Array]]:
        results = []
        for (layout, direction, loop), (*operands, cotangent) in zip(cases, inputs, strict=True):
            function = sharded(layout, mesh, others, ring=ring, direction=direction, loop=loop)
            out, pull = jax.vjp(function, *operands)
            results.append([out, *pull(cotangent)])
        return results

    inputs = [draw(layout) for layout, *_ in cases]
    for (layout, *how), arrays, results in zip(cases, inputs, run_all(inputs), strict=True):
        *operands, cotangent = (exactly(array, jnp.dtype(jnp.float32)) for array in arrays)
        excesses = list(map(excess, results, expected(operands, cotangent)))
        assert max(excesses) <= 1, f"{layout.name}, {how} over {ring} of {names}: {excesses}"
