"""How far two arrays are apart: in elements, absolutely, and in units of the last place.

A unit in the last place of a number is the distance to its neighbour in the same dtype. Between
two numbers it is taken at the larger one, so that numbers on both sides of zero, or of a power of
two, are as far apart as they look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.numerics.errors import spacing


@dataclass(frozen=True)
class Difference:
    """Between two arrays of the same shape."""

    elements: int
    differing: int
    """Elements whose bits differ; NaN is the same as NaN."""
    largest: float
    """The largest difference, absolutely; infinite where only one of two is finite."""
    units: float | None
    """The largest difference in units of the last place; floats alone have it."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which has no infinity: it becomes a string."""
        return {
            "elements": self.elements,
            "differing": self.differing,
            "largest": finite(self.largest),
            "units_of_the_last_place": finite(self.units),
        }


def difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    """How far two arrays are apart, in units of the first one's dtype."""
    apart = differs(ours, theirs)
    floats = is_float(ours)
    if not apart.any():
        return Difference(ours.size, 0, 0.0, 0.0 if floats else None)
    ours, theirs = ours[apart], theirs[apart]
    wide = _widest(ours)
    mine, yours = ours.astype(wide), theirs.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(mine - yours)
    # Zero is as large as minus zero, and NaN is away from everything.
    distance = np.where(mine == yours, 0.0, np.where(np.isnan(distance), np.inf, distance))
    units = None
    if floats:
        larger = np.maximum(np.abs(mine), np.abs(yours))
        units = float(np.max(distance / spacing(larger, ours.dtype)))
    return Difference(apart.size, int(apart.sum()), float(np.max(distance)), units)


def differs(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For each element, whether the two differ."""
    if ours.dtype != theirs.dtype:
        # Against a reference that is wider: by value.
        ours, theirs = ours.astype(_widest(ours)), theirs.astype(_widest(ours))
        return np.asarray((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)))
    bits = np.asarray(_bits(ours) != _bits(theirs))
    if bits.ndim > ours.ndim:
        bits = np.asarray(bits.any(axis=-1))
    if is_float(ours):
        return np.asarray(bits & ~(np.isnan(ours) & np.isnan(theirs)))
    return bits


def is_float(array: np.ndarray) -> bool:
    """Whether it has a last place: real and complex floats of every width do."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def as_numpy(value: Any) -> np.ndarray:
    """An array of the device's on the host; random keys as their numbers."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def finite(number: float | None) -> float | str | None:
    """A number as JSON takes it."""
    return number if number is None or math.isfinite(number) else str(number)


def _bits(array: np.ndarray) -> np.ndarray:
    """Each element as an integer, or as two where no integer is as wide."""
    line = np.ascontiguousarray(array).reshape(-1)
    width = array.dtype.itemsize
    if width > 8:
        return line.view(np.uint64).reshape(*array.shape, width // 8)
    return line.view(f"u{width}").reshape(array.shape)


def _widest(array: np.ndarray) -> Any:
    return np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64
