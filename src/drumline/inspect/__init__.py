"""What XLA made of a program, and what it will cost.

communication(step, state, batch)                 the collectives, over which axes, how large
expect_communication(step, …, allow={"all-gather": {"Y": "8 MiB"}})
"""

from drumline.inspect.collectives import Collective
from drumline.inspect.communication import Communication, communication
from drumline.inspect.contracts import UnexpectedCommunication, expect_communication
from drumline.inspect.estimate import Estimate, estimate
from drumline.inspect.mistakes import Mistake

__all__ = [
    "Collective",
    "Communication",
    "Estimate",
    "Mistake",
    "UnexpectedCommunication",
    "communication",
    "estimate",
    "expect_communication",
]
