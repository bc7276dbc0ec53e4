"""References for results that float64 cannot judge: object arrays of mpmath's numbers."""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np

from drumline.numerics.errors import NDArray

BITS = 2400
"""Enough bits for any product of two float64 numbers and for sums of them, without rounding."""


def matmul(a: Any, b: Any) -> NDArray:
    """Return `a @ b` for two matrices, without rounding."""
    rows, columns = _as_mpf(a), _as_mpf(b).T
    result = np.empty((len(rows), len(columns)), object)
    with mpmath.workprec(2 * BITS):
        for row, column in np.ndindex(result.shape):
            result[row, column] = mpmath.fdot(rows[row], columns[column])
    return result


def total(x: Any) -> NDArray:
    """Return the sum of all elements, without rounding."""
    with mpmath.workprec(BITS):
        return np.array(mpmath.fsum(_as_mpf(x).ravel()), object)


def softmax(x: Any, bits: int = 200) -> NDArray:
    """Return the softmax over the last axis, to this number of bits."""
    logits = _as_mpf(x)
    result = np.empty(logits.shape, object)
    with mpmath.workprec(bits):
        for index in np.ndindex(logits.shape[:-1]):
            weights = [mpmath.exp(logit) for logit in logits[index]]
            normalizer = mpmath.fsum(weights)
            for i, weight in enumerate(weights):
                result[(*index, i)] = weight / normalizer
    return result


def _as_mpf(x: Any) -> NDArray:
    array = np.asarray(x)
    result = np.empty(array.shape, object)
    for index in np.ndindex(array.shape):
        result[index] = mpmath.mpf(float(array[index]))
    return result
