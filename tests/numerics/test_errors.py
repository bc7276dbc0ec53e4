"""Error statistics agree with mpmath for difficult numbers."""

# mypy: allow-untyped-calls

import math
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import UserError
from drumline.numerics import exact
from drumline.numerics.errors import error_statistics, round_to, ulp_size

BITS = 5000
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
DIFFICULT = [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1e-45, 2.0**-126, 2.0**-24, 65504.0, 65520.0]
DIFFICULT += [3.4028235e38, 3.4028236e38, 1.7976931348623157e308, -1.7976931348623157e308, 1 / 3]
numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(DIFFICULT))
any_number = st.one_of(st.floats(), st.sampled_from([*DIFFICULT, math.inf, -math.inf, math.nan]))
type_strategy = st.sampled_from(TYPES)


def exact_error(actual: float, expected: Any, kind: Any) -> tuple[float, float]:
    """Return the error of a number, absolute and in ulps, by the definition and without
    rounding."""
    info = ml_dtypes.finfo(kind)
    with mpmath.workprec(BITS):
        unit = mpmath.ldexp(1, int(info.minexp) - int(info.nmant))
        size, largest_power = abs(mpmath.mpf(expected)), mpmath.ldexp(1, int(info.maxexp) - 1)
        while unit * mpmath.ldexp(1, int(info.nmant) + 1) <= min(size, largest_power):
            unit *= 2
        error = abs(mpmath.mpf(actual) - mpmath.mpf(expected))
        return float(error), float(error / unit)


def as_kind(value: float, kind: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(kind)


@settings(deadline=None, max_examples=400)
@given(actual=numbers, expected=numbers, kind=type_strategy)
def test_errors_agree_with_mpmath(actual: float, expected: float, kind: Any) -> None:
    rounded_actual = as_kind(actual, kind)
    if not np.isfinite(rounded_actual.astype(np.float64)):
        return
    statistics = error_statistics(rounded_actual[None], np.array([expected]))
    distance, ulps = exact_error(float(rounded_actual), expected, kind)
    if statistics.misplaced:  # the type's only neighbour of the true value is infinity
        assert abs(expected) > float(ml_dtypes.finfo(kind).max)
        assert statistics.max_abs == math.inf
        return
    assert statistics.max_abs == pytest.approx(distance, rel=1e-12, abs=5e-324)
    assert statistics.max_ulp == pytest.approx(ulps, rel=1e-12, abs=5e-324)
    assert statistics.rms_abs == pytest.approx(statistics.max_abs, rel=1e-12)


@settings(deadline=None, max_examples=400)
@given(expected=numbers, kind=type_strategy)
def test_rounding_returns_the_nearest_number(expected: float, kind: Any) -> None:
    rounded = float(round_to(expected, kind))
    info = ml_dtypes.finfo(kind)
    if not math.isfinite(rounded):
        assert abs(expected) > float(info.max)
        return
    with mpmath.workprec(BITS):
        rounding_error = abs(mpmath.mpf(rounded) - mpmath.mpf(expected))
        assert rounding_error <= mpmath.mpf(float(ulp_size(expected, kind))) / 2
    assert float(as_kind(rounded, kind)) == rounded, "the result is a number of the type"


@settings(deadline=None, max_examples=200)
@given(values=st.lists(st.tuples(any_number, numbers), min_size=1, max_size=8), kind=type_strategy)
def test_float64_and_mpmath_as_references_agree(
    values: list[tuple[float, float]], kind: Any
) -> None:
    actual = np.array([as_kind(value, kind) for value, _ in values])
    expected = np.array([value for _, value in values])
    exact_values = np.empty(len(values), object)
    exact_values[:] = [mpmath.mpf(value) for value in expected]
    float64_statistics, mpmath_statistics = (
        error_statistics(actual, expected),
        error_statistics(actual, exact_values),
    )
    assert float64_statistics.misplaced == mpmath_statistics.misplaced
    assert float64_statistics.differ == mpmath_statistics.differ
    for name in ("max_abs", "rms_abs", "max_ulp", "rms_ulp"):
        mine, reference = getattr(float64_statistics, name), getattr(mpmath_statistics, name)
        assert mine == pytest.approx(reference, rel=1e-9, abs=5e-324)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-1e200, 1e200, allow_subnormal=True), min_size=2, max_size=12),
    st.floats(1e-300, 1e300),
)
def test_cancellation_is_measured_against_the_exact_sum(values: list[float], large: float) -> None:
    """A float64 reference of the sum would lose all digits."""
    numbers = np.array([large, *values, -large])
    actual = np.array(numbers.sum())
    if not np.isfinite(actual):
        return
    statistics = error_statistics(actual, exact.total(numbers))
    with mpmath.workprec(BITS):
        expected = mpmath.fsum(mpmath.mpf(float(x)) for x in numbers)
        assert statistics.max_abs == pytest.approx(
            float(abs(float(actual) - expected)), rel=1e-12, abs=5e-324
        )


def test_a_lost_sum_is_an_error() -> None:
    numbers = np.array([1e16, 1.0, -1e16])
    statistics = error_statistics(np.array(numbers.sum()), exact.total(numbers))
    assert (statistics.max_abs, statistics.expected, statistics.actual) == (1.0, 1.0, 0.0)
    assert statistics.differ == 1.0


def test_misplaced_elements_are_counted() -> None:
    actual = np.array([math.nan, math.inf, -math.inf, 1.0, math.nan, math.inf], np.float32)
    expected = np.array([math.nan, math.inf, math.inf, math.nan, 1.0, 1e39])
    statistics = error_statistics(actual, expected)
    assert statistics.misplaced == 3, "-inf for inf, a number for NaN, NaN for a number"
    assert statistics.max_abs == statistics.rms_abs == statistics.max_ulp == math.inf
    assert statistics.differ == 0.5
    assert statistics.worst is not None
    assert statistics.worst[0] in (2, 3, 4)


def test_an_exact_result_has_no_error() -> None:
    for kind in TYPES:
        values = np.random.default_rng(0).standard_normal(100).astype(kind)
        statistics = error_statistics(values, values.astype(np.float64))
        assert (
            statistics.max_abs,
            statistics.max_ulp,
            statistics.differ,
            statistics.misplaced,
        ) == (0, 0, 0, 0)


def test_the_neighbour_is_one_ulp_away() -> None:
    for kind in (np.float16, np.float32, np.float64):
        ones = np.array([1.0, 1.5, 2.0**-10, 0.0, 60000.0], kind)
        statistics = error_statistics(np.nextafter(ones, kind(np.inf)), ones.astype(np.float64))
        assert statistics.max_ulp == 1.0
        assert statistics.rms_ulp == 1.0
        assert statistics.differ == 1.0


def test_bfloat16_is_not_rounded_twice() -> None:
    """The number is above the middle of two bfloat16 numbers by less than a float32 ulp."""
    expected = 1 + 2.0**-8 + 2.0**-40
    assert float(round_to(expected, ml_dtypes.bfloat16)) == 1 + 2.0**-7


def test_integers_have_ulps_of_1_and_complex_numbers_have_parts() -> None:
    assert error_statistics(np.array([3, 5]), np.array([3.0, 7.0])).max_ulp == 2.0
    large_integers = error_statistics(np.array([2**62 + 1]), np.array([2**62]))
    assert (large_integers.max_abs, large_integers.differ) == (1.0, 1.0), (
        "float64 cannot represent them"
    )
    actual = np.array([1 + 1j], np.complex64)
    assert error_statistics(actual, np.array([1 + 2j])).max_abs == 1.0


def test_exact_matmuls_have_no_rounding() -> None:
    random_source = np.random.default_rng(1)
    a = random_source.standard_normal((3, 5)) * 10.0 ** random_source.integers(-150, 150, (3, 5))
    b = random_source.standard_normal((5, 2)) * 10.0 ** random_source.integers(-150, 150, (5, 2))
    expected = exact.matmul(a, b)
    with mpmath.workprec(BITS):
        for i, j in np.ndindex(3, 2):
            exact_sum = mpmath.fsum(
                mpmath.mpf(x) * mpmath.mpf(y) for x, y in zip(a[i], b[:, j], strict=True)
            )
            assert expected[i, j] == exact_sum
    assert error_statistics(a @ b, expected).misplaced == 0


def test_softmax_to_many_bits() -> None:
    x = np.array([[0.0, 1.0, -1000.0], [700.0, 700.0, 0.0]])
    expected = exact.softmax(x)
    shares = np.exp(x - x.max(-1, keepdims=True))
    statistics = error_statistics(shares / shares.sum(-1, keepdims=True), expected)
    assert statistics.max_ulp < 4


def test_other_shapes_and_types_are_rejected() -> None:
    with pytest.raises(UserError, match=r"\(2,\) and the reference \(3,\)"):
        error_statistics(np.zeros(2), np.zeros(3))
    with pytest.raises(UserError, match="the reference is complex128"):
        error_statistics(np.zeros(2), np.zeros(2, complex))
    with pytest.raises(UserError, match="float8_e4m3fn"):
        error_statistics(np.zeros(2, ml_dtypes.float8_e4m3fn), np.zeros(2))


def test_empty_arrays_have_no_error() -> None:
    statistics = error_statistics(np.zeros((0, 3), np.float32), np.zeros((0, 3)))
    assert (statistics.count, statistics.max_abs, statistics.worst) == (0, 0.0, None)
