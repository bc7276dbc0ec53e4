"""Inspect the communication of a compiled program, and estimate its cost on a slice.

- `communication(step, state, batch)` lists the collectives with their mesh axes, sizes and sources.
- `expect_communication(step, …, allow={"all-gather": {"Y": "8 MiB"}})` fails if there are others.
- `estimate(step, …, on="v5litepod-8")` estimates duration, exposed communication, memory and MFU on
  a slice that need not exist.
- `compare(step, variants, on=[…])` estimates several variants on several slices.
"""

from typing import Any

from drumline import deprecated
from drumline.inspect.collectives import Collective
from drumline.inspect.communication import (
    Communication,
    UnexpectedCommunication,
    communication,
    expect_communication,
)
from drumline.inspect.compare import ProgramVariant, VariantComparison, compare
from drumline.inspect.estimate import Estimate, estimate

__all__ = [
    "Collective",
    "Communication",
    "Estimate",
    "ProgramVariant",
    "UnexpectedCommunication",
    "VariantComparison",
    "communication",
    "compare",
    "estimate",
    "expect_communication",
]

_OLD_NAMES = {
    "Layout": "drumline.inspect:ProgramVariant",
    "LayoutComparison": "drumline.inspect:VariantComparison",
    "Mistake": "drumline.errors:UserError",
}


def __getattr__(name: str) -> Any:
    return deprecated.lookup(__name__, name, _OLD_NAMES)


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted({*globals(), *__all__})
