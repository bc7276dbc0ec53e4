"""Values with a bound on their floating-point error.

A `BoundedValue` has a float64 value and a bound on the error of any correct computation. Its
matmuls allow the error of one float32-accumulated matmul of K terms in any order of the sum,
`K·u·|a|·|b|` elementwise with `u = 2^-24`, and then half a unit in the last place of the result's
type. A ring sums the same K terms, so its bound is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array64 = npt.NDArray[np.float64]
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class BoundedValue:
    """A float64 value, and a bound on the error of a result stored in `dtype`."""

    value: Array64
    error: Array64
    dtype: jnp.dtype

    @property
    def mT(self) -> BoundedValue:  # noqa: N802 - numpy's name
        return BoundedValue(self.value.mT, self.error.mT, self.dtype)

    def __matmul__(self, other: BoundedValue) -> BoundedValue:
        a, b = np.abs(self.value), np.abs(other.value)
        input_error = self.error @ b + a @ other.error + self.error @ other.error
        size = (a + self.error) @ (b + other.error)
        sum_error = self.value.shape[-1] * FLOAT32_ROUNDING * size
        return rounded(self.value @ other.value, input_error + sum_error, self.dtype)

    def __mul__(self, other: BoundedValue) -> BoundedValue:
        a, b = np.abs(self.value), np.abs(other.value)
        input_error = self.error * b + a * other.error + self.error * other.error
        return rounded(self.value * other.value, input_error, self.dtype)

    def twice(self) -> BoundedValue:
        """Return twice the value, which is exact in binary."""
        return BoundedValue(2 * self.value, 2 * self.error, self.dtype)


def exact_input(values: npt.ArrayLike, dtype: jnp.dtype) -> BoundedValue:
    """Return an input without error."""
    value = np.asarray(values, np.float64)
    return BoundedValue(value, np.zeros_like(value), dtype)


def rounded(value: Array64, error: Array64, dtype: jnp.dtype) -> BoundedValue:
    """Add the error of rounding to the stored type."""
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    half_ulp = 0.5 * float(info.eps) * (np.abs(value) + error)
    return BoundedValue(value, error + half_ulp + 0.5 * float(info.smallest_subnormal), dtype)


def relative_error(result: npt.ArrayLike, bounded_value: BoundedValue) -> float:
    """Return the largest error of the result relative to its bound; at most 1 is correct."""
    distance = np.abs(np.asarray(result, np.float64) - bounded_value.value)
    return float(np.max(distance / bounded_value.error))
