"""Values with the error that floating point is allowed to make on the way to them.

A `Known` carries a float64 value and a bound on the distance of any honest computation from it.
Its products allow what one float32-accumulated matmul of K terms can lose in any order of the
sum, `K·u·|a|·|b|` elementwise with `u = 2^-24`, and then half a unit in the last place of the type
the result is stored in. A ring sums the same K terms, so it gets no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array64 = npt.NDArray[np.float64]
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Known:
    """A float64 value, and how far a result stored in `dtype` may be from it."""

    value: Array64
    error: Array64
    dtype: jnp.dtype

    @property
    def mT(self) -> Known:  # noqa: N802 - as numpy has it
        return Known(self.value.mT, self.error.mT, self.dtype)

    def __matmul__(self, other: Known) -> Known:
        a, b = np.abs(self.value), np.abs(other.value)
        inherited = self.error @ b + a @ other.error + self.error @ other.error
        size = (a + self.error) @ (b + other.error)
        summed = self.value.shape[-1] * FLOAT32_ROUNDING * size
        return stored(self.value @ other.value, inherited + summed, self.dtype)

    def __mul__(self, other: Known) -> Known:
        a, b = np.abs(self.value), np.abs(other.value)
        inherited = self.error * b + a * other.error + self.error * other.error
        return stored(self.value * other.value, inherited, self.dtype)

    def twice(self) -> Known:
        """Twice the value, which is exact in binary."""
        return Known(2 * self.value, 2 * self.error, self.dtype)


def exactly(values: npt.ArrayLike, dtype: jnp.dtype) -> Known:
    """An input: what is stored is what is meant."""
    value = np.asarray(values, np.float64)
    return Known(value, np.zeros_like(value), dtype)


def stored(value: Array64, error: Array64, dtype: jnp.dtype) -> Known:
    """Add what rounding to the stored type may lose."""
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    half_ulp = 0.5 * float(info.eps) * (np.abs(value) + error)
    return Known(value, error + half_ulp + 0.5 * float(info.smallest_subnormal), dtype)


def excess(result: npt.ArrayLike, known: Known) -> float:
    """The largest error of the result in units of its bound: at most 1 is as it should be."""
    distance = np.abs(np.asarray(result, np.float64) - known.value)
    return float(np.max(distance / known.error))
