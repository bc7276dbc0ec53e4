"""Unsupported arguments of the fused kernels are rejected while tracing, with a remedy."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from drumline.parallel import fused_allgather_matmul, fused_matmul_reducescatter
from tests.parallel.fused.emulated import GATHER, interpreter, operands, ring_mesh, sharded


def error_message(
    function: Callable[..., jax.Array],
    *shapes: tuple[int, ...],
    types: tuple[Any, Any] = (jnp.bfloat16, jnp.bfloat16),
    checked: bool = False,
    **options: Any,
) -> str:
    """Return the error message for operands of these shapes on each of four devices."""

    def local() -> jax.Array:
        arrays = (jnp.ones(shape, dtype) for shape, dtype in zip(shapes, types, strict=True))
        return function(*arrays, axis_name="Y", **options)

    run = jax.shard_map(local, mesh=ring_mesh(4), in_specs=(), out_specs=P("Y"), check_vma=checked)
    with pytest.raises(ValueError, match=r"\w+: ") as error_info:
        jax.eval_shape(run)
    return str(error_info.value)


def test_shapes_that_do_not_fill_tiles_are_rejected() -> None:
    for shapes, reason in (
        (((48, 128), (128, 128)), "the 48 rows of each device's share are not a multiple of 32"),
        (((32, 64), (64, 128)), "the 64 columns of x on each device are not a multiple of 128"),
        (((32, 128), (128, 192)), "the 192 columns of w on each device are not a multiple of 128"),
    ):
        text = error_message(fused_allgather_matmul, *shapes)
        assert text == (
            f"fused_allgather_matmul: {reason}, which the kernel's tiles take; pad them, or use "
            "the ring functions, which take any"
        )
    text = error_message(fused_matmul_reducescatter, (96, 128), (128, 128))
    assert "the 24 rows of each device's share are not a multiple of 32" in text


def test_rows_that_the_devices_do_not_divide_are_rejected() -> None:
    assert error_message(fused_matmul_reducescatter, (126, 128), (128, 128)) == (
        "fused_matmul_reducescatter: the 126 rows of x cannot be divided between the 4 devices "
        "of axis 'Y'"
    )


def test_unsupported_types_and_ranks_are_rejected() -> None:
    text = error_message(
        fused_allgather_matmul, (32, 128), (128, 128), types=(jnp.bfloat16, jnp.float32)
    )
    assert text == (
        "fused_allgather_matmul: x and w must both be float32 or both bfloat16, not bfloat16 and "
        "float32; cast them, or use the ring functions"
    )
    text = error_message(fused_allgather_matmul, (2, 32, 128), (128, 128))
    assert "x must be a matrix [rows, columns], but its shape is (2, 32, 128)" in text
    text = error_message(fused_matmul_reducescatter, (128, 128), (128, 128), wire_dtype=jnp.float16)
    assert text == (
        "fused_matmul_reducescatter: wire_dtype must be 'float32' or 'bfloat16', not 'float16'"
    )


def test_a_missing_tpu_is_an_error() -> None:
    text = error_message(fused_allgather_matmul, (32, 128), (128, 128))
    assert "there is no TPU here; emulate one with interpret=pltpu.InterpretParams()" in text


@pytest.mark.usefixtures("emulated_tpu")
def test_too_little_vmem_is_an_error() -> None:
    text = error_message(fused_allgather_matmul, (32, 128), (128, 128), vmem_bytes=1 << 20)
    assert "fit 1048576 bytes of VMEM on each of 2 cores; give it more with" in text


def test_emulation_under_a_checked_shard_map_is_rejected() -> None:
    text = error_message(
        fused_allgather_matmul,
        (32, 128),
        (128, 128),
        checked=True,
        interpret=pltpu.InterpretParams(),
    )
    assert "call jax.shard_map with check_vma=False" in text


def test_second_derivatives_and_forward_mode_are_rejected() -> None:
    x, w, _ = operands(GATHER, 2, jnp.float32)
    run = sharded(GATHER, ring_mesh(2), interpret=interpreter("eager"))

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(run(x, w)))

    with pytest.raises(ValueError, match="has a gradient but no second derivative; its backward"):
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))))(x)
    with pytest.raises(ValueError, match=r"has a gradient .* but no forward mode"):
        jax.jvp(loss, (x,), (x,))
