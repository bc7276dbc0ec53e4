"""Batches whose loss or gradients are not finite: who is blamed, and how often a run goes back."""

from collections.abc import Callable
from functools import cached_property, partial

import jax

from drumline.train.plan import Plan
from drumline.train.state import State
from drumline.train.steps.finite import Finite, NanOrigin, find_host, make_finite
from drumline.train.steps.pipeline import StepInFlight

ROLLBACKS = 3
"""Times in a row that a run goes back without getting past the step that failed."""

INQUIRIES = 10
"""Batches that are computed again to find out whose they were. A run that skips may meet many: from
then on it no longer halts at them, which costs the steps that were started since."""


class BadBatches:
    """Those that a run has met, and what its recipe wants done about them."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """None met yet."""
        self.report = ""
        """What is known of the last that was inquired into."""
        self._plan, self._say = plan, say
        self._inquiries = 0
        self._rollbacks: list[int] = []

    @property
    def skipped(self) -> bool:
        """Whether the run goes on after a bad batch, its state as it was before."""
        return self._plan.recipe.settings.nan == "skip"

    @property
    def rolled_back(self) -> bool:
        """Whether the run goes back to before a bad batch, and takes another course."""
        return self._plan.recipe.settings.nan == "rollback"

    @property
    def halting(self) -> bool:
        """Whether the run halts at a bad batch, or there were so many that it just goes past."""
        return not (self.skipped and self._inquiries >= INQUIRIES)

    def mention(self, bad: StepInFlight) -> None:
        """Say that the run went past one."""
        self._say(f"step {bad.step}: not a number from {self.name(bad)}")

    def inquire(self, bad: StepInFlight, groups: tuple[str, ...], state: State) -> None:
        """Find out where a value that is not finite came from, and say so.

        The run halted at it: parameters and batch are the very ones it was computed with. Still
        this says nothing about the hardware. It is another program than the step, which may round
        to a finite number where the step did not; only the step itself can show that (watch/).
        """
        self._inquiries += 1
        rows = self._plan.placed.rows_of_hosts
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), bad.step - 1)
        again = partial(self._finite, state.params, bad.batch, key)
        host = find_host(again, self._plan.recipe.data.batch, rows)
        self.report = NanOrigin(host, len(rows), groups).told(bad.step, self.name(bad))
        self._say(self.report)

    def may_roll_back(self, bad: StepInFlight) -> bool:
        """Whether going back once more is of use."""
        if not self.rolled_back:
            return False
        self._rollbacks = [*(step for step in self._rollbacks if step >= bad.step), bad.step]
        if len(self._rollbacks) > ROLLBACKS:
            self._say(f"went back {ROLLBACKS} times without getting past step {bad.step}")
            return False
        return True

    def name(self, bad: StepInFlight) -> str:
        """The batch of a step, by its number; after a change of its size, by its first record."""
        number, rest = divmod(bad.taken, self._plan.recipe.data.batch)
        return f"the batch from record {bad.taken:,} on" if rest else f"batch {number}"

    @cached_property
    def _finite(self) -> Finite:
        return make_finite(self._plan.recipe.model)
