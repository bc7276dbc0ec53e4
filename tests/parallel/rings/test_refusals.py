"""Operands that do not fit the ring are rejected while tracing, with their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from drumline.parallel import (
    allgather_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)
from tests.parallel.rings.layouts import mesh_of, spec

NO_FORWARD_MODE = "has a gradient .* but no forward mode"


def error_message(
    function: Callable[..., jax.Array],
    *shapes: tuple[int, ...],
    **options: Any,
) -> str:
    """Return the error message for operands of these shapes on each of three devices."""
    mesh, _ = mesh_of((3,), 0)

    def local() -> jax.Array:
        return function(*(jnp.ones(shape) for shape in shapes), axis_name="Y", **options)

    with pytest.raises(ValueError, match=r"\w+: ") as error_info:
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=spec("Y")))
    return str(error_info.value)


def test_gathered_columns_must_match_the_rows_of_w() -> None:
    assert error_message(allgather_matmul, (2, 4), (10, 6)) == (
        "allgather_matmul: w has 10 rows, but x brings 4 columns on each of the 3 devices "
        "of axis 'Y' (12 in all)"
    )


def test_columns_must_match_the_rows_of_w() -> None:
    for function, options in (
        (allgather_matmul, {"gathered": "rows"}),
        (matmul_reducescatter, {}),
        (matmul_allreduce, {}),
    ):
        name = function.__name__
        text = error_message(function, (3, 4), (5, 6), **options)
        assert text == f"{name}: x has 4 columns on each device, but w has 5 rows"


def test_the_devices_must_divide_columns_or_rows() -> None:
    assert error_message(matmul_reducescatter, (2, 4), (4, 10)) == (
        "matmul_reducescatter: the 10 columns of w cannot be divided between the 3 devices "
        "of axis 'Y'"
    )
    assert error_message(matmul_reducescatter, (7, 4), (4, 10), scattered="rows") == (
        "matmul_reducescatter: the 7 rows of x cannot be divided between the 3 devices of axis 'Y'"
    )
    assert error_message(matmul_allreduce, (7, 4), (4, 10)) == (
        "matmul_allreduce: neither the 7 rows of x nor the 10 columns of w can be divided "
        "between the 3 devices of axis 'Y'"
    )


def test_operands_of_the_wrong_rank_are_rejected() -> None:
    assert error_message(allgather_matmul, (2, 4), (12, 2, 3)) == (
        "allgather_matmul: w must be a matrix [rows, columns], but its shape is (12, 2, 3)"
    )
    assert error_message(allgather_matmul, (4,), (4, 6), gathered="rows") == (
        "allgather_matmul: gathered='rows' needs x as [..., rows, columns], not (4,)"
    )


def test_unknown_options_are_rejected() -> None:
    assert error_message(allgather_matmul, (2, 4), (12, 6), direction="left") == (
        "allgather_matmul: direction must be 'both' or 'one', not 'left'"
    )
    assert error_message(allgather_matmul, (2, 4), (12, 6), gathered="columns") == (
        "allgather_matmul: gathered must be 'contraction' or 'rows', not 'columns'"
    )
    assert error_message(matmul_reducescatter, (2, 4), (4, 6), scattered="all") == (
        "matmul_reducescatter: scattered must be 'columns' or 'rows', not 'all'"
    )
    assert error_message(matmul_allreduce, (2, 4), (4, 6), loop="fast") == (
        "matmul_allreduce: loop must be 'auto' or 'unrolled' or 'rolled', not 'fast'"
    )
    sharded = (2, 4), (12, 6), (6, 12)
    assert error_message(feedforward, *sharded, activation=jnp.tanh, layout="both") == (
        "feedforward: layout must be 'columns' or 'rows', not 'both'"
    )


def test_missing_axes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"there is no mesh axis 'Y' outside jax\.shard_map"):
        allgather_matmul(jnp.ones((2, 4)), jnp.ones((4, 6)), axis_name="Y")
    for axis, expected_message in (
        ("Q", "axis 'Q' is not manual here, but 'Y'; name one of these"),
        (("Y", "Y"), r"axis_name \('Y', 'Y'\) has 'Y' twice"),
    ):
        mesh, _ = mesh_of((2,), 0)

        def local(axis: Any = axis) -> jax.Array:
            return matmul_allreduce(jnp.ones((2, 4)), jnp.ones((4, 6)), axis_name=axis)

        with pytest.raises(ValueError, match=expected_message):
            jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=spec()))


@pytest.mark.parametrize("function", [allgather_matmul, matmul_reducescatter, matmul_allreduce])
def test_an_operand_sharded_over_an_explicit_axis_is_rejected(function: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("X", "Y"))
    rows, columns = (8, 16), (16, 8)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(rows), spec("X", "Y"))
        weights = spec(None, "Y") if function is allgather_matmul else spec("Y")
        w = jax.device_put(jnp.ones(columns), weights)
        run = jax.shard_map(
            lambda x, w: function(x, w, axis_name="Y"),
            axis_names={"Y"},
            in_specs=(spec(None, "Y"), weights),
            out_specs=spec() if function is matmul_allreduce else spec(None, "Y"),
        )
        with pytest.raises(ValueError, match="x is divided over 'X', an Explicit axis"):
            jax.eval_shape(run, x, w)


def forward_mode_calls(function: Any) -> list[Callable[..., Any]]:
    """Return two functions of (x, w) that differentiate a ring of two devices in forward mode."""
    mesh, _ = mesh_of((2,), 0)
    weights = spec(None, "Y") if function is allgather_matmul else spec("Y")
    run = jax.shard_map(
        lambda x, w: function(x, w, axis_name="Y"),
        mesh=mesh,
        in_specs=(spec(None, "Y"), weights),
        out_specs=spec() if function is matmul_allreduce else spec(None, "Y"),
    )
    return [
        lambda x, w: jax.jvp(run, (x, w), (x, w)),
        lambda x, w: jax.linearize(run, x, w)[1](x, w),
    ]


@pytest.mark.parametrize("function", [allgather_matmul, matmul_reducescatter, matmul_allreduce])
def test_forward_mode_is_rejected(function: Any) -> None:
    for call in forward_mode_calls(function):
        with pytest.raises(ValueError, match=f"{function.__name__}: {NO_FORWARD_MODE}"):
            jax.jit(call).lower(jnp.ones((2, 4)), jnp.ones((4, 6)))


# Outside of jit each operation is a program of its own, of which there are a hundred. One function
# represents all, because the same line raises the error.
@pytest.mark.every_case
def test_forward_mode_is_rejected_outside_of_jit() -> None:
    for call in forward_mode_calls(allgather_matmul):
        with pytest.raises(ValueError, match=f"allgather_matmul: {NO_FORWARD_MODE}"):
            call(jnp.ones((2, 4)), jnp.ones((4, 6)))
