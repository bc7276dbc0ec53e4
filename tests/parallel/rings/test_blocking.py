"""Matmuls with blocking collectives equal those on rings, and send sums in the requested type."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from drumline.parallel import allgather_matmul, matmul_reducescatter
from drumline.parallel.rings.blocking import (
    BlockingCollective,
    gather_then_multiply,
    multiply_then_scatter,
)

MESH = jax.make_mesh((2, 4), ("X", "Y"), axis_types=(AxisType.Auto,) * 2)
ROWS = P("X", "Y", None)
FEATURES = P("X", None, "Y")


def _gathered(implementation: str, x: jax.Array, up: jax.Array, gate: jax.Array) -> Any:
    weights = (up, gate)
    if implementation == "ring":
        return allgather_matmul(x, weights, axis_name="Y", gathered="rows")
    return gather_then_multiply(BlockingCollective("Y", None), x, weights)


def _scattered(implementation: str, x: jax.Array, w: jax.Array) -> Any:
    if implementation == "ring":
        return matmul_reducescatter(x, w, axis_name="Y", scattered="rows")
    return multiply_then_scatter(BlockingCollective("Y", None), x, w)


CASES: dict[str, tuple[Any, tuple[P, ...], Any, tuple[tuple[int, ...], ...]]] = {
    "gather": (
        _gathered,
        (ROWS, P(None, "Y"), P(None, "Y")),
        (FEATURES, FEATURES),
        ((4, 8, 16), (16, 12), (16, 20)),
    ),
    "scatter": (_scattered, (FEATURES, P("Y")), ROWS, ((4, 8, 16), (16, 12))),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_those_of_the_ring(case: str) -> None:
    function, in_specs, out_specs, shapes = CASES[case]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def results(implementation: str) -> Any:
        mapped = jax.shard_map(
            partial(function, implementation), mesh=MESH, in_specs=in_specs, out_specs=out_specs
        )

        def value(*arrays: jax.Array) -> Any:
            outs = jax.tree.leaves(mapped(*arrays))
            return sum(jnp.sum(jnp.sin(out)) for out in outs), outs

        gradient = jax.jit(jax.grad(value, argnums=tuple(range(len(arrays))), has_aux=True))
        return gradient(*arrays)

    for blocking, ring in zip(
        jax.tree.leaves(results("xla")), jax.tree.leaves(results("ring")), strict=True
    ):
        np.testing.assert_allclose(blocking, ring, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("wire_dtype", "sent"), [(None, "f32"), (jnp.bfloat16, "bf16")])
def test_sums_are_sent_in_the_requested_type(wire_dtype: Any, sent: str) -> None:
    wire = None if wire_dtype is None else jnp.dtype(wire_dtype)
    mapped = jax.shard_map(
        partial(multiply_then_scatter, BlockingCollective("Y", wire)),
        mesh=MESH,
        in_specs=(FEATURES, P("Y")),
        out_specs=ROWS,
    )
    x = jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 12), jnp.bfloat16)
    lowered = jax.jit(mapped).lower(x, w).as_text()
    assert re.findall(r"reduce_scatter.*?-> tensor<[\dx]*(\w+)>", lowered, re.S) == [sent]
