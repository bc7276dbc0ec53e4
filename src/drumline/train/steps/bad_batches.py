"""Bad batches: steps with a non-finite loss or gradient. Find their source and apply the policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from drumline.train.plan import Plan
from drumline.train.recipe import Batch, Model, Params
from drumline.train.state import State
from drumline.train.steps.pipeline import DispatchedStep
from drumline.train.steps.step import loss_with_metrics, squared_norms

MAX_ROLLBACKS = 3
"""The number of rollbacks in a row without getting past the step that failed."""

MAX_INVESTIGATIONS = 10
"""The number of bad batches that are recomputed to find their source. A run that skips may have
many. After these it no longer halts at them, because each halt discards dispatched steps."""


class BadBatches:
    """The bad batches of an attempt, and the recipe's policy for them."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        """Start without a bad batch."""
        self.report = ""
        """The report on the last bad batch that was investigated."""
        self._plan, self._log = plan, log
        self._investigations = 0
        self._rollbacks: list[int] = []

    @property
    def skips(self) -> bool:
        """True if the run continues after a bad batch with the state from before it."""
        return self._plan.recipe.settings.nan == "skip"

    @property
    def rolls_back(self) -> bool:
        """True if the run returns to the last checkpoint and leaves out the bad batch."""
        return self._plan.recipe.settings.nan == "rollback"

    @property
    def halts(self) -> bool:
        """True if the run halts at a bad batch, False if it has met so many that it passes on."""
        return not (self.skips and self._investigations >= MAX_INVESTIGATIONS)

    def log_skipped(self, nonfinite: DispatchedStep) -> None:
        """Log a bad batch that the run has skipped without an investigation."""
        self._log(f"step {nonfinite.step}: non-finite value from {self.batch_name(nonfinite)}")

    def investigate(self, nonfinite: DispatchedStep, groups: tuple[str, ...], state: State) -> None:
        """Find the source of a non-finite value and log it.

        The run has halted at this step, so state and batch are exactly those of the step. The
        outcome proves nothing about the hardware: this is a different program from the step, which
        may round to a finite number. Only a replay of the step can (hardware.py).
        """
        self._investigations += 1
        rows_by_host = self._plan.loader.rows_by_host
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), nonfinite.step - 1)
        is_finite = partial(self._is_finite, state.params, nonfinite.batch, key)
        host = find_host(is_finite, self._plan.recipe.data.batch, rows_by_host)
        source = NonFiniteSource(host, len(rows_by_host), groups)
        self.report = source.describe(nonfinite.step, self.batch_name(nonfinite))
        self._log(self.report)

    def may_roll_back(self, nonfinite: DispatchedStep) -> bool:
        """Return True if the policy is to roll back and the run has made progress since."""
        if not self.rolls_back:
            return False
        self._rollbacks = [
            *(step for step in self._rollbacks if step >= nonfinite.step),
            nonfinite.step,
        ]
        if len(self._rollbacks) > MAX_ROLLBACKS:
            self._log(
                f"rolled back {MAX_ROLLBACKS} times without getting past step {nonfinite.step}"
            )
            return False
        return True

    def batch_name(self, nonfinite: DispatchedStep) -> str:
        """Return the number of a batch, or its first record if the batch size has changed."""
        index, remainder = divmod(nonfinite.position, self._plan.recipe.data.batch)
        return f"the batch from record {nonfinite.position:,} on" if remainder else f"batch {index}"

    @cached_property
    def _is_finite(self) -> "IsFinite":
        return _make_is_finite(self._plan.recipe.model)


@dataclass(frozen=True)
class NonFiniteSource:
    """The source of a non-finite value."""

    host: int | None
    """The first host whose own rows give a non-finite value, or None."""
    hosts: int
    groups: tuple[str, ...]
    """The parameter groups with a non-finite gradient, in the order of the parameters."""

    def describe(self, step: int, batch: str) -> str:
        """Return the report as a sentence."""
        host = "on no single host" if self.host is None else f"on host {self.host} of {self.hosts}"
        group = f"in parameter group {self.groups[0]}" if self.groups else "in the loss alone"
        more = f" and {len(self.groups) - 1} more" if len(self.groups) > 1 else ""
        return f"step {step}: non-finite value from {batch}, first {host}, {group}{more}"


IsFinite = Callable[[Params, Batch, jax.Array, np.ndarray], jax.Array]
"""Map parameters, batch, the step's key and indices of rows to a flag: True if all is finite."""


def _make_is_finite(model: Model) -> IsFinite:
    """Return a function that recomputes a batch from some of its rows."""

    def is_finite(params: Params, batch: Batch, key: jax.Array, indices: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda column: column[indices], batch)
        loss_and_grad = jax.value_and_grad(loss_with_metrics(model), has_aux=True)
        (loss, _), grads = loss_and_grad(params, rows, key)
        norms = jnp.stack(list(squared_norms(grads).values()))
        return jnp.isfinite(loss) & jnp.isfinite(norms).all()

    compiled: IsFinite = jax.jit(is_finite)
    return compiled


def find_host(
    is_finite: Callable[[np.ndarray], jax.Array],
    size: int,
    rows_by_host: Mapping[int, np.ndarray],
) -> int | None:
    """Return the first host whose own rows are bad, or None. All hosts take part.

    `is_finite` recomputes a batch of `size` rows with these indices.
    """

    def is_bad(rows: np.ndarray) -> bool:
        # Repeat the rows up to the batch size, so that the shapes and the program stay the same.
        return not bool(np.asarray(is_finite(np.resize(rows, size)).addressable_data(0)))

    if len({tuple(rows) for rows in rows_by_host.values()}) < len(rows_by_host):
        return None
    return next((host for host, rows in rows_by_host.items() if is_bad(rows)), None)
