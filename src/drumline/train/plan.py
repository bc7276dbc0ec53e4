"""The plan of a run, made before the first step: shardings, the traced loss, and the schedule.

A plan opens no files, so an invalid recipe is rejected before a checkpoint folder is touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Mesh

from drumline.train.batches import BatchLoader
from drumline.train.recipe import Recipe
from drumline.train.state import State, abstract_state
from drumline.train.steps.step import (
    TracedLoss,
    compiler_options,
    group_names,
    learning_rates,
    trace_loss,
)


@dataclass(frozen=True)
class Plan:
    """A recipe on its mesh."""

    recipe: Recipe
    mesh: Mesh
    abstract_state: State
    """The state as shapes with their shardings."""
    loader: BatchLoader
    """The loader of the training data."""
    abstract_batch: Mapping[str, jax.ShapeDtypeStruct]
    """A global batch as shapes with their shardings."""
    loss: TracedLoss
    compiler_options: Mapping[str, bool | str | float]
    """The options of the compiler for the step."""

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that a step returns, in order."""
        rates = learning_rates(self.abstract_state.opt_state)
        return ("loss", "grad_norm", "param_norm", "update_norm", *rates, *self.loss.metric_names)

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """The names of the parameter groups, in the order in which a step returns their flags."""
        return group_names(self.abstract_state.params)

    def is_last(self, step: int) -> bool:
        """Return True if this is the last step of the run."""
        return step == self.recipe.steps

    def evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation runs after this step."""
        interval = self.recipe.settings.evaluate_every
        return self.is_last(step) or (interval is not None and step % interval == 0)

    def checks_after(self, step: int) -> bool:
        """Return True if devices are compared after this step."""
        interval = self.recipe.settings.check_every
        return interval is not None and (self.is_last(step) or step % interval == 0)

    def logs(self, step: int) -> bool:
        """Return True if the metrics of this step are logged."""
        return self.is_last(step) or step % self.recipe.settings.log_every == 0


def make_plan(recipe: Recipe, mesh: Mesh) -> Plan:
    """Return the plan of a recipe. Raises UserError if it does not fit the mesh."""
    state = abstract_state(recipe, mesh)
    loader = BatchLoader(recipe.data, mesh, recipe.model.batch_spec())
    batch = loader.shapes()
    loss = trace_loss(recipe.model, state.params, batch)
    options = compiler_options(recipe, mesh, loss)
    return Plan(recipe, mesh, state, loader, batch, loss, options)
