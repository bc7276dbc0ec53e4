"""Numbers as narrower types hold them, computed in float64."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from drumline.numerics.errors import Numbers, nearest

Rounding = Callable[[Numbers], Numbers]


def bfloat16(x: Numbers) -> Numbers:
    """The nearest bfloat16: eight bits, and float32's range."""
    return nearest(x, ml_dtypes.bfloat16)


def float16(x: Numbers) -> Numbers:
    """The nearest float16: eleven bits, to 65,504."""
    return nearest(x, np.float16)


def float32(x: Numbers) -> Numbers:
    """The nearest float32."""
    return nearest(x, np.float32)


def tf32(x: Numbers) -> Numbers:
    """The nearest TF32: eleven bits, and float32's range; what GPUs multiply float32 in."""
    return _kept(x, 10, np.rint)


def cut_to_tf32(x: Numbers) -> Numbers:
    """TF32 as a GPU makes it that drops the bits behind."""
    return _kept(x, 10, np.trunc)


def _kept(x: Numbers, bits: int, whole: Callable[[Numbers], Numbers]) -> Numbers:
    """So many bits behind the first."""
    size = np.where(np.isfinite(x) & (x != 0), x, 1.0)
    _, exponent = np.frexp(size)
    unit = exponent - 1 - bits
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), np.ldexp(whole(np.ldexp(x, -unit)), unit), x)
