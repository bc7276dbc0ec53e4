"""The rings use less temporary memory than collectives, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.cases import rare, sampled
from tests.parallel.rings.benchmarks import benchmark

GATHER, GATHER_ROWS = "allgather_matmul, contraction", "allgather_matmul, rows"
SCATTER, SCATTER_ROWS = "matmul_reducescatter, columns", "matmul_reducescatter, rows"
ALLREDUCE = "matmul_allreduce"
FEEDFORWARD, FEEDFORWARD_ROWS = "feedforward, columns", "feedforward, rows"

# The maximum memory of a ring relative to the collective, by number of devices and rows. Four
# devices with 1024 rows have as many weight columns each as rows. There the sum of a weight
# gradient outweighs the savings of most rings (see docs/overlap.md).
SHARES = {
    (8, 1024): {
        GATHER: 1 / 2,
        GATHER_ROWS: 1,
        SCATTER: 1 / 2,
        SCATTER_ROWS: 1,
        ALLREDUCE: 1,
        FEEDFORWARD: 1 / 2,
        FEEDFORWARD_ROWS: 1 / 2,
    },
    (4, 1024): {GATHER: 3 / 4, ALLREDUCE: 1, FEEDFORWARD: 1},
    (4, 4096): {
        GATHER: 3 / 4,
        GATHER_ROWS: 1,
        SCATTER: 3 / 4,
        SCATTER_ROWS: 1,
        ALLREDUCE: 1,
        FEEDFORWARD: 3 / 4,
        FEEDFORWARD_ROWS: 3 / 4,
    },
}

DIRECTIONS = ("one", "both")
COUNTERS = 2**-10  # a KiB for loop counters


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    return benchmark("overlap")


@pytest.mark.parametrize("all_directions", [False, *rare(True)])
@pytest.mark.parametrize(("size", "rows"), sampled(SHARES, [(8, 1024)]))
def test_rings_take_less_memory_than_collectives(
    overlap: ModuleType, size: int, rows: int, all_directions: bool
) -> None:
    mesh = Mesh(np.array(jax.devices()[:size]), ("Y",))
    for index, case in enumerate(map(overlap.without_x_axis, overlap.cases())):
        share = SHARES[size, rows].get(case.name)
        if share is None:
            continue
        operands = overlap.operand_shapes(case, mesh, {"B": rows, "D": 2048, "F": 4096})

        def memory_of(
            local: Callable[..., jax.Array], case: Any = case, operands: Any = operands
        ) -> Any:
            product = overlap.mapped(case, mesh, local)
            step = overlap.value_and_gradients(product, len(operands))
            return overlap.temporary_mebibytes(step, operands)

        collective_memory = memory_of(case.collective)
        # Each matmul is tested in both directions, and so is each mesh.
        direction_index = (index + rows // 4096) % 2
        for direction in DIRECTIONS if all_directions else DIRECTIONS[direction_index:][:1]:
            ring_memory = memory_of(overlap.with_options(case.ring, direction=direction))
            assert ring_memory <= share * collective_memory + COUNTERS, f"{case.name}, {direction}"
