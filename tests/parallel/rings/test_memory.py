"""The rings need less temporary memory than collectives do, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.compiling import EVERY_CASE
from tests.parallel.rings.benchmarks import benchmark

GATHER, GATHER_ROWS = "allgather_matmul, contraction", "allgather_matmul, rows"
SCATTER, SCATTER_ROWS = "matmul_reducescatter, columns", "matmul_reducescatter, rows"
ALLREDUCE = "matmul_allreduce"
FEEDFORWARD, FEEDFORWARD_ROWS = "feedforward, columns", "feedforward, rows"

# The most that a ring may take of what the collective takes, on so many devices with so many rows.
# Four devices with 1024 rows have as many columns of the weights each as rows, and then the sum
# of a weight gradient outweighs what most rings save: docs/overlap.md reckons it.
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
COUNTERS = 2**-10  # a KiB for the loops' own


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    return benchmark("overlap")


@pytest.mark.parametrize(("size", "rows"), SHARES)
def test_rings_take_less_memory_than_collectives(overlap: ModuleType, size: int, rows: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:size]), ("Y",))
    for number, case in enumerate(map(overlap.on_the_ring_alone, overlap.cases())):
        share = SHARES[size, rows].get(case.name)
        if share is None:
            continue
        operands = overlap.described(case, mesh, {"B": rows, "D": 2048, "F": 4096})

        def taken(
            local: Callable[..., jax.Array], case: Any = case, operands: Any = operands
        ) -> Any:
            product = overlap.mapped(case, mesh, local)
            step = overlap.value_and_gradients(product, len(operands))
            return overlap.mebibytes(step, operands)

        collective = taken(case.collective)
        # Each product meets both directions, and so does each mesh.
        turn = (number + rows // 4096) % 2
        for direction in DIRECTIONS if EVERY_CASE else DIRECTIONS[turn:][:1]:
            ring = taken(overlap.with_options(case.ring, direction=direction))
            assert ring <= share * collective + COUNTERS, f"{case.name}, {direction}"
