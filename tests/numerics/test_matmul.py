"""The survey of matmuls identifies the type in which a device multiplies float32."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from drumline.numerics import matmul, survey_matmul
from drumline.numerics.errors import round_to_bfloat16, round_to_tf32
from drumline.numerics.implementations import UnderJax


class NarrowMatmul:
    """A matmul that rounds its operands to a narrower type."""

    def __init__(self, round_operands: Any) -> None:
        self._round_operands = round_operands

    def __call__(self, a: Any, b: Any) -> Any:
        return self._round_operands(a.astype(np.float64)) @ self._round_operands(
            b.astype(np.float64)
        )

    def seconds(self, *_: Any) -> float:
        return 0.5


def survey_with(monkeypatch: pytest.MonkeyPatch, round_operands: Any) -> Any:
    """Return a survey of a device with this rounding of the operands."""
    monkeypatch.setattr(
        matmul,
        "matmul_implementations",
        lambda: {
            matmul.DEFAULT: NarrowMatmul(lambda x: round_operands(x).astype(np.float32)),
            matmul.HIGHEST: UnderJax(jnp.matmul, "highest"),
        },
    )
    return survey_matmul([16, 64], squares=[16])


@pytest.mark.parametrize(
    ("round_operands", "name"),
    [(round_to_tf32, "TF32"), (round_to_bfloat16, "bfloat16"), (lambda x: x, "float32")],
)
def test_the_default_type_is_identified_by_its_results(
    round_operands: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = survey_with(monkeypatch, round_operands)
    assert survey.default == name
    verdict = " ".join(survey.verdict())
    assert f"multiplies float32 as {name}" in verdict
    assert ("jax_default_matmul_precision" in verdict) == (name != "float32")


def test_all_precisions_are_measured() -> None:
    survey = survey_matmul([8, 32], 4, squares=[16])
    assert survey.implementations()[:3] == ["JAX default", "JAX high", "JAX highest"]
    assert len(survey.measurements) == 3 * len(survey.implementations())
    assert all(measurement.seconds > 0 for measurement in survey.measurements)
    assert survey.select(matmul.THIN, matmul.HIGHEST)[-1].errors.max_abs < 1e-5
    assert set(survey.chart().curves) == set(survey.implementations())
    assert survey.to_dict()["default"] == survey.default


def test_tf32_has_eleven_bits_and_rounds_ties_away_from_zero() -> None:
    unit = 2.0**-10
    x = np.array([1 + unit / 2, -1 - unit / 2, 1 + unit / 4, 3e38, 0.0, np.inf, 1e-38])
    rounded = round_to_tf32(x)
    np.testing.assert_array_equal(rounded[:3], [1 + unit, -1 - unit, 1.0])
    assert rounded[3] == pytest.approx(3e38, rel=unit)
    np.testing.assert_array_equal(rounded[4:6], [0.0, np.inf])
