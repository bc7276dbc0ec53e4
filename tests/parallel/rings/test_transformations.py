"""The functions under JAX's transformations, in both loop forms, and with other operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel import allgather_matmul, matmul_allreduce, matmul_reducescatter
from tests.cases import rare
from tests.parallel.rings.layouts import (
    LAYOUTS,
    Layout,
    expected,
    mesh_of,
    shape,
    sharded,
    spec,
)
from tests.parallel.rings.rounding import exact_input, relative_error

Ring = Callable[..., jax.Array]

MESH, OTHER_AXES = mesh_of((2, 4), 1)
DIMS = {"b": 2, "s": 12, "d": 20, "f": 16}
SINGLE = [layout for layout in LAYOUTS if "feedforward" not in layout.name]  # single matmuls only


def random_array(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands_of(layout: Layout) -> list[Any]:
    dimensions = (*layout.operands, layout.result)
    return [random_array(*shape(d, 2, DIMS), seed=i) for i, d in enumerate(dimensions)]


def check(layouts: Sequence[Layout], functions: Sequence[Ring]) -> None:
    """Compare values and gradients of all functions, compiled together, with float64."""

    def run_all(inputs: Any) -> list[list[jax.Array]]:
        results = []
        for function, (*operands, cotangent) in zip(functions, inputs, strict=True):
            out, vjp_function = jax.vjp(function, *operands)
            results.append([out, *vjp_function(cotangent)])
        return results

    inputs = [operands_of(layout) for layout in layouts]
    results = jax.jit(run_all)(inputs)
    for layout, arrays, result in zip(layouts, inputs, results, strict=True):
        *operands, cotangent = (exact_input(array, jnp.dtype(jnp.float32)) for array in arrays)
        relative_errors = list(map(relative_error, result, expected(operands, cotangent)))
        assert max(relative_errors) <= 1, f"{layout.name}: {relative_errors}"


# test_accuracy.py runs both forms on rings of other sizes.
@pytest.mark.parametrize("loop", rare("unrolled", "rolled"))
def test_both_loop_forms_compute_the_same(loop: str) -> None:
    check(LAYOUTS, [sharded(layout, MESH, OTHER_AXES, loop=loop) for layout in LAYOUTS])


def test_gradients_are_the_same_without_checked_types() -> None:
    check(SINGLE, [sharded(layout, MESH, OTHER_AXES, check_vma=False) for layout in SINGLE])


def test_checkpoint_and_an_inner_jit_change_nothing() -> None:
    functions = [sharded(layout, MESH, OTHER_AXES, direction="one") for layout in SINGLE]
    check(SINGLE, [jax.checkpoint(jax.jit(function)) for function in functions])


def test_vmap_over_a_leading_dimension_is_a_longer_batch() -> None:
    def mapped(layout: Layout) -> Ring:
        def local(*arrays: jax.Array) -> jax.Array:
            x, *weights = (array[0] for array in arrays)
            batched: Ring = jax.vmap(lambda rows: layout.function(rows, *weights, axis_name="Y"))
            return batched(x)[None]

        in_specs, out_specs = layout.specs(OTHER_AXES)
        return jax.shard_map(local, mesh=MESH, in_specs=in_specs, out_specs=out_specs)

    check(SINGLE, [mapped(layout) for layout in SINGLE])


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_shared_by_another_axis_get_the_sum_of_its_gradients(check_vma: bool) -> None:
    x, w, v = random_array(8, 12), random_array(12, 16, seed=1), random_array(16, 12, seed=2)

    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        def local(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            hidden = jnp.tanh(allgather_matmul(x, w, axis_name="Y"))
            return matmul_allreduce(hidden, v, axis_name="Y")

        specs = spec("X", "Y"), spec(None, "Y"), spec("Y", None)
        run = jax.shard_map(
            local, mesh=MESH, in_specs=specs, out_specs=spec("X", None), check_vma=check_vma
        )
        return jnp.sum(jnp.sin(run(x, w, v)))

    def plain(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ v))

    gradients, references = (
        jax.jit(jax.grad(function, argnums=(0, 1, 2)))(x, w, v) for function in (loss, plain)
    )
    for gradient, reference in zip(gradients, references, strict=True):
        np.testing.assert_allclose(gradient, reference, atol=3e-5)


def test_gradients_of_gradients() -> None:
    x, w = random_array(8, 12), random_array(12, 16, seed=1)

    def rings(x: jax.Array, w: jax.Array) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            hidden = allgather_matmul(x, w, axis_name="Y")
            return matmul_reducescatter(hidden, w.T, axis_name="Y", scattered="rows")

        specs = spec("X", "Y"), spec(None, "Y")
        return jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=spec(("X", "Y"), None))(
            x, w
        )

    def gradient_of_penalty(function: Ring) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def penalty(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(function(x, w))))(x) ** 2)

        return jax.grad(penalty, argnums=1)

    gradient = jax.jit(gradient_of_penalty(rings))(x, w)
    reference = jax.jit(gradient_of_penalty(lambda x, w: (x @ w) @ w.T))(x, w)
    np.testing.assert_allclose(gradient, reference, atol=1e-5 * float(jnp.abs(reference).max()))


def test_integers_are_summed_exactly() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-100, 100, size=(8, 64)).astype(np.int8)
    w = rng.integers(-100, 100, size=(64, 16)).astype(np.int8)
    exact = x.astype(np.int64) @ w.astype(np.int64)
    gather = spec("X", "Y"), spec(None, "Y"), spec("X", "Y")
    reduce = spec("X", "Y"), spec("Y", None), spec("X", None)
    for function, (x_spec, w_spec, out) in (
        (allgather_matmul, gather),
        (matmul_reducescatter, (*reduce[:2], spec("X", "Y"))),
        (matmul_allreduce, reduce),
    ):
        run = jax.jit(
            jax.shard_map(
                lambda x, w, function=function: function(x, w, axis_name="Y"),
                mesh=MESH,
                in_specs=(x_spec, w_spec),
                out_specs=out,
            )
        )
        wide_result = run(x.astype(np.int32), w.astype(np.int32))
        np.testing.assert_array_equal(wide_result, exact)
        assert wide_result.dtype == jnp.int32
        np.testing.assert_array_equal(run(x, w), exact.astype(np.int8))


def test_a_ring_over_two_axes_of_the_mesh() -> None:
    x, w = random_array(4, 16), random_array(16, 24, seed=1)
    run = jax.shard_map(
        lambda x, w: allgather_matmul(x, w, axis_name=("X", "Y")),
        mesh=MESH,
        in_specs=(spec(None, ("X", "Y")), spec(None, ("X", "Y"))),
        out_specs=spec(None, ("X", "Y")),
    )
    np.testing.assert_allclose(jax.jit(run)(x, w), x @ w, atol=1e-5)


def test_mixed_types_promote_like_matmul() -> None:
    x, w = random_array(8, 16).astype(jnp.bfloat16), random_array(16, 24, seed=1)
    run = jax.shard_map(
        lambda x, w: allgather_matmul(x, w, axis_name="Y"),
        mesh=MESH,
        in_specs=(spec("X", "Y"), spec(None, "Y")),
        out_specs=spec("X", "Y"),
    )
    out, vjp_function = jax.vjp(jax.jit(run), x, w)
    dx, dw = vjp_function(out)
    np.testing.assert_allclose(out, x @ w, atol=1e-5)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
