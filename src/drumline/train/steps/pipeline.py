"""The steps that the devices are busy with, and how far the run has come in steps and data.

The host never waits for a step it has just started. It hands over the next, and reads what a step
told some steps later.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from drumline.train.agree import meet
from drumline.train.batches import Batches
from drumline.train.checkpoints.checkpoint import Saved
from drumline.train.notice import Notice
from drumline.train.plan import Plan
from drumline.train.state import State, everywhere, steps_taken
from drumline.train.steps.step import PASSING, WATCHING, StepOutcome, make_step


@dataclass(frozen=True)
class StepInFlight:
    """A step that the devices may still be busy with."""

    step: int
    taken: int
    """Records before its batch."""
    told: jax.Array


class Pipeline:
    """The state, its step and its place in the data, each as of the last step that was started."""

    state: State
    step: int
    taken: int
    """Records of the data that were taken, or passed over."""

    def __init__(self, plan: Plan) -> None:
        """Compile the step. Nothing runs before `restart` says from where."""
        self._plan = plan
        self._notice = Notice(plan.mesh)
        self._batches = Batches(plan.placed)
        self._passed_over: set[int] = set()
        self._in_flight: deque[StepInFlight] = deque()
        self._watch = self._watching(WATCHING)
        self._advance = make_step(plan.recipe, plan.mesh, plan.places)
        # The first step finds what is compiled here, and no host waits for another's compiler.
        inputs = (plan.places, self._watch, plan.shapes, self._notice.word)
        self._advance.lower(*inputs).compile()
        meet()

    @property
    def idle(self) -> bool:
        """Whether what every step told has been read."""
        return not self._in_flight

    def restart(self, saved: Saved) -> None:
        """Go on from there; what was started is forgotten."""
        self.state, self.taken = saved.state, saved.taken
        self.step = steps_taken(saved.state)
        self._watch = self._watching(WATCHING)
        self._in_flight.clear()

    def start_step(self) -> None:
        """Hand the devices one more step. Nothing here waits for them."""
        size = self._plan.recipe.data.batch
        while self.taken in self._passed_over:
            self.taken += size
        batch = self._batches.take(self.taken)
        self.state, self._watch, told = self._advance(
            self.state, self._watch, batch, self._notice.word
        )
        told.copy_to_host_async()
        self.step += 1
        self._in_flight.append(StepInFlight(self.step, self.taken, told))
        self.taken += size

    def read(self, behind: int) -> Iterator[tuple[StepInFlight, StepOutcome]]:
        """Wait for the steps, all but the last few, and give what each told."""
        names, groups = self._plan.names, self._plan.groups
        while len(self._in_flight) > behind:
            ended = self._in_flight.popleft()
            yield ended, StepOutcome(np.asarray(ended.told.addressable_data(0)), names, groups)

    def go_past(self, bad: StepInFlight, *, halting: bool) -> None:
        """Go on after a step that changed nothing, and halt at the next such step or not.

        The steps that were started since have changed nothing either, and are started again.
        """
        self._in_flight.clear()
        self.step, self.taken = bad.step, bad.taken + self._plan.recipe.data.batch
        number = everywhere(self._plan.mesh, np.asarray(bad.step, self.state.step.dtype))
        self.state = replace(self.state, step=number)
        self._watch = self._watching(WATCHING if halting else PASSING)

    def pass_over(self, bad: StepInFlight) -> None:
        """From now on, leave out the batch of this step."""
        self._passed_over.add(bad.taken)

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()

    def _watching(self, how: int) -> jax.Array:
        return everywhere(self._plan.mesh, np.asarray(how, np.int32))
