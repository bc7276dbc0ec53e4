"""How far computed numbers lie from the true ones.

The true ones come as float64, or as mpmath's numbers where float64 is not enough (that is, where
what is judged is itself float64, or cancellation has eaten float64's digits). A *unit in the last
place* is the distance between neighbours of the computed type around the true value: half a unit is
the best that any computation can promise, and the measure by which types can be compared.
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from drumline.numerics.mistakes import Mistake

Numbers = np.ndarray[Any, np.dtype[Any]]

WIDEST = 2**1000
"""Differences of float64 numbers near the largest are taken at a fourth of their size."""


@dataclass(frozen=True)
class ErrorStatistics:
    """The errors of an array.

    Attributes:
        count: elements compared.
        max_abs: the largest distance from the truth; infinite if one is NaN or infinite and
            should not be, or the other way round.
        rms_abs: the root of the mean square of those distances.
        max_ulp: the largest distance in units of the last place.
        rms_ulp: the root of their mean square.
        max_relative: the largest distance, over the root mean square of the true values.
        differ: the share of elements that are not the true value's nearest neighbour.
        misplaced: elements that are NaN or infinite and should not be, or the other way round.
        worst: the position of the largest distance in units of the last place, None where there is
            no element.
        got: what stands there.
        true: what should.
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
    got: float
    true: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity and no NaN: they become strings."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def error_statistics(got: Any, true: Any) -> ErrorStatistics:
    """The errors of `got` against `true`: float64, or an object array of mpmath's numbers.

    Raises:
        Mistake: the shapes differ, or there is no arithmetic for the type.
    """
    got, true = np.asarray(got), np.asarray(true)
    if got.shape != true.shape:
        raise Mistake(f"the result is {got.shape} and the reference {true.shape}")
    if np.iscomplexobj(got):
        got, true = _parts(got), _parts(true)
    elif np.iscomplexobj(true):
        raise Mistake(f"the reference is {true.dtype} and the result {got.dtype}, which is real")
    judge = _exactly if true.dtype == object else _in_float64
    nearest_true, distance, units, scale = judge(got, true)
    finite = np.isfinite(_wide(got)) & np.isfinite(nearest_true)
    same = _same(got, nearest_true) if _is_float(got.dtype) else distance == 0
    misplaced = ~finite & ~same
    distance = np.where(finite, distance, np.where(misplaced, math.inf, 0.0))
    units = np.where(finite, units, np.where(misplaced, math.inf, 0.0))
    if not got.size:
        return ErrorStatistics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, None, math.nan, math.nan)
    at = int(np.argmax(units))
    worst = tuple(int(i) for i in np.unravel_index(at, got.shape))
    largest = float(distance.max())
    return ErrorStatistics(
        count=got.size,
        max_abs=largest,
        rms_abs=_rms(distance),
        max_ulp=float(units.max()),
        rms_ulp=_rms(units),
        max_relative=largest / scale if scale else (math.inf if largest else 0.0),
        differ=float(np.mean(~same)),
        misplaced=int(misplaced.sum()),
        worst=worst,
        got=float(_wide(got)[worst]),
        true=float(true[worst]),
    )


def spacing(true: Any, dtype: Any) -> Numbers:
    """The unit of the last place of a type at these float64 values, as float64.

    That of the largest finite number for all beyond it. Of float64 itself it may be subnormal.
    """
    return np.ldexp(1.0, _unit_exponent(np.abs(np.asarray(true, np.float64)), np.dtype(dtype)))


def nearest(true: Any, dtype: Any) -> Numbers:
    """The numbers of a type nearest to these float64 values, as float64; of two, the even one.

    A cast would do that, but for types narrower than float32 NumPy's casts round twice.
    """
    true, kind = np.asarray(true, np.float64), np.dtype(dtype)
    if kind == np.float64:
        return true
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = _unit_exponent(np.abs(true), kind)
        rounded = np.ldexp(np.rint(np.ldexp(true, -exponent)), exponent)
        return np.where(np.abs(rounded) > _largest(kind), np.copysign(np.inf, true), rounded)


def _in_float64(got: Numbers, true: Numbers) -> tuple[Numbers, Numbers, Numbers, float]:
    if not _is_float(got.dtype):
        return _whole_numbers(got, true)
    true = true.astype(np.float64)
    wide = got.astype(np.float64)
    exponent = _unit_exponent(np.abs(true), got.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        # A fourth of both: the distance of the largest from the smallest is no float64.
        quarter = np.abs(wide / 4 - true / 4)
        plain = np.abs(wide - true)
        big = (np.abs(wide) > WIDEST) | (np.abs(true) > WIDEST)
        units = np.where(big, np.ldexp(quarter, 2 - exponent), np.ldexp(plain, -exponent))
        distance = np.where(big, quarter * 4, plain)
    return nearest(true, got.dtype), distance, units, _rms(np.abs(true[np.isfinite(true)]))


def _whole_numbers(got: Numbers, true: Numbers) -> tuple[Numbers, Numbers, Numbers, float]:
    """Integers and booleans: a unit is one. Python's integers, as float64 has not all of them."""
    wide = true.astype(np.float64)
    if true.dtype.kind in "biu":
        distance = np.abs(got.astype(object) - true.astype(object)).astype(np.float64)
    else:
        with np.errstate(invalid="ignore"):
            distance = np.abs(got.astype(np.float64) - wide)
    return wide, distance, distance, _rms(np.abs(wide[np.isfinite(wide)]))


def _exactly(got: Numbers, true: Numbers) -> tuple[Numbers, Numbers, Numbers, float]:
    """The same with mpmath's numbers, one by one."""
    import mpmath

    kind = got.dtype
    if not _is_float(kind):
        raise Mistake(f"mpmath's numbers are a reference for floats, and the result is {kind}")
    nearest_true, distance, units = (np.empty(got.shape, np.float64) for _ in range(3))
    info = ml_dtypes.finfo(kind)
    least, digits = int(info.minexp) - int(info.nmant), int(info.nmant)
    with mpmath.workprec(4000):  # more than the widest range of float64 has bits
        most = mpmath.mpf(float(info.max))
        for at in np.ndindex(got.shape):
            exact, here = mpmath.mpf(true[at]), float(got[at])
            if not mpmath.isfinite(exact):
                nearest_true[at], distance[at], units[at] = float(exact), 0.0, 0.0
                continue
            size = mpmath.mag(exact) - 1 if exact else least
            exponent = min(max(size - digits, least), int(info.maxexp) - 1 - digits)
            rounded = mpmath.ldexp(mpmath.nint(mpmath.ldexp(exact, -exponent)), exponent)
            beyond = math.copysign(math.inf, 1 if exact > 0 else -1)
            nearest_true[at] = beyond if abs(rounded) > most else float(rounded)
            if math.isfinite(here):
                error = abs(mpmath.mpf(here) - exact)
                distance[at], units[at] = float(error), float(mpmath.ldexp(error, -exponent))
            else:
                distance[at] = units[at] = math.inf
        numbers = [abs(value) for value in true.flat if mpmath.isfinite(value)]
        squares = mpmath.fsum(value * value for value in numbers)
        scale = float(mpmath.sqrt(squares / len(numbers))) if numbers else 0.0
    return nearest_true, distance, units, scale


def _unit_exponent(size: Numbers, kind: np.dtype[Any]) -> Any:
    """The power of two that is the unit of the last place at numbers of this size."""
    info = ml_dtypes.finfo(kind)
    digits, least, most = int(info.nmant), int(info.minexp), int(info.maxexp) - 1
    _, exponent = np.frexp(np.where(np.isfinite(size), size, float(info.max)))
    exponent = np.where(size == 0, least, exponent - 1)
    return np.clip(exponent, least, most) - digits


def _largest(kind: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(kind).max)


def _is_float(kind: np.dtype[Any]) -> bool:
    if np.issubdtype(kind, np.floating) and kind.itemsize <= 8:
        return True
    if kind.kind in "biu":
        return False
    if kind in (np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)):
        return True
    raise Mistake(f"errors of {kind} cannot be measured: it is no IEEE type of up to 64 bits")


def _wide(got: Numbers) -> Numbers:
    return got.astype(np.float64)


def _same(got: Numbers, nearest_true: Numbers) -> Numbers:
    """Whether each is the number that it should be; zeros are alike, and so are NaNs."""
    wide = _wide(got)
    return (wide == nearest_true) | (np.isnan(wide) & np.isnan(nearest_true))


def _parts(numbers: Numbers) -> Numbers:
    return np.stack([numbers.real, numbers.imag], axis=-1)


def _rms(numbers: Numbers) -> float:
    """Of numbers from zero on, whose squares may be too large or too small for float64."""
    if not numbers.size:
        return 0.0
    largest = float(numbers.max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float(np.mean(np.square(numbers / largest))))
