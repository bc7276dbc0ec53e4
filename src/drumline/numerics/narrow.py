"""Numbers as narrower types hold them, computed in float64."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import ml_dtypes
import numpy as np

from drumline.numerics.errors import Numbers, nearest

TF32_BITS = 10
"""Behind the first, as in float16."""


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
    """The nearest TF32: eleven bits, and float32's range; of two, the one further from zero.

    That is what GPUs multiply float32 in, unless they are told to take their time.
    """
    size = np.where(np.isfinite(x) & (x != 0), x, 1.0)
    _, exponent = np.frexp(size)
    unit = exponent - 1 - TF32_BITS
    with np.errstate(invalid="ignore"):
        scaled = np.ldexp(x, -unit)
        rounded = np.trunc(scaled + np.copysign(0.5, scaled))
        return np.where(np.isfinite(x), np.ldexp(rounded, unit), x)
