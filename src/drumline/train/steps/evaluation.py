"""Evaluation: the metrics of a whole data set.

The metrics must not depend on the batch size. So an evaluation function returns means over the rows
of a batch, a value per row, or pairs of a total and a count, such as the summed loss of the target
tokens and their number. All three add up exactly, even if the last batch is padded. There is no
randomness, because the loss gets no key.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.errors import UserError
from drumline.train.batches import BatchLoader, iterate_once
from drumline.train.recipe import Batch, Evaluation, Model, Params
from drumline.train.state import replicated
from drumline.train.steps.step import TracedLoss, loss_with_metrics

MAX_PENDING = 2
"""The number of batches that are dispatched before the first is read."""
TOLERANCE = 1e-3
"""The relative tolerance of the check that a value is a mean over rows. It allows for rounding."""

EvaluationFunction = Callable[[Params, Batch], Mapping[str, Any]]


class Evaluator:
    """Evaluates parameters on the data of an evaluation."""

    def __init__(
        self,
        evaluation: Evaluation,
        model: Model,
        mesh: Mesh,
        params: Params,
        loss: TracedLoss,
        log: Callable[[str], Any],
        name: str = "",
    ) -> None:
        """Trace the evaluation function. `params` are shapes, `name` is that of the evaluation."""
        self._loader = BatchLoader(evaluation.data, mesh, model.batch_spec())
        self._log, self._prefix = log, f"eval_{name}_" if name else "eval_"
        self._checked = False
        size = evaluation.data.batch
        shapes = self._loader.shapes()
        function = evaluation.function or _default_function(model, loss, params, shapes)

        is_mean: dict[str, bool] = {}

        def evaluate(params: Params, batch: Batch) -> jax.Array:
            metrics = function(params, batch)
            if not isinstance(metrics, Mapping):
                raise UserError("evaluation: the function must return a dict of names and values")
            names = sorted(metrics)
            is_mean.update({name: not isinstance(metrics[name], tuple) for name in names})
            return jnp.stack([jnp.stack(_total_and_count(n, metrics[n], size)) for n in names])

        # Tracing fills `is_mean` with the names of the metrics.
        jax.eval_shape(evaluate, params, shapes)
        self._names, self._is_mean = list(is_mean), list(is_mean.values())
        self._evaluate = jax.jit(evaluate, out_shardings=replicated(mesh))

    def __call__(self, params: Params) -> dict[str, float]:
        """Return the metrics, each with `eval_` and the evaluation's name before its name."""
        if not self._checked:
            self._checked = True
            for name in self._find_nonmeans(params):
                self._log(
                    f"evaluation: {name} is not a mean over rows, so it depends on the batch of "
                    f"{self._loader.data.batch}; return one value for each row, or (total, count)"
                )
        pending: deque[tuple[jax.Array, int]] = deque()
        totals = np.zeros((len(self._names), 2))
        for batch, rows in iterate_once(self._loader):
            pending.append((self._evaluate(params, batch), rows))
            if len(pending) > MAX_PENDING:
                totals += self._weight(*pending.popleft())
        totals += sum(self._weight(*item) for item in pending)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = totals[:, 0] / totals[:, 1]
        names = (self._prefix + name for name in self._names)
        return {name: float(mean) for name, mean in zip(names, means, strict=True)}

    def _weight(self, values: jax.Array, rows: int) -> np.ndarray:
        weight = rows / self._loader.data.batch
        return weight * np.asarray(values.addressable_data(0), np.float64)

    def _find_nonmeans(self, params: Params) -> Iterator[str]:
        """Yield the values that should be means over rows and are not.

        A batch of the first and the last record must give the weighted mean of their values.
        """
        count, size = len(self._loader.data.records), self._loader.data.batch
        if size < 2 or count == size or count < 2:
            return
        half = size // 2

        def evaluate(first_count: int) -> np.ndarray:
            """Evaluate a batch with the first record in this many rows and the last in the rest."""

            def record_indices(_: int, rows: np.ndarray) -> np.ndarray:
                return np.where(rows < first_count, 0, count - 1)

            values = self._evaluate(params, self._loader.load(0, record_indices))
            return np.asarray(values.addressable_data(0), np.float64)[:, 0]

        first, last, both = evaluate(size), evaluate(0), evaluate(half)
        expected = (half * first + (size - half) * last) / size
        differs = np.abs(both - expected) > TOLERANCE * np.maximum(np.abs(first), np.abs(last))
        for name, is_mean, differ in zip(self._names, self._is_mean, differs, strict=True):
            if is_mean and differ:
                yield name


def _total_and_count(name: str, value: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return a value as a total and a count. The mean of a batch counts as one."""
    if isinstance(value, tuple):
        if len(value) != 2 or any(jnp.shape(part) != () for part in value):
            raise UserError(f"evaluation: {name} is not a pair of two numbers, total and count")
        return jnp.float32(value[0]), jnp.float32(value[1])
    shape = jnp.shape(value)
    if shape not in ((), (rows,)):
        raise UserError(
            f"evaluation: {name} has shape {shape}; return one number, one for each of the "
            f"{rows} rows, or (total, count)"
        )
    return jnp.mean(jnp.asarray(value, jnp.float32)), jnp.ones((), jnp.float32)


def _default_function(
    model: Model, loss: TracedLoss, params: Params, batch: Batch
) -> EvaluationFunction:
    """Return the model's `evaluate`, or its loss without a key."""
    model_function: EvaluationFunction | None = getattr(model, "evaluate", None)
    if model_function is not None:
        return model_function
    # If the loss does not use its key, any key will do.
    key = None if loss.uses_key else jax.random.key(0)
    function = partial(_evaluate_loss, model, key)
    if loss.uses_key:
        try:
            jax.eval_shape(function, params, batch)
        except Exception as error:
            raise UserError(
                "evaluation: the model's loss uses its key, and an evaluation has key=None; "
                "leave out dropout and noise there, or give Evaluation a function"
            ) from error
    return function


def _evaluate_loss(
    model: Model, key: jax.Array | None, params: Params, batch: Batch
) -> dict[str, jax.Array]:
    loss, metrics = loss_with_metrics(model)(params, batch, key)
    return {"loss": loss, **metrics}
