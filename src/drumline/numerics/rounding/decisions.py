"""Which decisions an argmax takes, and how narrow those were that another rounding turned over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from drumline.numerics.errors import spacing
from drumline.numerics.rounding.last_places import finite


@dataclass(frozen=True)
class Margin:
    """How far the best was ahead of the second."""

    absolute: float
    units: float
    """In units of the last place of the best."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "absolute": finite(self.absolute),
            "units_of_the_last_place": finite(self.units),
        }


@dataclass(frozen=True)
class Flips:
    """The decisions over the last axis of one output that come out otherwise."""

    output: str
    decisions: int
    flipped: int
    largest: Margin | None
    """Of those that flipped, as compiled; none where none did."""
    median: Margin | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "output": self.output,
            "decisions": self.decisions,
            "flipped": self.flipped,
            "largest_margin": self.largest.to_dict() if self.largest else None,
            "median_margin": self.median.to_dict() if self.median else None,
        }


def flips(output: str, ours: np.ndarray, theirs: np.ndarray) -> Flips:
    """Compare the argmax over the last axis; the margins are those of `ours`.

    As everywhere in JAX, the first of equals is the best and NaN is larger than any number.
    """
    rows = ours.astype(np.float64).reshape(-1, ours.shape[-1])
    others = theirs.astype(np.float64).reshape(rows.shape)
    turned = rows[np.argmax(rows, axis=-1) != np.argmax(others, axis=-1)]
    if not len(turned):
        return Flips(output, len(rows), 0, None, None)
    second, best = np.sort(turned, axis=-1)[:, -2:].T
    # Where every candidate is at minus infinity, none is ahead.
    with np.errstate(invalid="ignore"):
        margins = np.where(best == second, 0.0, best - second)
    units = margins / spacing(np.abs(best), ours.dtype)
    return Flips(
        output,
        len(rows),
        len(turned),
        Margin(float(np.max(margins)), float(np.max(units))),
        Margin(float(np.median(margins)), float(np.median(units))),
    )
