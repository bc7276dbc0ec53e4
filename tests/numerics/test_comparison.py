"""`compare` measures several implementations against a reference."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drumline.errors import UserError
from drumline.numerics import UnderJax, UnderTorch, compare, exact

A = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)


def narrow_matmul(a: Any, b: Any) -> Any:
    """Multiply with rounded operands."""
    rounded = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b)]
    return rounded[0] @ rounded[1]


def test_the_reference_is_the_first_function_in_float64() -> None:
    comparison = compare(
        {"JAX": UnderJax(jnp.matmul), "NumPy": np.matmul, "rounded": narrow_matmul}, A, B
    )
    errors = {row.implementation: row.errors for row in comparison.rows}
    expected = A.astype(np.float64) @ B.astype(np.float64)
    assert errors["JAX"].max_abs < 1e-5
    assert errors["NumPy"].max_abs == np.abs((A @ B).astype(np.float64) - expected).max()
    assert errors["rounded"].max_abs > 1e-3
    assert errors["rounded"].differ > 0.9
    assert all(row.dtype == "float32" for row in comparison.rows)


def test_precisions_and_compiler_options_are_settings_of_one_function() -> None:
    def shares(x: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        return (x * 1.01 + x).astype(jnp.float32).sum(-1)

    comparison = compare(
        {
            "default": UnderJax(shares),
            "highest": UnderJax(shares, "highest"),
            "strict": UnderJax(shares, options={"xla_allow_excess_precision": False}),
        },
        A,
        reference=lambda x: (x.astype(np.float64) * 2.01).sum(-1),
    )
    assert [row.implementation for row in comparison.rows] == ["default", "highest", "strict"]
    assert all(np.isfinite(row.errors.max_ulp) for row in comparison.rows)


def test_pytorch_functions_can_be_compared() -> None:
    torch = pytest.importorskip("torch")
    comparison = compare(
        {
            "JAX": UnderJax(lambda a, b: (a @ b, a.sum())),
            "PyTorch": UnderTorch(lambda a, b: (a @ b, a.sum()), "highest"),
            "PyTorch, bfloat16": UnderTorch(
                lambda a, b: ((a.bfloat16().float() @ b).bfloat16(), a.sum())
            ),
        },
        A,
        B,
    )
    assert [row.output for row in comparison.rows][:2] == ["[0]", "[1]"]
    assert comparison.rows[2].errors.max_abs < 1e-5
    assert comparison.rows[4].dtype == "bfloat16"
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_reference_can_use_mpmath() -> None:
    float64_inputs = [x.astype(np.float64) for x in (A, B)]
    comparison = compare({"NumPy": np.matmul}, *float64_inputs, reference=exact.matmul)
    (row,) = comparison.rows
    assert 0 < row.errors.max_ulp < 1000
    assert row.errors.expected == pytest.approx(row.errors.actual, rel=1e-9)


def test_the_comparison_as_table_plot_and_dictionary(tmp_path: Path) -> None:
    implementations = {
        "good": lambda x: {"a": x, "b": x * 2},
        "bad": lambda x: {"a": x + 1, "b": x * 2},
    }
    comparison = compare(implementations, A, reference=implementations["good"])
    lines = str(comparison).splitlines()
    assert lines[0].split()[:3] == ["IMPLEMENTATION", "OUTPUT", "DTYPE"]
    assert lines[3].split()[:3] == ["bad", "a", "float32"]
    rows = json.loads(json.dumps(comparison.to_dict()))["rows"]
    assert [row["max_abs"] > 0 for row in rows] == [False, False, True, False]
    comparison.plot(tmp_path / "errors.svg")
    svg = ElementTree.parse(tmp_path / "errors.svg").getroot()  # noqa: S314 - a file of this test
    assert "bad" in "".join(svg.itertext())


@pytest.mark.parametrize(
    ("fns", "message"),
    [
        ({}, "there is no function"),
        ({"one": lambda x: x, "two": lambda x: (x, x)}, r"two returns \[0\], \[1\]"),
        ({"one": lambda x: x, "two": lambda x: x[:1]}, "the result is"),
        ({"one": lambda _: {}}, "returns nothing"),
        (
            {"one": lambda x: x.astype(np.float32)},
            "one computes result in float32; pass a reference",
        ),
    ],
)
def test_functions_that_cannot_be_compared_are_a_user_error(fns: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(fns, A)


def test_a_plot_needs_a_writable_svg_file(tmp_path: Path) -> None:
    comparison = compare({"one": lambda x: x}, A)
    with pytest.raises(UserError, match=r"name it errors\.svg"):
        comparison.plot(tmp_path / "errors.png")
    with pytest.raises(UserError, match="cannot be written: No such file"):
        comparison.plot(tmp_path / "nowhere" / "errors.svg")


def test_complex_numbers_have_a_wider_reference() -> None:
    z = (5 * (A[0] + 1j * A[1])).astype(np.complex64)
    (row,) = compare({"exp": UnderJax(jnp.exp)}, z).rows
    assert row.errors.max_abs > 0
    assert row.errors.max_abs >= np.abs((np.exp(z) - np.exp(z.astype(complex))).real).max() / 100


def test_narrow_inputs_keep_their_type_in_pytorch() -> None:
    pytest.importorskip("torch")
    bfloat16_input = A.astype(ml_dtypes.bfloat16)
    (row,) = compare({"PyTorch": UnderTorch(lambda x: x + x)}, bfloat16_input).rows
    assert (row.dtype, row.errors.max_abs) == ("bfloat16", 0.0)
