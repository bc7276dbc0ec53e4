"""Errors of computed numbers against a reference.

The reference is in float64, or in mpmath's numbers if the result is float64 or cancellation loses
too many digits. An *ulp* (unit in the last place) is the distance between neighbours of the
result's type around the reference. A correctly rounded result is within half an ulp.
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from drumline.deprecated import renamed_attribute, renamed_keywords
from drumline.errors import UserError

NDArray = np.ndarray[Any, np.dtype[Any]]

LARGE = 2**1000
"""Differences of larger float64 numbers are computed at a quarter of their size."""
TF32_MANTISSA_BITS = 10
"""The stored bits of the mantissa, as in float16."""


@dataclass(frozen=True)
class ErrorStatistics:
    """The errors of an array.

    An element is misplaced if either the result or the reference is not finite, and they are not
    the same infinity or both NaN.

    Attributes:
        count: The number of elements.
        max_abs: The maximum absolute error; infinite if an element is misplaced.
        rms_abs: The root mean square of the absolute errors.
        max_ulp: The maximum error in ulps.
        rms_ulp: The root mean square of the errors in ulps.
        max_relative: The maximum absolute error divided by the root mean square of the reference.
        differ: The share of elements that differ from the correctly rounded reference.
        misplaced: The number of misplaced elements.
        worst: The index of the maximum error in ulps, or None for an empty array.
        actual: The result at this index.
        expected: The reference at this index.
    """

    count: int
    max_abs: float
    rms_abs: float
    max_ulp: float
    rms_ulp: float
    max_relative: float
    differ: float
    misplaced: int
    worst: tuple[int, ...] | None
    actual: float
    expected: float

    got = renamed_attribute("got", "actual")
    true = renamed_attribute("true", "expected")

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values. Infinity and NaN become strings."""
        values = {_JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


_JSON_NAMES = {"actual": "got", "expected": "true"}


@renamed_keywords(got="actual", true="expected")
def error_statistics(actual: Any, expected: Any) -> ErrorStatistics:
    """Return the errors of `actual` against `expected`.

    Args:
        actual: The computed array.
        expected: The reference: a float64 array, or an object array of mpmath's numbers.

    Raises:
        UserError: The shapes differ, or the type is not supported.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise UserError(f"the result is {actual.shape} and the reference {expected.shape}")
    if np.iscomplexobj(actual):
        actual, expected = _stack_parts(actual), _stack_parts(expected)
    elif np.iscomplexobj(expected):
        raise UserError(
            f"the reference is {expected.dtype} and the result {actual.dtype}, which is real"
        )
    measure = _mpmath_errors if expected.dtype == object else _float64_errors
    rounded, abs_error, ulps, scale = measure(actual, expected)
    finite = np.isfinite(actual.astype(np.float64)) & np.isfinite(rounded)
    equal = _equal_or_nan(actual, rounded) if _is_float(actual.dtype) else abs_error == 0
    misplaced = ~finite & ~equal
    abs_error = np.where(finite, abs_error, np.where(misplaced, math.inf, 0.0))
    ulps = np.where(finite, ulps, np.where(misplaced, math.inf, 0.0))
    if not actual.size:
        return ErrorStatistics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, None, math.nan, math.nan)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(ulps)), actual.shape))
    max_abs_error = float(abs_error.max())
    return ErrorStatistics(
        count=actual.size,
        max_abs=max_abs_error,
        rms_abs=_rms(abs_error),
        max_ulp=float(ulps.max()),
        rms_ulp=_rms(ulps),
        max_relative=max_abs_error / scale if scale else (math.inf if max_abs_error else 0.0),
        differ=float(np.mean(~equal)),
        misplaced=int(misplaced.sum()),
        worst=worst,
        actual=float(actual.astype(np.float64)[worst]),
        expected=float(expected[worst]),
    )


def ulp_size(x: Any, dtype: Any) -> NDArray:
    """Return the ulp of a type at these float64 values, as float64.

    Beyond the type's range, this is the ulp of its maximum. For float64 it may be subnormal.
    """
    return np.ldexp(1.0, _ulp_exponent(np.abs(np.asarray(x, np.float64)), np.dtype(dtype)))


def round_to(x: Any, dtype: Any) -> NDArray:
    """Round float64 values to the nearest numbers of a type, ties to even, as float64.

    NumPy's casts to types narrower than float32 round twice.
    """
    x, dtype = np.asarray(x, np.float64), np.dtype(dtype)
    if dtype == np.float64:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = _ulp_exponent(np.abs(x), dtype)
        rounded = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
        overflows = np.abs(rounded) > float(ml_dtypes.finfo(dtype).max)
        return np.where(overflows, np.copysign(np.inf, x), rounded)


def round_to_bfloat16(x: NDArray) -> NDArray:
    """Round to bfloat16: eight bits of mantissa, and float32's range."""
    return round_to(x, ml_dtypes.bfloat16)


def round_to_float16(x: NDArray) -> NDArray:
    """Round to float16: eleven bits of mantissa, up to 65,504."""
    return round_to(x, np.float16)


def round_to_tf32(x: NDArray) -> NDArray:
    """Round to TF32: eleven bits of mantissa, and float32's range; ties away from zero.

    GPUs multiply float32 in this type by default.
    """
    magnitude = np.where(np.isfinite(x) & (x != 0), x, 1.0)
    _, exponent = np.frexp(magnitude)
    ulp_exponent = exponent - 1 - TF32_MANTISSA_BITS
    with np.errstate(invalid="ignore"):
        scaled = np.ldexp(x, -ulp_exponent)
        rounded = np.trunc(scaled + np.copysign(0.5, scaled))
        return np.where(np.isfinite(x), np.ldexp(rounded, ulp_exponent), x)


NARROW_TYPES: dict[str, Callable[[NDArray], NDArray]] = {
    "bfloat16": round_to_bfloat16,
    "float16": round_to_float16,
    "TF32": round_to_tf32,
}
"""The rounding functions of the types narrower than float32, by name."""


def _float64_errors(actual: NDArray, expected: NDArray) -> tuple[NDArray, NDArray, NDArray, float]:
    """Return the rounded reference, the absolute errors, the errors in ulps, and the scale."""
    if not _is_float(actual.dtype):
        return _integer_errors(actual, expected)
    expected = expected.astype(np.float64)
    actual64 = actual.astype(np.float64)
    exponent = _ulp_exponent(np.abs(expected), actual.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        # The difference of the extreme float64 values overflows; a quarter does not.
        quarter = np.abs(actual64 / 4 - expected / 4)
        difference = np.abs(actual64 - expected)
        is_large = (np.abs(actual64) > LARGE) | (np.abs(expected) > LARGE)
        ulps = np.where(is_large, np.ldexp(quarter, 2 - exponent), np.ldexp(difference, -exponent))
        abs_error = np.where(is_large, quarter * 4, difference)
    scale = _rms(np.abs(expected[np.isfinite(expected)]))
    return round_to(expected, actual.dtype), abs_error, ulps, scale


def _integer_errors(actual: NDArray, expected: NDArray) -> tuple[NDArray, NDArray, NDArray, float]:
    """Return the errors of integers and booleans. An ulp is 1."""
    expected64 = expected.astype(np.float64)
    if expected.dtype.kind in "biu":
        # Python's integers, because float64 cannot represent all of these.
        difference = np.abs(actual.astype(object) - expected.astype(object)).astype(np.float64)
    else:
        with np.errstate(invalid="ignore"):
            difference = np.abs(actual.astype(np.float64) - expected64)
    scale = _rms(np.abs(expected64[np.isfinite(expected64)]))
    return expected64, difference, difference, scale


def _mpmath_errors(actual: NDArray, expected: NDArray) -> tuple[NDArray, NDArray, NDArray, float]:
    """Return the errors against mpmath's numbers, element by element."""
    import mpmath

    dtype = actual.dtype
    if not _is_float(dtype):
        raise UserError(f"mpmath's numbers are a reference for floats, and the result is {dtype}")
    rounded, abs_error, ulps = (np.empty(actual.shape, np.float64) for _ in range(3))
    info = ml_dtypes.finfo(dtype)
    min_exponent, mantissa_bits = int(info.minexp) - int(info.nmant), int(info.nmant)
    with mpmath.workprec(4000):  # more bits than the range of float64
        max_finite = mpmath.mpf(float(info.max))
        for index in np.ndindex(actual.shape):
            exact, computed = mpmath.mpf(expected[index]), float(actual[index])
            if not mpmath.isfinite(exact):
                rounded[index] = float(exact)
                abs_error[index], ulps[index] = 0.0, 0.0
                continue
            magnitude = mpmath.mag(exact) - 1 if exact else min_exponent
            exponent = min(
                max(magnitude - mantissa_bits, min_exponent),
                int(info.maxexp) - 1 - mantissa_bits,
            )
            nearest = mpmath.ldexp(mpmath.nint(mpmath.ldexp(exact, -exponent)), exponent)
            infinity = math.copysign(math.inf, 1 if exact > 0 else -1)
            rounded[index] = infinity if abs(nearest) > max_finite else float(nearest)
            if math.isfinite(computed):
                error = abs(mpmath.mpf(computed) - exact)
                abs_error[index] = float(error)
                ulps[index] = float(mpmath.ldexp(error, -exponent))
            else:
                abs_error[index] = ulps[index] = math.inf
        magnitudes = [abs(value) for value in expected.flat if mpmath.isfinite(value)]
        squares = mpmath.fsum(value * value for value in magnitudes)
        scale = float(mpmath.sqrt(squares / len(magnitudes))) if magnitudes else 0.0
    return rounded, abs_error, ulps, scale


def _ulp_exponent(magnitude: NDArray, dtype: np.dtype[Any]) -> Any:
    """Return the exponents of the ulps of a type at these magnitudes."""
    info = ml_dtypes.finfo(dtype)
    min_exponent, max_exponent = int(info.minexp), int(info.maxexp) - 1
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, float(info.max)))
    exponent = np.where(magnitude == 0, min_exponent, exponent - 1)
    return np.clip(exponent, min_exponent, max_exponent) - int(info.nmant)


def _is_float(dtype: np.dtype[Any]) -> bool:
    if np.issubdtype(dtype, np.floating) and dtype.itemsize <= 8:
        return True
    if dtype.kind in "biu":
        return False
    if dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)):
        return True
    raise UserError(f"errors of {dtype} cannot be measured: it is no IEEE type of up to 64 bits")


def _equal_or_nan(actual: NDArray, expected: NDArray) -> NDArray:
    """Return True for elements that are equal or both NaN. The two zeros are equal."""
    actual64 = actual.astype(np.float64)
    return (actual64 == expected) | (np.isnan(actual64) & np.isnan(expected))


def _stack_parts(x: NDArray) -> NDArray:
    return np.stack([x.real, x.imag], axis=-1)


def _rms(x: NDArray) -> float:
    """Return the root mean square of non-negative numbers, without overflow or underflow."""
    if not x.size:
        return 0.0
    maximum = float(x.max())
    if maximum == 0 or not math.isfinite(maximum):
        return maximum
    return maximum * math.sqrt(float(np.mean(np.square(x / maximum))))
