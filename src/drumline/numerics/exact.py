"""References where float64 is not enough: mpmath's numbers, as object arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]
BITS = 2400
"""Enough for every product of two float64 numbers and sums of them without rounding."""


def matmul(a: Any, b: Any) -> Numbers:
    """`a @ b` of two matrices, without any rounding."""
    rows, columns = _numbers(a), _numbers(b).T
    out = np.empty((len(rows), len(columns)), object)
    with mpmath.workprec(2 * BITS):
        for at in np.ndindex(out.shape):
            out[at] = _dot(rows[at[0]], columns[at[1]])
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


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return mpmath.fdot(a, b)
