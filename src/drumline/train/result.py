"""What became of a run."""

import os
from dataclasses import dataclass
from enum import Enum

from drumline.train.state import State


class Ending(Enum):
    """How a run ended, and what the job manager is told of it."""

    DONE = "done"
    STOPPED = "stopped on notice"
    NOT_FINITE = "not a number"

    @property
    def exit_code(self) -> int:
        """0; 75, which asks to be started again later; 1."""
        return {Ending.DONE: 0, Ending.STOPPED: os.EX_TEMPFAIL, Ending.NOT_FINITE: 1}[self]


@dataclass(frozen=True)
class Result:
    """What became of a run."""

    state: State
    """As of the last finite step."""
    step: int
    metrics: dict[str, float]
    """The last that was told of training, and of the evaluation with `eval_` before each name."""
    ending: Ending
    report: str = ""
    """What was not finite, and where it came from."""
