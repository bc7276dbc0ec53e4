"""What of a TPU decides how a ring is written, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TPU:
    """What decides of a device: FLOP/s in bfloat16, bytes/s of a link one way and of its memory."""

    peak: float
    link: float
    memory: float
    late_hops: bool = False
    """Whether its compiler, left to itself, begins hops later than they need."""


_KINDS = {
    "TPU v2": TPU(2.3e13, 6e10, 3.6e11),
    "TPU v3": TPU(6.15e13, 1e11, 4.5e11),
    "TPU v4": TPU(2.75e14, 4.5e10, 1.2e12, late_hops=True),
    "TPU v5 lite": TPU(1.97e14, 4.5e10, 8.2e11),
    "TPU v5": TPU(4.59e14, 9e10, 2.8e12, late_hops=True),
    "TPU v6 lite": TPU(9.2e14, 9e10, 1.6e12, late_hops=True),
    "TPU7x": TPU(1.15e15, 9e10, 3.7e12),
}
_OTHER_NAMES = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "TPU 7x": "TPU7x",
}


def tpu_of(kind: str) -> TPU:
    """The chip of a device kind as JAX tells it; one that is not known counts as a v5e."""
    return _KINDS.get(_OTHER_NAMES.get(kind, kind), _KINDS["TPU v5 lite"])
