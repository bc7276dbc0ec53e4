"""Error statistics against mpmath, with difficult numbers."""

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
KINDS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
HUGE = [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1e-45, 2.0**-126, 2.0**-24, 65504.0, 65520.0]
HUGE += [3.4028235e38, 3.4028236e38, 1.7976931348623157e308, -1.7976931348623157e308, 1 / 3]
numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(HUGE))
anything = st.one_of(st.floats(), st.sampled_from([*HUGE, math.inf, -math.inf, math.nan]))
kinds = st.sampled_from(KINDS)


def exact_error(got: float, true: Any, kind: Any) -> tuple[float, float]:
    """Return the error of a number, absolute and in ulps, by the definition and without
    rounding."""
    info = ml_dtypes.finfo(kind)
    with mpmath.workprec(BITS):
        unit = mpmath.ldexp(1, int(info.minexp) - int(info.nmant))
        size, most = abs(mpmath.mpf(true)), mpmath.ldexp(1, int(info.maxexp) - 1)
        while unit * mpmath.ldexp(1, int(info.nmant) + 1) <= min(size, most):
            unit *= 2
        error = abs(mpmath.mpf(got) - mpmath.mpf(true))
        return float(error), float(error / unit)


def as_kind(value: float, kind: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(kind)


@settings(deadline=None, max_examples=400)
@given(got=numbers, true=numbers, kind=kinds)
def test_errors_agree_with_mpmath(got: float, true: float, kind: Any) -> None:
    here = as_kind(got, kind)
    if not np.isfinite(here.astype(np.float64)):
        return
    statistics = error_statistics(here[None], np.array([true]))
    distance, units = exact_error(float(here), true, kind)
    if statistics.misplaced:  # the true value has no neighbour in this type but infinity
        assert abs(true) > float(ml_dtypes.finfo(kind).max)
        assert statistics.max_abs == math.inf
        return
    assert statistics.max_abs == pytest.approx(distance, rel=1e-12, abs=5e-324)
    assert statistics.max_ulp == pytest.approx(units, rel=1e-12, abs=5e-324)
    assert statistics.rms_abs == pytest.approx(statistics.max_abs, rel=1e-12)


@settings(deadline=None, max_examples=400)
@given(true=numbers, kind=kinds)
def test_rounding_returns_the_nearest_number(true: float, kind: Any) -> None:
    rounded = float(round_to(true, kind))
    info = ml_dtypes.finfo(kind)
    if not math.isfinite(rounded):
        assert abs(true) > float(info.max)
        return
    with mpmath.workprec(BITS):
        off = abs(mpmath.mpf(rounded) - mpmath.mpf(true))
        assert off <= mpmath.mpf(float(ulp_size(true, kind))) / 2
    assert float(as_kind(rounded, kind)) == rounded, "it is a number of that type"


@settings(deadline=None, max_examples=200)
@given(values=st.lists(st.tuples(anything, numbers), min_size=1, max_size=8), kind=kinds)
def test_float64_and_mpmath_as_references_agree(
    values: list[tuple[float, float]], kind: Any
) -> None:
    got = np.array([as_kind(value, kind) for value, _ in values])
    true = np.array([value for _, value in values])
    wide = np.empty(len(values), object)
    wide[:] = [mpmath.mpf(value) for value in true]
    one, other = error_statistics(got, true), error_statistics(got, wide)
    assert one.misplaced == other.misplaced
    assert one.differ == other.differ
    for name in ("max_abs", "rms_abs", "max_ulp", "rms_ulp"):
        mine, reference = getattr(one, name), getattr(other, name)
        assert mine == pytest.approx(reference, rel=1e-9, abs=5e-324)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-1e200, 1e200, allow_subnormal=True), min_size=2, max_size=12),
    st.floats(1e-300, 1e300),
)
def test_cancellation_is_measured_against_the_exact_sum(values: list[float], big: float) -> None:
    """A float64 reference of the sum would lose all digits."""
    numbers = np.array([big, *values, -big])
    got = np.array(numbers.sum())
    if not np.isfinite(got):
        return
    statistics = error_statistics(got, exact.total(numbers))
    with mpmath.workprec(BITS):
        true = mpmath.fsum(mpmath.mpf(float(x)) for x in numbers)
        assert statistics.max_abs == pytest.approx(
            float(abs(float(got) - true)), rel=1e-12, abs=5e-324
        )


def test_a_lost_sum_is_an_error() -> None:
    numbers = np.array([1e16, 1.0, -1e16])
    statistics = error_statistics(np.array(numbers.sum()), exact.total(numbers))
    assert (statistics.max_abs, statistics.expected, statistics.actual) == (1.0, 1.0, 0.0)
    assert statistics.differ == 1.0


def test_misplaced_elements_are_counted() -> None:
    got = np.array([math.nan, math.inf, -math.inf, 1.0, math.nan, math.inf], np.float32)
    true = np.array([math.nan, math.inf, math.inf, math.nan, 1.0, 1e39])
    statistics = error_statistics(got, true)
    assert statistics.misplaced == 3, "-inf for inf, a number for NaN, NaN for a number"
    assert statistics.max_abs == statistics.rms_abs == statistics.max_ulp == math.inf
    assert statistics.differ == 0.5
    assert statistics.worst is not None
    assert statistics.worst[0] in (2, 3, 4)


def test_an_exact_result_has_no_error() -> None:
    for kind in KINDS:
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
    true = 1 + 2.0**-8 + 2.0**-40
    assert float(round_to(true, ml_dtypes.bfloat16)) == 1 + 2.0**-7


def test_integers_have_ulps_of_1_and_complex_numbers_have_parts() -> None:
    assert error_statistics(np.array([3, 5]), np.array([3.0, 7.0])).max_ulp == 2.0
    huge = error_statistics(np.array([2**62 + 1]), np.array([2**62]))
    assert (huge.max_abs, huge.differ) == (1.0, 1.0), "float64 has neither of them"
    got = np.array([1 + 1j], np.complex64)
    assert error_statistics(got, np.array([1 + 2j])).max_abs == 1.0


def test_exact_matmuls_have_no_rounding() -> None:
    dice = np.random.default_rng(1)
    a = dice.standard_normal((3, 5)) * 10.0 ** dice.integers(-150, 150, (3, 5))
    b = dice.standard_normal((5, 2)) * 10.0 ** dice.integers(-150, 150, (5, 2))
    true = exact.matmul(a, b)
    with mpmath.workprec(BITS):
        for i, j in np.ndindex(3, 2):
            whole = mpmath.fsum(
                mpmath.mpf(x) * mpmath.mpf(y) for x, y in zip(a[i], b[:, j], strict=True)
            )
            assert true[i, j] == whole
    assert error_statistics(a @ b, true).misplaced == 0


def test_softmax_to_many_bits() -> None:
    x = np.array([[0.0, 1.0, -1000.0], [700.0, 700.0, 0.0]])
    true = exact.softmax(x)
    shares = np.exp(x - x.max(-1, keepdims=True))
    statistics = error_statistics(shares / shares.sum(-1, keepdims=True), true)
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
