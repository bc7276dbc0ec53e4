"""What XLA made of a program, and what it will cost.

`communication(step, state, batch)` tells the collectives, over which axes, how large and why;
`expect_communication(step, …, allow={"all-gather": {"Y": "8 MiB"}})` fails where there are more;
`estimate(step, …, on="v5litepod-8")` tells seconds, what waits, memory and MFU on a slice that one
need not have; `compare(step, layouts, on=[…])` several of them.
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
from drumline.inspect.compare import Layout, LayoutComparison, compare
from drumline.inspect.estimate import Estimate, estimate

__all__ = [
    "Collective",
    "Communication",
    "Estimate",
    "Layout",
    "LayoutComparison",
    "UnexpectedCommunication",
    "communication",
    "compare",
    "estimate",
    "expect_communication",
]

_OLD_NAMES = {"Mistake": "drumline.errors:UserError"}


def __getattr__(name: str) -> Any:
    return deprecated.lookup(__name__, name, _OLD_NAMES)
