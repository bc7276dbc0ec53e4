"""Evaluation: the means, over all rows of a data set, of what a function measures on a batch."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.train.batches import Placed, once_through
from drumline.train.recipe import Batch, Metrics, Params, Recipe
from drumline.train.state import on_all

AHEAD = 2
"""Batches that are under way before the first is waited for."""


class Measure:
    """Measures parameters on the recipe's evaluation data."""

    def __init__(self, recipe: Recipe, mesh: Mesh, params: Params) -> None:
        """`params` are shapes: what is measured is known before anything is."""
        evaluation = recipe.evaluation
        assert evaluation is not None
        self._placed = Placed(evaluation.data, mesh, recipe.model.batch_spec())

        def measure(params: Params, batch: Batch) -> Metrics:
            if evaluation.function is not None:
                return evaluation.function(params, batch)
            loss, metrics = recipe.model.loss(params, batch, jax.random.key(0))
            return {"loss": loss, **metrics}

        def stacked(params: Params, batch: Batch) -> jax.Array:
            return jnp.stack([jnp.float32(value) for value in by_name(measure(params, batch))])

        self._names = sorted(jax.eval_shape(measure, params, self._placed.shapes()))
        self._stacked = jax.jit(stacked, out_shardings=on_all(mesh))

    def __call__(self, params: Params) -> dict[str, float]:
        """The means, each under its name with `eval_` before it."""
        under_way: deque[tuple[jax.Array, int]] = deque()
        total = np.zeros(len(self._names))
        for batch, rows in once_through(self._placed):
            under_way.append((self._stacked(params, batch), rows))
            if len(under_way) > AHEAD:
                total += _weighed(*under_way.popleft())
        total += sum(_weighed(*one) for one in under_way)
        means = total / len(self._placed.data.records)
        return {f"eval_{name}": float(mean) for name, mean in zip(self._names, means, strict=True)}


def by_name(metrics: Metrics) -> list[jax.Array]:
    """Metrics in the order of their names, which is the order jit brings dicts into."""
    return [metrics[name] for name in sorted(metrics)]


def _weighed(values: jax.Array, rows: int) -> np.ndarray:
    return rows * np.asarray(values.addressable_data(0), np.float64)
