"""`einsum` agrees with `jnp.einsum`, on the ring that the shardings select."""

# mypy: allow-untyped-calls

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel.einsum.sharded import einsum, explain_einsum
from tests.cases import rare, sampled
from tests.parallel.einsum.products import (
    CASES,
    LENGTHS,
    SAMPLE,
    WIRINGS,
    Wiring,
    compiled_text,
    operands,
    relative_error,
)

# Each matmul on one of the three meshes. Each mesh has matmuls in both directions.
ON_ONE_MESH = [(name, list(WIRINGS)[index % 3]) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "wiring"), sampled(product(CASES, WIRINGS), ON_ONE_MESH))
def test_values_gradients_and_shardings_agree_with_jnp_einsum(name: str, wiring: str) -> None:
    case, wiring_of_mesh = CASES[name], WIRINGS[wiring]
    mesh = wiring_of_mesh.mesh()
    # Over the three meshes every matmul runs in both directions.
    index = list(CASES).index(name) + list(WIRINGS).index(wiring)
    direction: Any = ("both", "one")[index % 2]
    with jax.set_mesh(mesh):
        x, w, out = operands(case, wiring_of_mesh, mesh, seed=index)
        explanation = explain_einsum(case.spec, x, w, out_sharding=out, direction=direction)
        assert explanation.choice == case.choice
        assert case.reason in explanation.reason

        def with_gradients(x: jax.Array, w: jax.Array, g: jax.Array) -> list[jax.Array]:
            y, vjp_function = jax.vjp(
                lambda x, w: einsum(case.spec, x, w, out_sharding=out, direction=direction), x, w
            )
            return [y, *vjp_function(g)]

        plain = jax.eval_shape(lambda x, w: jnp.einsum(case.spec, x, w, out_sharding=out), x, w)
        g = np.random.default_rng(index).normal(size=plain.shape).astype(np.float32)
        y, dx, dw = jax.jit(with_gradients)(x, w, jax.device_put(g, out))

    assert (y.shape, y.dtype) == (plain.shape, plain.dtype)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, out), y.ndim)
    assert dx.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert dw.sharding.is_equivalent_to(w.sharding, w.ndim)
    x_labels, w_labels, y_labels = case.labels
    assert relative_error(y, case.spec, x, w) <= 1
    assert relative_error(dx, f"{y_labels},{w_labels}->{x_labels}", g, w) <= 1
    assert relative_error(dw, f"{y_labels},{x_labels}->{w_labels}", g, x) <= 1


@pytest.mark.parametrize("names", [SAMPLE, *rare((tuple(CASES),))])
def test_axes_shard_in_the_order_they_are_named(names: tuple[str, ...]) -> None:
    cases = [CASES[name] for name in names]
    wiring_of_mesh = Wiring((2, 2, 2), ("Z", "X", "Y"), "X", ("Y", "Z"))
    mesh = wiring_of_mesh.mesh()

    @jax.jit
    def run_all(inputs: list[tuple[jax.Array, jax.Array, jax.Array]]) -> list[list[jax.Array]]:
        results = []
        for case, (x, w, g) in zip(cases, inputs, strict=True):
            out = wiring_of_mesh.spec(case.out)
            y, vjp_function = jax.vjp(lambda x, w: einsum(case.spec, x, w, out_sharding=out), x, w)  # noqa: B023
            results.append([y, *vjp_function(g)])
        return results

    with jax.set_mesh(mesh):
        inputs = []
        for index, case in enumerate(cases):
            x, w, out = operands(case, wiring_of_mesh, mesh, seed=index)
            explanation = explain_einsum(case.spec, x, w, out_sharding=out)
            assert (explanation.choice, explanation.route and explanation.route.axes) == (
                case.choice,
                ("Y", "Z"),
            )
            lengths = [LENGTHS[n] for n in case.labels[2]]
            g = np.random.default_rng(index).normal(size=lengths).astype(np.float32)
            inputs.append((x, w, jax.device_put(g, NamedSharding(mesh, out))))
        for case, (x, w, g), (y, dx, dw) in zip(cases, inputs, run_all(inputs), strict=True):
            x_labels, w_labels, y_labels = case.labels
            assert relative_error(y, case.spec, x, w) <= 1
            assert relative_error(dx, f"{y_labels},{w_labels}->{x_labels}", g, w) <= 1
            assert relative_error(dw, f"{y_labels},{x_labels}->{w_labels}", g, x) <= 1


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_bfloat16_is_summed_in_float32_and_rounded_once(name: str) -> None:
    case, wiring_of_mesh = CASES[name], WIRINGS["2x4"]
    mesh = wiring_of_mesh.mesh()
    with jax.set_mesh(mesh):
        x, w, out = operands(case, wiring_of_mesh, mesh, jnp.bfloat16)
        y = jax.jit(lambda x, w: einsum(case.spec, x, w, out_sharding=out))(x, w)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, case.spec, x, w) <= 1


def test_a_local_einsum_does_not_communicate() -> None:
    mesh = jax.make_mesh((2, 4), ("X", "Y"))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 8, 16), np.float32), P("X"))
        w = jax.device_put(np.ones((16, 32), np.float32), P(None, "Y"))
        out = P("X", None, "Y")
        explanation = explain_einsum("...d,df->...f", x, w, out_sharding=out)
        assert (explanation.choice, explanation.bytes_per_axis) == ("local", {"X": 0, "Y": 0})

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return einsum("...d,df->...f", x, w, out_sharding=out)

        text = compiled_text(product, x, w)
        assert "collective" not in text
        assert "all-" not in text
        assert (jax.jit(product)(x, w) == 16).all()


def test_a_more_finely_sharded_result_needs_no_communication() -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))):
        x = jax.device_put(np.ones((8, 16), np.float32), P("X"))
        w = jax.device_put(np.ones((16, 32), np.float32), P())
        out = P(("X", "Y"))
        assert explain_einsum("bd,df->bf", x, w, out_sharding=out).choice == "local"
        result = einsum("bd,df->bf", x, w, out_sharding=out)
        assert jax.typeof(result).sharding.spec == P(("X", "Y"), None)


def test_axes_of_size_one_are_ignored() -> None:
    mesh = jax.make_mesh((1, 8, 1), ("Z", "Y", "W"))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 16), np.float32), P("Z", ("W", "Y")))
        w = jax.device_put(np.ones((16, 32), np.float32), P("Y", "W"))
        explanation = explain_einsum("bd,df->bf", x, w, out_sharding=P())
        assert (explanation.choice, explanation.route and explanation.route.axes) == (
            "matmul-allreduce",
            ("Y",),
        )
        y = einsum("bd,df->bf", x, w, out_sharding=P())
        assert (y == 16).all()
        local = jax.device_put(w, P("Z"))
        x = jax.device_put(x, P("Y", "W"))
        assert explain_einsum("bd,df->bf", x, local, out_sharding=P("Y")).choice == "local"


@pytest.mark.parametrize("name", ["gather rows", "scatter columns", "allreduce"])
def test_concrete_arrays_on_an_auto_mesh_have_shardings(name: str) -> None:
    case, wiring_of_mesh = CASES[name], WIRINGS["2x4"]
    explicit = wiring_of_mesh.mesh()
    mesh = Mesh(explicit.devices, explicit.axis_names)
    assert set(mesh.axis_types) == {AxisType.Auto}
    x, w, out = operands(case, wiring_of_mesh, mesh)
    assert explain_einsum(case.spec, x, w, out_sharding=out, mesh=mesh).choice == case.choice
    y = einsum(case.spec, x, w, out_sharding=out, mesh=mesh)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, out), y.ndim)
    assert relative_error(y, case.spec, x, w) <= 1


def test_traced_arrays_on_an_auto_mesh_use_the_given_shardings() -> None:
    case, wiring_of_mesh = CASES["scatter rows"], WIRINGS["2x4"]
    explicit = wiring_of_mesh.mesh()
    mesh = Mesh(explicit.devices, explicit.axis_names)
    x, w, out = operands(case, wiring_of_mesh, mesh)
    choices = []

    def product(x: jax.Array, w: jax.Array, **options: P) -> jax.Array:
        arguments: Any = {"out_sharding": out, "mesh": mesh, **options}
        explanation = explain_einsum(case.spec, x, w, **arguments)
        choices.append((explanation.choice, explanation.reason))
        return einsum(case.spec, x, w, **arguments)

    def with_shardings(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(
            x, w, x_sharding=wiring_of_mesh.spec(case.x), w_sharding=wiring_of_mesh.spec(case.w)
        )

    assert relative_error(jax.jit(with_shardings)(x, w), case.spec, x, w) <= 1
    unsharded = jax.jit(product)(x, w)
    assert relative_error(unsharded, case.spec, x, w) <= 1
    assert unsharded.sharding.is_equivalent_to(NamedSharding(mesh, out), 3)
    assert choices[0][0] == "matmul-scatter"
    assert choices[1] == ("jnp.einsum", "the sharding of x is not known here; pass x_sharding=")
    gradient = jax.jit(jax.grad(lambda x, w: with_shardings(x, w).sum(), argnums=1))(x, w)
    ones = np.ones([LENGTHS[n] for n in "bsd"])
    assert relative_error(gradient, "bsd,bsf->fd", ones, x) <= 1


def test_explicit_axes_are_known_from_the_array_alone() -> None:
    case, wiring_of_mesh = CASES["gather contraction"], WIRINGS["2x4"]
    x, w, out = operands(case, wiring_of_mesh, wiring_of_mesh.mesh())
    assert relative_error(einsum(case.spec, x, w, out_sharding=out), case.spec, x, w) <= 1
    with pytest.raises(ValueError, match=r"x_sharding is .*, but x has"):
        einsum(case.spec, x, w, out_sharding=out, x_sharding=P("Y"))


def test_the_error_without_a_mesh_lists_how_to_set_one() -> None:
    with pytest.raises(ValueError, match=r"set one with jax\.set_mesh, pass mesh="):
        einsum("bd,df->bf", jnp.ones((2, 2)), jnp.ones((2, 2)), out_sharding=P())


def test_equal_einsums_outside_jit_are_compiled_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case, wiring_of_mesh = CASES["allreduce"], WIRINGS["2x4"]
    x, w, out = operands(case, wiring_of_mesh, wiring_of_mesh.mesh())
    einsum(case.spec, x, w, out_sharding=out, loop="rolled")
    with jax.log_compiles():
        einsum(case.spec, x, w, out_sharding=out, loop="rolled")
        assert "Compiling" not in caplog.text
        einsum(case.spec, x, w, out_sharding=out, loop="unrolled")
        assert "Compiling" in caplog.text


def test_the_gradient_with_an_axis_of_size_one_in_one_operand() -> None:
    mesh = jax.make_mesh((1, 4), ("Z", "Y"))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        x = jax.device_put(rng.normal(size=(8, 16)).astype(np.float32), P("Z", "Y"))
        w = jax.device_put(rng.normal(size=(16, 4)).astype(np.float32), P("Y"))
        g = rng.normal(size=(8, 4)).astype(np.float32)

        def with_gradients(x: jax.Array, w: jax.Array) -> Any:
            y, vjp_function = jax.vjp(
                lambda x, w: einsum("bd,df->bf", x, w, out_sharding=P()), x, w
            )
            return y, *vjp_function(jax.device_put(g, P()))

        y, dx, dw = jax.jit(with_gradients)(x, w)
    a, b = np.asarray(x), np.asarray(w)
    for actual, exact in ((y, a @ b), (dx, g @ b.T), (dw, a.T @ g)):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_sharding": None}, r"einsum: out_sharding is None; give a PartitionSpec"),
        ({"out_sharding": "X"}, r"einsum: out_sharding is 'X'; give a PartitionSpec"),
        ({"out_sharding": P("Q")}, r"out_sharding names axis 'Q', but the mesh has 'X', 'Y'"),
        (
            {"out_sharding": P(), "x_sharding": P(None, ("Y", "Q"))},
            r"x_sharding names axis 'Q', but the mesh has 'X', 'Y'",
        ),
        ({"out_sharding": P("X", None, "Y")}, r"has 3 entries, but 'bf' of .* has 2 dimensions"),
    ],
)
def test_an_invalid_sharding_is_rejected(options: dict[str, Any], message: str) -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))):
        x = jax.device_put(np.ones((4, 8), np.float32), P("X", "Y"))
        w = jax.device_put(np.ones((8, 8), np.float32), P(None, "Y"))
        with pytest.raises(ValueError, match=message):
            einsum("bd,df->bf", x, w, **options)


def test_empty_rows_return_empty_rows() -> None:
    for name in ("gather contraction", "gather rows", "scatter columns", "allreduce"):
        case, wiring_of_mesh = CASES[name], WIRINGS["2x4"]
        with jax.set_mesh(wiring_of_mesh.mesh()):
            x, w, out = operands(case, wiring_of_mesh, wiring_of_mesh.mesh())
            empty_rows = jax.device_put(x[:0], x.sharding)
            y = jax.jit(lambda x, w: einsum(case.spec, x, w, out_sharding=out))(empty_rows, w)  # noqa: B023
        assert y.shape[0] == 0
