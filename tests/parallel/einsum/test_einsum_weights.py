"""Several weights in one call, and explanations of slower or unknown rings."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import einsum, explain_einsum
from drumline.parallel.target import trace_for
from tests.parallel.rings.permutes import bytes_per_direction

SPEC = "bd,df->bf"


@pytest.fixture(name="mesh")
def mesh_of_four() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("Y",), devices=jax.devices()[:4])


def spec(*axes: str | None) -> Any:
    return P(*axes)  # type: ignore[no-untyped-call]


def random_array(mesh: jax.sharding.Mesh, sharding: Any, *dims: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=dims).astype(np.float32)
    sharded: jax.Array = jax.device_put(values, NamedSharding(mesh, sharding))
    return sharded


# The shardings of x, of the weights and of the result. Some widths are not divisible.
MOVEMENTS = {
    "x is gathered": (spec("Y", None), spec(None, "Y"), spec(None, "Y"), (24, 8)),
    "sums are scattered": (spec(None, "Y"), spec("Y", None), spec("Y", None), (24, 6)),
    "sums are whole": (spec(None, "Y"), spec("Y", None), spec(None, None), (24, 6)),
    "w is gathered": (spec("Y", None), spec(None, "Y"), spec("Y", None), (24, 8)),
}


@pytest.mark.parametrize("movement", MOVEMENTS)
def test_each_weight_has_a_result_and_the_bytes_are_explained(
    mesh: jax.sharding.Mesh, movement: str
) -> None:
    x_spec, w_spec, out, widths = MOVEMENTS[movement]
    x = random_array(mesh, x_spec, 12, 16)
    weights = [random_array(mesh, w_spec, 16, width, seed=width) for width in widths]
    outs = einsum(SPEC, x, weights, out_sharding=out)
    for result, w in zip(outs, weights, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
        np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(w), rtol=1e-5, atol=1e-5)
    lowered = jax.jit(lambda x, weights: einsum(SPEC, x, weights, out_sharding=out)).lower(
        x, weights
    )
    explanation = explain_einsum(SPEC, x, weights, out_sharding=out)
    assert explanation.bytes_per_axis == {
        "Y": max(bytes_per_direction(lowered, mesh, "Y").values())
    }


def test_several_weights_accept_everything_that_one_weight_accepts(mesh: jax.sharding.Mesh) -> None:
    x = random_array(mesh, spec(None, "Y"), 3, 8)
    weights = [random_array(mesh, spec("Y", None), 8, width) for width in (12, 6)]
    for order in (weights, weights[::-1]):
        for result, w in zip(einsum(SPEC, x, order, out_sharding=spec()), order, strict=True):
            np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(w), rtol=1e-5)


def test_weights_with_different_shardings_are_rejected(mesh: jax.sharding.Mesh) -> None:
    x = random_array(mesh, spec("Y", None), 8, 8)
    weights = [random_array(mesh, spec(None, "Y"), 8, 8), random_array(mesh, spec(), 8, 8)]
    with pytest.raises(ValueError, match="several in one call have to be sharded alike"):
        einsum(SPEC, x, weights, out_sharding=spec(None, "Y"))
    with pytest.raises(ValueError, match="w is an empty sequence"):
        einsum(SPEC, x, [], out_sharding=spec(None, "Y"))


def test_integers_have_no_wire_dtype(mesh: jax.sharding.Mesh) -> None:
    x = jax.device_put(jnp.full((16, 8), 1001), NamedSharding(mesh, spec(None, "Y")))
    w = jax.device_put(jnp.ones((8, 12), jnp.int32), NamedSharding(mesh, spec("Y", None)))
    with pytest.raises(ValueError, match=r"is for sums of floating-point products.*leave it out"):
        einsum(SPEC, x, w, out_sharding=spec("Y", None), wire_dtype=jnp.bfloat16)


def array_shape(
    mesh: jax.sharding.Mesh, sharding: Any, *dims: int, dtype: Any = jnp.bfloat16
) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(dims, dtype, sharding=NamedSharding(mesh, sharding))


def test_on_a_tpu_a_ring_must_pay(mesh: jax.sharding.Mesh) -> None:
    columns, rows = spec(None, "Y"), spec("Y", None)
    with trace_for("tpu"):
        small = [array_shape(mesh, rows, 64, 64), array_shape(mesh, columns, 64, 64)]
        explanation = explain_einsum(SPEC, *small, out_sharding=columns)
        assert explanation.choice == "jnp.einsum"
        assert "plain jit is expected to be faster" in explanation.reason
        large = [array_shape(mesh, rows, 8192, 4096), array_shape(mesh, columns, 4096, 14336)]
        explanation = explain_einsum(SPEC, *large, out_sharding=columns)
        assert explanation.choice == "gather-matmul"
        assert "the ring is expected to be faster" in explanation.reason
        # Full shards travel two steps in one direction and one in the other.
        assert explanation.bytes_per_axis == {"Y": 2 * 2048 * 4096 * 2}
    assert explain_einsum(SPEC, *small, out_sharding=columns).choice == "gather-matmul"


def test_on_a_tpu_sums_are_sent_in_the_result_type_if_float32_is_exposed(
    mesh: jax.sharding.Mesh,
) -> None:
    columns, rows = spec(None, "Y"), spec("Y", None)

    def explain(inner: int, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
        x = array_shape(mesh, columns, 8192, inner, dtype=dtype)
        w = array_shape(mesh, rows, inner, 4096, dtype=dtype)
        return explain_einsum(SPEC, x, w, out_sharding=rows, **options)

    with trace_for("tpu"):
        assert explain(14336).wire_dtype == jnp.bfloat16
        assert explain(2**18).wire_dtype is None  # matmuls long enough to hide any sum
        assert explain(14336, jnp.float32).wire_dtype in (None, jnp.float32)
        # An explicit float32 is not replaced. If its ring is slower, no ring is chosen.
        assert explain(14336, wire_dtype=jnp.float32).choice == "jnp.einsum"


def test_an_unknown_sharding_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((4,), ("Y",), (AxisType.Auto,), devices=jax.devices()[:4])
    x, w = np.ones((8, 8), np.float32), np.ones((8, 12), np.float32)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, "drumline.parallel"):
        for _ in range(2):
            jax.jit(lambda x, w: einsum("xy,yz->xz", x, w, out_sharding=spec(None, "Y")))(x, w)
    (record,) = caplog.records
    assert "'xy,yz->xz' is computed by XLA, without a ring" in record.message
    assert "pass x_sharding=" in record.message
