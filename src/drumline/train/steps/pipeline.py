"""The steps that the devices are busy with, and how far the run has come in steps and data.

The host never waits for a step it has just started. It hands over the next, and reads what a step
told some steps later.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.health.emulated import inject_compute_fault
from drumline.train.agree import meet
from drumline.train.batches import Batches
from drumline.train.checkpoints.checkpoint import Saved
from drumline.train.notice import Notice
from drumline.train.plan import Plan
from drumline.train.recipe import Batch
from drumline.train.state import State, everywhere, steps_taken
from drumline.train.steps.checker import Checker
from drumline.train.steps.step import NO_LIMITS, PASSING, WATCHING, StepOutcome, make_step


@dataclass(frozen=True)
class StepInFlight:
    """A step that the devices may still be busy with."""

    step: int
    taken: int
    """Records before its batch."""
    told: jax.Array
    batch: Batch = field(repr=False, compare=False)
    """The very one that it was given: data need not read the same a second time."""


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
        self._accepted: StepInFlight | None = None
        self._halting = True
        self._in_flight: deque[StepInFlight] = deque()
        self._has_run = False
        self._watch = self._watching(WATCHING)
        self._no_limits = self._limits = everywhere(plan.mesh, NO_LIMITS)
        self._given = (np.inf, np.inf)
        self._advance = make_step(plan.recipe, plan.mesh, plan.places)
        self._checker = Checker(plan)
        # The first step finds what is compiled here, and no host waits for another's compiler.
        inputs = (plan.places, self._watch, plan.shapes, self._notice.word, self._limits)
        self._advance.lower(*inputs).compile()
        self._checker.prepare(*inputs)
        meet()

    @property
    def idle(self) -> bool:
        """Whether what every step told has been read."""
        return not self._in_flight

    @property
    def ignored(self) -> str | None:
        """Why a setting of the recipe has no effect on these devices."""
        return self._checker.ignored

    def restart(self, saved: Saved) -> None:
        """Go on from there; what was started is forgotten."""
        self.state, self.taken = saved.state, saved.taken
        self.step = steps_taken(saved.state)
        self._halting, self._accepted = True, None
        self._watch = self._watching(WATCHING)
        self._in_flight.clear()

    def start_step(self) -> None:
        """Hand the devices one more step. Nothing here waits for them, but for the first.

        That one has them to itself, with nobody reading ahead: cuDNN makes its kernels when they
        are first run, which fails on a GPU that another thread sends something to meanwhile.
        """
        size = self._plan.recipe.data.batch
        while self.taken in self._passed_over:
            self.taken += size
        self.step += 1
        accepted, self._accepted = self._accepted, None
        first, self._has_run = not self._has_run, True
        if accepted is None:
            take = self._batches.placed.next_to if first else self._batches.take
            batch, limits = take(self.taken), self._limits
        else:
            batch, limits = accepted.batch, self._no_limits
        self.state, self._watch, told = self._run(
            self.step, self.state, self._watch, batch, self._notice.word, limits
        )
        if first:
            with self._checker.accusing(self.step):
                told.block_until_ready()
        told.copy_to_host_async()
        self._in_flight.append(StepInFlight(self.step, self.taken, told, batch))
        self.taken += size

    def read(self, behind: int) -> Iterator[tuple[StepInFlight, StepOutcome]]:
        """Wait for the steps, all but the last few, and give what each told."""
        names, groups = self._plan.names, self._plan.groups
        while len(self._in_flight) > behind:
            ended = self._in_flight.popleft()
            with self._checker.accusing(ended.step):
                told = np.asarray(ended.told.addressable_data(0))
            yield ended, StepOutcome(told, names, groups)

    def limit(self, loss: float, norm: float) -> None:
        """From the next step on, halt where the loss or the norm of the gradients is beyond."""
        if (loss, norm) != self._given:
            self._given = loss, norm
            self._limits = everywhere(self._plan.mesh, np.asarray((loss, norm), np.float32))

    def replay(self, halted: StepInFlight) -> tuple[State, jax.Array]:
        """Run the step that the run halted at once more, with nothing in its way.

        The same executable gets the same state, batch and key, and only the limits are lifted. It
        takes a copy of the state, which it gives back as its result; the run's own stays.
        """
        state, _, told = self._run(
            halted.step,
            _copied(self.state),
            self._watching(WATCHING),
            halted.batch,
            self._notice.word,
            self._no_limits,
        )
        return state, told

    def retrace(self, saved: Saved, to: int, taking: Callable[[int], None]) -> None:
        """Come once more from a checkpoint to a step, passing over what was passed over before.

        In what a run has been through, a batch that was not finite was skipped and a spike taken.
        `taking` hears of each step that has ended.
        """
        halting = self._halting
        self.restart(saved)
        self._halting, self._watch = halting, self._watching(PASSING)
        limits, self._limits = self._limits, self._no_limits
        while self.step < to:
            self.start_step()
            for ended, _ in self.read(behind=1):
                taking(ended.step)
        self._limits = limits
        self._stand_at(self.step, self.taken)

    def go_past(self, bad: StepInFlight, *, halting: bool) -> None:
        """Go on after a step that changed nothing, and halt at the next such step or not.

        The steps that were started since have changed nothing either, and are started again.
        """
        self._halting = halting
        self._stand_at(bad.step, bad.taken + self._plan.recipe.data.batch)

    def accept(self, spiked: StepInFlight) -> None:
        """Take the step that the run halted at for its spike once more, now without limits."""
        self._accepted = spiked
        self._stand_at(spiked.step - 1, spiked.taken)

    def pass_over(self, bad: StepInFlight) -> None:
        """From now on, leave out the batch of this step."""
        self._passed_over.add(bad.taken)

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()

    def _run(self, step: int, *inputs: Any) -> tuple[State, jax.Array, jax.Array]:
        """The step, as the devices of this machine compute it."""
        advance = self._checker.step if self._checker.is_due(step) else self._advance
        with self._checker.accusing(step):
            state, watch, told = advance(*inputs)
        return inject_compute_fault(state, step=step), watch, told

    def _stand_at(self, step: int, taken: int) -> None:
        """Go on from the state at hand, which is that of this step."""
        self._in_flight.clear()
        self.step, self.taken = step, taken
        number = everywhere(self._plan.mesh, np.asarray(step, self.state.step.dtype))
        self.state = replace(self.state, step=number)
        self._watch = self._watching(WATCHING if self._halting else PASSING)

    def _watching(self, how: int) -> jax.Array:
        return everywhere(self._plan.mesh, np.asarray(how, np.int32))


@jax.jit
def _copied(state: State) -> State:
    """The same bits on the same devices, in memory of their own."""
    copied: State = jax.tree.map(jnp.copy, state)
    return copied
