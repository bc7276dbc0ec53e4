"""What is settled before the first step: where all lies, what a step tells, and what is due when.

Nothing here changes while a run goes on, and nothing is opened for it: a recipe that cannot be is
refused before a folder is touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Mesh

from drumline.train.batches import Placed
from drumline.train.recipe import Recipe
from drumline.train.state import State, layout
from drumline.train.steps.finite import groups_of
from drumline.train.steps.loss import TracedLoss, trace_loss


@dataclass(frozen=True)
class Plan:
    """A recipe on its mesh."""

    recipe: Recipe
    mesh: Mesh
    places: State
    """The state as shapes, each with its place."""
    placed: Placed
    """The training data."""
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """A global batch."""
    loss: TracedLoss

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The metrics of a step, in the order it tells them."""
        return ("loss", "grad_norm", *self.loss.metrics)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The parameter groups, in the order a step tells of them."""
        return groups_of(self.places.params)

    def ends_at(self, step: int) -> bool:
        """Whether this step is the last."""
        return step == self.recipe.steps

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return self.ends_at(step) or step % self.recipe.settings.save_every == 0

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        every = self.recipe.settings.evaluate_every
        return self.ends_at(step) or (every is not None and step % every == 0)

    def checks_at(self, step: int) -> bool:
        """Whether devices are compared after this step."""
        every = self.recipe.settings.check_every
        return every is not None and (self.ends_at(step) or step % every == 0)

    def pauses_at(self, step: int) -> bool:
        """Whether something follows this step that needs to know all about it."""
        return self.saves_at(step) or self.evaluates_at(step) or self.checks_at(step)

    def logs_at(self, step: int) -> bool:
        """Whether the metrics of this step are written down."""
        return self.ends_at(step) or step % self.recipe.settings.log_every == 0


def make_plan(recipe: Recipe, mesh: Mesh) -> Plan:
    """Lay everything out; raises Mistake where that cannot be."""
    places = layout(recipe, mesh)
    placed = Placed(recipe.data, mesh, recipe.model.batch_spec())
    shapes = placed.shapes()
    loss = trace_loss(recipe.model, places.params, shapes)
    return Plan(recipe, mesh, places, placed, shapes, loss)
