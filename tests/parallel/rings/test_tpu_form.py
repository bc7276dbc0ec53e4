"""The TPU form of the rings, on CPU devices: correct results, full shards in both directions, and
no operations that the TPU's compiler handles badly.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel import allgather_matmul, matmul_reducescatter
from drumline.parallel.rings.ring import LONGEST_UNROLLED_ON_TPU, Ring
from drumline.parallel.target import trace_for
from tests.cases import rare
from tests.parallel.rings.layouts import (
    BY_NAME,
    LAYOUTS,
    RING,
    abstract,
    expected,
    mesh_of,
    shape,
    sharded,
    spec,
)
from tests.parallel.rings.permutes import bytes_per_direction
from tests.parallel.rings.rounding import exact_input, relative_error

RINGS = [layout for layout in LAYOUTS if "feedforward" not in layout.name]


@pytest.mark.parametrize(
    ("size", "dtype", "loop"),
    [
        (2, "float32", "auto"),
        (3, "bfloat16", "auto"),
        *rare((4, "float32", "auto")),
        (4, "float32", "rolled"),
    ],
)
def test_results_and_gradients_are_as_exact_as_one_matmul(size: int, dtype: str, loop: str) -> None:
    mesh, other_axes = mesh_of((size,), 0)
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    rng = np.random.default_rng(size)
    inputs = [
        [
            rng.normal(size=shape(dimensions, 1, dims)).astype(jnp.dtype(dtype))
            for dimensions in (*layout.operands, layout.result)
        ]
        for layout in RINGS
    ]

    @jax.jit
    def run_all(inputs: Any) -> list[list[jax.Array]]:
        results = []
        for layout, (*operands, cotangent) in zip(RINGS, inputs, strict=True):
            out, vjp_function = jax.vjp(sharded(layout, mesh, other_axes, loop=loop), *operands)
            results.append([out, *vjp_function(cotangent)])
        return results

    with trace_for("tpu"):
        outputs = run_all(inputs)
    for layout, arrays, results in zip(RINGS, inputs, outputs, strict=True):
        *operands, cotangent = (exact_input(array, jnp.dtype(dtype)) for array in arrays)
        relative_errors = list(map(relative_error, results, expected(operands, cotangent)))
        assert max(relative_errors) <= 1, f"{layout.name} on {size}: {relative_errors}"


@pytest.mark.parametrize("size", [3, 4, 8])
def test_full_shards_travel_half_of_the_ring(size: int) -> None:
    mesh, other_axes = mesh_of((size,), 0)
    dims = {"b": 2, "s": 3 * size, "d": 5 * size, "f": 4 * size}
    shard = 2 * dims["b"] * dims["s"] * dims["d"] // size
    for name, itemsize in (("gather rows", 1), ("scatter rows", 2)):
        operands = [abstract(shape(d, 1, dims), jnp.bfloat16) for d in BY_NAME[name].operands]
        with trace_for("tpu"):
            lowered = jax.jit(sharded(BY_NAME[name], mesh, other_axes)).lower(*operands)
        assert bytes_per_direction(lowered, mesh, RING) == {
            1: size // 2 * shard * itemsize,
            -1: (size - 1) // 2 * shard * itemsize,
        }


def test_the_tpu_form_has_no_splits_concatenations_zeros_or_barriers() -> None:
    mesh, other_axes = mesh_of((4,), 0)
    dims = {"b": 2, "s": 24, "d": 32, "f": 64}
    for layout in RINGS:
        operands = [abstract(shape(d, 1, dims), jnp.bfloat16) for d in layout.operands]
        with trace_for("tpu"):
            text = jax.jit(sharded(layout, mesh, other_axes)).lower(*operands).as_text()
        operations = re.findall(r"stablehlo\.(\w+)", text)
        assert "while" not in operations
        assert "concatenate" not in operations
        # The last sum arrives while the last matmul runs, so it is added separately.
        assert operations.count("optimization_barrier") == (0 if "gather" in layout.name else 1)
        assert operations.count("dot_general") == 4


def test_a_long_ring_is_rolled_and_two_devices_have_one_lane() -> None:
    def ring(size: int) -> Ring:
        return Ring("Y", size, "both", "auto", None, target="tpu")

    assert not ring(LONGEST_UNROLLED_ON_TPU).rolled
    assert ring(LONGEST_UNROLLED_ON_TPU).full_shards
    assert ring(LONGEST_UNROLLED_ON_TPU + 1).rolled
    assert [lane.size for lane in ring(LONGEST_UNROLLED_ON_TPU + 1).lanes(10)] == [5, 5]
    assert [lane.size for lane in ring(2).lanes(10)] == [10]
    assert not ring(2).full_shards


def test_a_mesh_of_tpus_selects_the_tpu_form() -> None:
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh(
        (4,), ("Y",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    mapped = jax.shard_map(
        lambda x: allgather_matmul(x, jnp.ones((8, 8)), axis_name="Y", gathered="rows"),
        mesh=mesh,
        in_specs=spec("Y"),
        out_specs=spec(),
        check_vma=False,
    )
    jaxpr = str(jax.make_jaxpr(mapped)(abstract((16, 8), jnp.float32)))
    assert jaxpr.count("ppermute[") == 3  # unrolled; other devices have two, in a loop


@pytest.mark.parametrize(
    ("target", "gathered"),
    [
        ("tpu", "contraction"),
        ("other", "rows"),
        *rare(("tpu", "rows"), ("other", "contraction")),
    ],
)
def test_several_weights_share_one_gather(target: str, gathered: str) -> None:
    mesh, _ = mesh_of((4,), 0)
    rng = np.random.default_rng(0)
    x: Any = rng.normal(size=(16, 24)).astype(np.float32)
    weights: Any = [rng.normal(size=(24, n)).astype(np.float32) for n in (32, 8, 4)]
    cotangents = [rng.normal(size=(16, w.shape[1])).astype(np.float32) for w in weights]
    rows, columns = spec("Y", None), spec(None, "Y")

    def gather_all(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, ...]:
        return allgather_matmul(x, weights, axis_name="Y", gathered=gathered)  # type: ignore[call-overload,no-any-return]

    mapped = jax.shard_map(
        gather_all,
        mesh=mesh,
        in_specs=(columns if gathered == "contraction" else rows, [columns] * 3),
        out_specs=(columns,) * 3,
    )

    @jax.jit
    def run(
        x: jax.Array, weights: list[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, list[jax.Array]]]:
        outs, vjp_function = jax.vjp(mapped, x, weights)
        return outs, vjp_function(tuple(cotangents))

    with trace_for(target):  # type: ignore[arg-type]
        outs, (dx, dws) = run(x, weights)
        lowered = jax.jit(mapped).lower(x, weights)
    assert len(outs) == 3
    for out, w in zip(outs, weights, strict=True):
        np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-4)
    total = sum(g @ w.T for g, w in zip(cotangents, weights, strict=True))
    np.testing.assert_allclose(dx, total, rtol=1e-5, atol=1e-4)
    for dw, g in zip(dws, cotangents, strict=True):
        np.testing.assert_allclose(dw, x.T @ g, rtol=1e-5, atol=1e-4)
    # All weights share one transfer of x.
    assert sum(bytes_per_direction(lowered, mesh, RING).values()) == 3 * x.nbytes // 4


def test_sums_are_sent_in_the_wire_dtype() -> None:
    mesh, _ = mesh_of((4,), 0)
    rng = np.random.default_rng(0)
    x: Any = rng.normal(size=(16, 32)).astype(jnp.bfloat16)
    w: Any = rng.normal(size=(32, 24)).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    outputs, bytes_by_dtype = {}, {}
    for comm_dtype in (None, jnp.bfloat16):
        function = jax.shard_map(
            partial(matmul_reducescatter, axis_name="Y", scattered="rows", wire_dtype=comm_dtype),
            mesh=mesh,
            in_specs=(spec(None, "Y"), spec("Y", None)),
            out_specs=spec("Y", None),
        )
        compilable = jax.jit(function)
        lowered = compilable.lower(x, w)
        bytes_by_dtype[comm_dtype] = sum(bytes_per_direction(lowered, mesh, RING).values())
        outputs[comm_dtype] = np.asarray(compilable(x, w), np.float64)
    assert bytes_by_dtype[None] == 2 * bytes_by_dtype[jnp.bfloat16]
    scale = np.abs(x.astype(np.float32)) @ np.abs(w.astype(np.float32))
    assert np.max(np.abs(outputs[None] - exact) / scale) < 2**-8
    # The sum is rounded at each of three steps, to eight bits.
    assert np.max(np.abs(outputs[jnp.bfloat16] - exact) / scale) < 4 * 2**-8


@pytest.mark.parametrize("comm_dtype", ["int8", "nonsense"])
def test_a_wire_dtype_that_is_not_a_float_is_rejected(comm_dtype: str) -> None:
    mesh, _ = mesh_of((2,), 0)
    function = jax.shard_map(
        partial(matmul_reducescatter, axis_name="Y", wire_dtype=comm_dtype),
        mesh=mesh,
        in_specs=(spec(None, "Y"), spec("Y", None)),
        out_specs=spec(None, "Y"),
    )
    message = (
        "matmul_reducescatter: wire_dtype must be a floating-point type, as jnp.bfloat16, "
        f"not '{comm_dtype}'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        function(jnp.ones((2, 4)), jnp.ones((4, 2)))
