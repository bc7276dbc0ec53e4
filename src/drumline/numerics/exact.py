"""References where float64 is not enough: mpmath's numbers, as object arrays."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np

from drumline.numerics.errors import Numbers

BITS = 2400
"""Enough for every product of two float64 numbers and sums of them without rounding."""


def matmul(a: Any, b: Any) -> Numbers:
    """`a @ b` of two matrices, without any rounding."""
    rows, columns = _numbers(a), _numbers(b).T
    out = np.empty((len(rows), len(columns)), object)
    with mpmath.workprec(2 * BITS):
        for at in np.ndindex(out.shape):
            out[at] = mpmath.fdot(rows[at[0]], columns[at[1]])
    return out


def total(x: Any) -> Numbers:
    """The sum of all elements, without any rounding."""
    with mpmath.workprec(BITS):
        return np.array(mpmath.fsum(_numbers(x).ravel()), object)


def softmax(x: Any, bits: int = 200) -> Numbers:
    """Over the last dimension, to so many bits."""
    numbers = _numbers(x)
    out = np.empty(numbers.shape, object)
    with mpmath.workprec(bits):
        for at in np.ndindex(numbers.shape[:-1]):
            shares = [mpmath.exp(value) for value in numbers[at]]
            whole = mpmath.fsum(shares)
            for i, share in enumerate(shares):
                out[(*at, i)] = share / whole
    return out


def _numbers(x: Any) -> Numbers:
    given = np.asarray(x)
    out = np.empty(given.shape, object)
    for at in np.ndindex(given.shape):
        out[at] = mpmath.mpf(float(given[at]))
    return out
