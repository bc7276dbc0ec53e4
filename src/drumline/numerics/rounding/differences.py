"""Differences between arrays: in elements, absolute, in ulps, and in argmax decisions.

An ulp (unit in the last place) is the distance of a value to its neighbour in the same dtype. The
ulp of the larger value counts, so that differences across zero or a power of two are not
exaggerated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.deprecated import renamed_attribute
from drumline.numerics.errors import ulp_size


@dataclass(frozen=True)
class Difference:
    """The difference between two arrays of the same shape."""

    elements: int
    differing: int
    """The number of elements with different bits. All NaNs are equal."""
    largest: float
    """The maximum absolute difference; infinite between a finite and a non-finite element."""
    ulps: float | None
    """The maximum difference in ulps, or None for arrays that are not floating-point."""

    units = renamed_attribute("units", "ulps")

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values. Infinity becomes a string."""
        return {
            "elements": self.elements,
            "differing": self.differing,
            "largest": json_number(self.largest),
            "units_of_the_last_place": json_number(self.ulps),
        }


def measure_difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Measure the difference between two arrays, in ulps of the dtype of `a`."""
    differs = differing_elements(a, b)
    is_float = is_inexact(a)
    if not differs.any():
        return Difference(a.size, 0, 0.0, 0.0 if is_float else None)
    a, b = a[differs], b[differs]
    widest = _widest_dtype(a)
    wide_a, wide_b = a.astype(widest), b.astype(widest)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(wide_a - wide_b)
    # The distance is 0 between the zeros, and infinite to a NaN.
    distance = np.where(wide_a == wide_b, 0.0, np.where(np.isnan(distance), np.inf, distance))
    ulps = None
    if is_float:
        larger = np.maximum(np.abs(wide_a), np.abs(wide_b))
        ulps = float(np.max(distance / ulp_size(larger, a.dtype)))
    return Difference(differs.size, int(differs.sum()), float(np.max(distance)), ulps)


def differing_elements(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of the elements that differ."""
    if a.dtype != b.dtype:
        # A reference has a wider dtype, so compare values.
        a, b = a.astype(_widest_dtype(a)), b.astype(_widest_dtype(a))
        return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))
    differs = np.asarray(_as_integers(a) != _as_integers(b))
    if differs.ndim > a.ndim:
        differs = np.asarray(differs.any(axis=-1))
    if is_inexact(a):
        return np.asarray(differs & ~(np.isnan(a) & np.isnan(b)))
    return differs


def is_inexact(array: np.ndarray) -> bool:
    """Return True for real and complex floating-point arrays."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def to_host(value: Any) -> np.ndarray:
    """Return a device array as a NumPy array. Random keys become their integers."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def json_number(value: float | None) -> float | str | None:
    """Return a number as a JSON value. Infinity and NaN become strings."""
    return value if value is None or math.isfinite(value) else str(value)


def _as_integers(array: np.ndarray) -> np.ndarray:
    """Return the bits of the elements as integers, or as pairs for elements wider than 64 bits."""
    flat = np.ascontiguousarray(array).reshape(-1)
    width = array.dtype.itemsize
    if width > 8:
        return flat.view(np.uint64).reshape(*array.shape, width // 8)
    return flat.view(f"u{width}").reshape(array.shape)


def _widest_dtype(array: np.ndarray) -> Any:
    return np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64


@dataclass(frozen=True)
class Margin:
    """The distance between the two largest elements of a row."""

    absolute: float
    ulps: float
    """The distance in ulps of the largest element."""

    units = renamed_attribute("units", "ulps")

    def to_dict(self) -> dict[str, Any]:
        """Return the margin as JSON values."""
        return {
            "absolute": json_number(self.absolute),
            "units_of_the_last_place": json_number(self.ulps),
        }


@dataclass(frozen=True)
class ArgmaxFlips:
    """The changes of the argmax over the last axis of an output."""

    output: str
    decisions: int
    """The number of rows."""
    flipped: int
    largest: Margin | None
    """The maximum margin of a flipped row as compiled, or None without flips."""
    median: Margin | None

    def to_dict(self) -> dict[str, Any]:
        """Return the flips as JSON values."""
        return {
            "output": self.output,
            "decisions": self.decisions,
            "flipped": self.flipped,
            "largest_margin": self.largest.to_dict() if self.largest else None,
            "median_margin": self.median.to_dict() if self.median else None,
        }


def count_flips(output: str, a: np.ndarray, b: np.ndarray) -> ArgmaxFlips:
    """Compare the argmax over the last axis. The margins are those of `a`.

    As in JAX, the first of equal elements wins, and NaN is the maximum.
    """
    rows = a.astype(np.float64).reshape(-1, a.shape[-1])
    other_rows = b.astype(np.float64).reshape(rows.shape)
    flipped = rows[np.argmax(rows, axis=-1) != np.argmax(other_rows, axis=-1)]
    if not len(flipped):
        return ArgmaxFlips(output, len(rows), 0, None, None)
    second, largest = np.sort(flipped, axis=-1)[:, -2:].T
    # The margin of a row with minus infinity only is 0.
    with np.errstate(invalid="ignore"):
        margins = np.where(largest == second, 0.0, largest - second)
    ulps = margins / ulp_size(np.abs(largest), a.dtype)
    return ArgmaxFlips(
        output,
        len(rows),
        len(flipped),
        Margin(float(np.max(margins)), float(np.max(ulps))),
        Margin(float(np.median(margins)), float(np.median(ulps))),
    )
