"""A regression small enough to train in every test, as a recipe and as a config file.

The batch contains the numbers of its records, and the step reports their sum and sum of squares. So
two runs with the same batches in the same order report the same metrics.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import PartitionSpec

from drumline.train import Evaluation, Functions, Recipe, Settings, data

COUNT, WIDTH = 203, 16
_random = np.random.default_rng(0)
ROWS = {
    "x": _random.normal(size=(COUNT, WIDTH)).astype(np.float32),
    "number": np.arange(COUNT, dtype=np.int32),
}
ROWS["y"] = (ROWS["x"] @ _random.normal(size=WIDTH)).astype(np.float32)


def init(key: jax.Array) -> Any:
    return {"body": jax.random.normal(key, (WIDTH, 8)), "head": jnp.full(8, 0.3)}


def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = batch["x"]
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    hidden = jnp.tanh(x @ params["body"])
    error = hidden @ params["head"] - batch["y"]
    number = batch["number"].astype(jnp.float32)
    metrics = {"numbers": number.sum(), "squares": jnp.square(number).sum()}
    return jnp.mean(error**2), metrics


def spec() -> PartitionSpec:
    return PartitionSpec("data")  # type: ignore[no-untyped-call]


SHARDED = Functions(init, loss, specs=lambda: {"body": spec(), "head": spec()}, item="rows")


def toy(steps: int = 40, *, model: Functions = SHARDED, mesh: int = 2, **settings: Any) -> Recipe:
    """Return the run on two devices, which shard everything and take less time than eight."""
    return Recipe(
        model=model,
        optimizer=optax.adam(0.02),
        data=data.arrays(ROWS, batch=16, seed=7),
        mesh={"data": mesh},
        steps=steps,
        settings=Settings(**{"save_every": 10, "log_every": 1, **settings}),
    )


class Slow:
    """Records that are slow to read, so that a run lasts long enough to be stopped."""

    def __init__(self, seconds: float, columns: dict[str, np.ndarray] = ROWS) -> None:
        self.seconds, self.columns = seconds, columns

    def __len__(self) -> int:
        return COUNT

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        return {name: column[numbers] for name, column in self.columns.items()}


def recipe(
    *, steps: int = 40, pause: float = 0.0, evaluates: bool = False, mesh: int = 2
) -> Recipe:
    """Return the run of `toy(steps)` for `python -m drumline.train`, with a pause per batch."""
    base = toy(steps, mesh=mesh)
    slow_data = data.Data(Slow(pause), batch=16, seed=7, threads=1)
    evaluation = Evaluation(base.data) if evaluates else None
    return Recipe(
        base.model, base.optimizer, slow_data, base.mesh, steps, evaluation, base.settings
    )
