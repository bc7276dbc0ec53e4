"""The survey of products tells in which type a device multiplies float32."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from drumline.numerics import matmul, narrow, survey_matmul
from drumline.numerics.implementations import UnderJax


class Device:
    """Multiplies with operands in a narrower type, as some do unless told otherwise."""

    def __init__(self, operands: Any) -> None:
        self._operands = operands

    def __call__(self, a: Any, b: Any) -> Any:
        return self._operands(a.astype(np.float64)) @ self._operands(b.astype(np.float64))

    def seconds(self, *_: Any) -> float:
        return 0.5


def on(monkeypatch: pytest.MonkeyPatch, operands: Any) -> Any:
    """The survey on a device whose default rounds operands like that."""
    monkeypatch.setattr(
        matmul,
        "implementations",
        lambda: {
            matmul.DEFAULT: Device(lambda x: operands(x).astype(np.float32)),
            matmul.HIGHEST: UnderJax(jnp.matmul, "highest"),
        },
    )
    return survey_matmul([16, 64], squares=[16])


@pytest.mark.parametrize(
    ("operands", "name"),
    [(narrow.tf32, "TF32"), (narrow.bfloat16, "bfloat16"), (lambda x: x, "float32")],
)
def test_the_default_is_known_by_its_results(
    operands: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on(monkeypatch, operands)
    assert found.default == name
    verdict = " ".join(found.verdict())
    assert f"multiplies float32 as {name}" in verdict
    assert ("jax_default_matmul_precision" in verdict) == (name != "float32")


def test_here_all_precisions_are_measured() -> None:
    found = survey_matmul([8, 32], 4, squares=[16])
    assert found.implementations()[:3] == ["JAX default", "JAX high", "JAX highest"]
    assert len(found.products) == 3 * len(found.implementations())
    assert all(product.seconds > 0 for product in found.products)
    assert found.of(matmul.THIN, matmul.HIGHEST)[-1].errors.max_abs < 1e-5
    assert set(found.chart().curves) == set(found.implementations())
    assert found.to_dict()["default"] == found.default


def test_tf32_keeps_eleven_bits_and_rounds_halves_away_from_zero() -> None:
    unit = 2.0**-10
    given = np.array([1 + unit / 2, -1 - unit / 2, 1 + unit / 4, 3e38, 0.0, np.inf, 1e-38])
    kept = narrow.tf32(given)
    np.testing.assert_array_equal(kept[:3], [1 + unit, -1 - unit, 1.0])
    assert kept[3] == pytest.approx(3e38, rel=unit)
    np.testing.assert_array_equal(kept[4:6], [0.0, np.inf])
