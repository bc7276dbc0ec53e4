"""An estimate says which share of its time lies in kinds that were never measured on the chip."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from drumline.inspect import Estimate, estimate

shape = jax.ShapeDtypeStruct
FLOATS, HALVES = jnp.float32, jnp.bfloat16


def block(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return x + convolve(jax.nn.relu(convolve(x, first)), second)


def recurrent(xs: jax.Array, state: jax.Array, w: jax.Array) -> jax.Array:
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(x + state @ w)
        return state, state

    return lax.scan(step, state, xs)[1]


def embed(table: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.take(table, ids, axis=0) @ w)


def drop(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape), x, 0)


def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


WINDOW = shape((3, 3, 256, 256), HALVES)
IMAGES = shape((16, 56, 56, 256), HALVES)
MATRIX = shape((4096, 4096), FLOATS)
UNMEASURED: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("convolution", block, (IMAGES, WINDOW, WINDOW)),
    (
        "loop of small steps",
        recurrent,
        (shape((256, 64, 512), HALVES), shape((64, 512), HALVES), shape((512, 512), HALVES)),
    ),
    (
        "scatter",
        jax.grad(embed),
        (shape((32768, 1024), FLOATS), shape((8, 2048), jnp.int32), shape((1024, 1), FLOATS)),
    ),
    ("gather", lambda x, i: x[i], (MATRIX, shape((4096,), jnp.int32))),
    ("sort", lambda x: jnp.sort(x, axis=-1), (MATRIX,)),
    ("top-k", lambda x: lax.top_k(x, 8), (MATRIX,)),
    ("fft", jnp.fft.rfft, (MATRIX,)),
    ("rng", drop, (MATRIX, shape((2,), jnp.uint32))),
    ("window reduction", lambda x: lax.cummax(x, axis=1), (MATRIX,)),
]


def estimated(function: Any, *arguments: Any, on: str) -> Estimate:
    return estimate(function, *arguments, on=on, compiler="cpu")


@pytest.mark.parametrize("on", ["H200", "v6e-1"])
@pytest.mark.parametrize(
    ("kind", "function", "arguments"), UNMEASURED, ids=[kind for kind, *_ in UNMEASURED]
)
def test_a_kind_that_was_never_measured_is_named(
    kind: str, function: Any, arguments: tuple[Any, ...], on: str
) -> None:
    report = estimated(function, *arguments, on=on)
    assert next(iter(report.unmeasured)) == kind
    assert 0.2 < report.unmeasured_share <= 1.0
    chip = report.machine.chip.name
    line = f"% of this time is in kinds not measured on {chip}: {kind}"
    assert line in str(report).splitlines()[2]
    saved = report.to_dict()["unmeasured"]
    assert saved == {"share": report.unmeasured_share, "seconds": dict(report.unmeasured)}


@pytest.mark.parametrize("on", ["H200", "v6e-1"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (jnp.matmul, (MATRIX, MATRIX)),
        (jax.nn.softmax, (MATRIX,)),
        (jnp.transpose, (MATRIX,)),
        (layers, (shape((16384, 4096), HALVES), shape((16, 4096, 4096), HALVES))),
    ],
    ids=["matmul", "softmax", "transpose", "layers"],
)
def test_the_kinds_of_a_training_step_were_measured(
    function: Any, arguments: tuple[Any, ...], on: str
) -> None:
    report = estimated(function, *arguments, on=on)
    assert report.unmeasured_share == 0
    chip = report.machine.chip.name
    line = f"  all of this time is in kinds of operation measured on {chip}"
    assert str(report).splitlines()[2] == line


def test_a_call_of_a_library_is_named_by_its_kind() -> None:
    report = estimated(jnp.linalg.cholesky, MATRIX, on="H200")
    assert list(report.unmeasured) == ["factorization"]


def test_a_kind_that_was_measured_on_another_chip_is_named() -> None:
    report = estimated(jnp.matmul, MATRIX, MATRIX, on="v5litepod-1")
    assert report.unmeasured_share == pytest.approx(1.0)
    assert "100 % of this time is in kinds not measured on v5e: matmul" in str(report)
