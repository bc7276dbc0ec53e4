"""Evaluation: what a function measures on batches, as one number for a whole data set.

The number must not depend on how the data were cut into batches. So a function returns means over
the rows of a batch, one value for each row, or pairs of a total and a count, such as the summed
loss of the tokens that count and their number; all three add up exactly, also over a last batch
that is filled up. Nothing random takes part: a loss that draws from its key gets none.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.train.batches import Placed, once_through
from drumline.train.mistakes import Mistake
from drumline.train.recipe import Batch, Model, Params, Recipe
from drumline.train.state import on_all
from drumline.train.steps.loss import TracedLoss, loss_of

AHEAD = 2
"""Batches that are under way before the first is waited for."""
NEAR = 1e-3
"""Relative. Two rows give the mean of what each gives alone, but for rounding; what is further off
is no mean over rows."""

Function = Callable[[Params, Batch], Mapping[str, Any]]


class Measure:
    """Measures parameters on the recipe's evaluation data."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        params: Params,
        loss: TracedLoss,
        say: Callable[[str], Any],
    ) -> None:
        """`params` are shapes: what is measured is known before anything is."""
        evaluation = recipe.evaluation
        assert evaluation is not None
        self._placed = Placed(evaluation.data, mesh, recipe.model.batch_spec())
        self._say = say
        self._checked = False
        size = evaluation.data.batch
        shapes = self._placed.shapes()
        function = evaluation.function or _of_the_model(recipe.model, loss, params, shapes)

        is_mean: dict[str, bool] = {}

        def measure(params: Params, batch: Batch) -> jax.Array:
            told = function(params, batch)
            if not isinstance(told, Mapping):
                raise Mistake("evaluation: the function returns no dict of names and values")
            is_mean.update({name: not isinstance(told[name], tuple) for name in sorted(told)})
            return jnp.stack([jnp.stack(_fraction(n, told[n], size)) for n in sorted(told)])

        # To trace it is to learn what it tells.
        jax.eval_shape(measure, params, shapes)
        self._names, self._means = list(is_mean), list(is_mean.values())
        self._measure = jax.jit(measure, out_shardings=on_all(mesh))

    def __call__(self, params: Params) -> dict[str, float]:
        """The numbers, each under its name with `eval_` before it."""
        if not self._checked:
            self._checked = True
            for name in self._no_means(params):
                self._say(
                    f"evaluation: {name} is no mean over rows, so it depends on the batch of "
                    f"{self._placed.data.batch}; return one value for each row, or (total, count)"
                )
        under_way: deque[tuple[jax.Array, int]] = deque()
        total = np.zeros((len(self._names), 2))
        for batch, rows in once_through(self._placed):
            under_way.append((self._measure(params, batch), rows))
            if len(under_way) > AHEAD:
                total += self._weighed(*under_way.popleft())
        total += sum(self._weighed(*one) for one in under_way)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = total[:, 0] / total[:, 1]
        return {f"eval_{name}": float(mean) for name, mean in zip(self._names, means, strict=True)}

    def _weighed(self, values: jax.Array, rows: int) -> np.ndarray:
        weight = rows / self._placed.data.batch
        return weight * np.asarray(values.addressable_data(0), np.float64)

    def _no_means(self, params: Params) -> Iterator[str]:
        """Of the values that should be means over rows, those that are not.

        Two records alone and then side by side: a mean of both lies between them, in proportion.
        """
        count, size = len(self._placed.data.records), self._placed.data.batch
        if size < 2 or count == size or count < 2:
            return
        half = size // 2

        def measured(first: int) -> np.ndarray:
            """With the first record in this many rows, and the last in the others."""

            def numbers(_: int, rows: np.ndarray) -> np.ndarray:
                return np.where(rows < first, 0, count - 1)

            told = self._measure(params, self._placed.load(0, numbers))
            return np.asarray(told.addressable_data(0), np.float64)[:, 0]

        one, other, both = measured(size), measured(0), measured(half)
        expected = (half * one + (size - half) * other) / size
        far = np.abs(both - expected) > NEAR * np.maximum(np.abs(one), np.abs(other))
        for name, mean, off in zip(self._names, self._means, far, strict=True):
            if mean and off:
                yield name


def _fraction(name: str, value: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    """A value as total and count; the mean of a batch counts for one."""
    if isinstance(value, tuple):
        if len(value) != 2 or any(jnp.shape(part) != () for part in value):
            raise Mistake(f"evaluation: {name} is a pair of other things than a total and a count")
        return jnp.float32(value[0]), jnp.float32(value[1])
    shape = jnp.shape(value)
    if shape not in ((), (rows,)):
        raise Mistake(
            f"evaluation: {name} has shape {shape}; return one number, one for each of the "
            f"{rows} rows, or (total, count)"
        )
    return jnp.mean(jnp.asarray(value, jnp.float32)), jnp.ones((), jnp.float32)


def _of_the_model(model: Model, loss: TracedLoss, params: Params, batch: Batch) -> Function:
    """What is measured where the recipe has no function of its own."""
    own: Function | None = getattr(model, "evaluate", None)
    if own is not None:
        return own
    # Where nothing is drawn, any key will do.
    key = None if loss.draws else jax.random.key(0)
    function = partial(_loss_and_metrics, model, key)
    if loss.draws:
        try:
            jax.eval_shape(function, params, batch)
        except Exception as error:
            raise Mistake(
                "evaluation: the model's loss draws from its key, and an evaluation has key=None; "
                "leave out dropout and noise there, or give Evaluation a function"
            ) from error
    return function


def _loss_and_metrics(
    model: Model, key: jax.Array | None, params: Params, batch: Batch
) -> dict[str, jax.Array]:
    loss, metrics = loss_of(model)(params, batch, key)
    return {"loss": loss, **metrics}
