"""What a training run is made of: a model as pure functions, its data, its layout, its settings.

Nothing here runs anything. `fit` (loop.py) takes a `Recipe`; `drumline.models` has dataclasses that
are a `Model`, and `Functions` makes one of plain functions, of Equinox or of Flax.
"""

# mypy: allow-untyped-calls

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
import optax  # type: ignore[import-untyped]
from jax.sharding import PartitionSpec

from drumline.train.data import Data
from drumline.train.mistakes import Mistake

Params = Any
"""A pytree of arrays."""
Batch = Any
"""A pytree of arrays whose first dimension counts the rows of the global batch."""
Metrics = dict[str, jax.Array]
NanPolicy = Literal["stop", "skip", "rollback"]


class Model(Protocol):
    """A model without state. `loss` is called under `jax.set_mesh` and may use `shard_map`."""

    @property
    def item(self) -> str:
        """What throughput counts: `images`, `tokens`."""
        ...

    def init(self, key: jax.Array) -> Params:
        """The first parameters: a pytree of float32 arrays."""
        ...

    def loss(self, params: Params, batch: Batch, key: Any) -> Any:
        """The mean loss over the whole batch, alone or in a pair with a dict of metrics.

        `key` is new in every step. An evaluation has none: there it is None, and nothing random
        (dropout, noise) takes part. Metrics are means over the batch too.
        """
        ...

    def specs(self) -> Any:
        """Where each parameter lies: PartitionSpecs in a tree like the parameters', or a prefix."""
        ...

    def batch_spec(self) -> PartitionSpec:
        """How the leading dimensions of every array of the batch are laid out."""
        ...

    def flops(self, batch: Batch) -> float:
        """Model FLOPs of one step, forward and backward, for a batch of these shapes."""
        ...

    def items(self, batch: Batch) -> int:
        """How many items a batch of these shapes holds."""
        ...


def _replicated() -> PartitionSpec:
    return PartitionSpec()


def _rows_over_data() -> PartitionSpec:
    return PartitionSpec("data")


def _unknown(_: Batch) -> float:
    return 0.0


def _rows(batch: Batch) -> int:
    return int(jax.tree.leaves(batch)[0].shape[0])


@dataclass(frozen=True)
class Functions:
    """A model of plain functions: copies of the parameters everywhere, rows over axis `data`."""

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, Any], Any]
    """Params, batch, key → the mean loss of the batch, or the loss and a dict of metrics. In an
    evaluation the key is None: no dropout there."""
    specs: Callable[[], Any] = _replicated
    batch_spec: Callable[[], PartitionSpec] = _rows_over_data
    flops: Callable[[Batch], float] = _unknown
    """0 means unknown: no MFU is told."""
    items: Callable[[Batch], int] = _rows
    item: str = "rows"
    evaluate: Callable[[Params, Batch], Mapping[str, Any]] | None = None
    """What an evaluation measures, as `Evaluation.function` does; by default the loss."""


@dataclass(frozen=True)
class Evaluation:
    """A data set that is gone through once, in order, and what is measured on it."""

    data: Data
    function: Callable[[Params, Batch], Mapping[str, Any]] | None = None
    """Each value is a mean over the rows of the batch, an array with one value for each row, or a
    pair (total, count). Without it the model's `evaluate`, or else its loss without a key."""


_INTERVALS = (
    "save_every",
    "keep_last",
    "keep_every",
    "evaluate_every",
    "log_every",
    "check_every",
    "sdc_every",
)


@dataclass(frozen=True)
class Settings:
    """How a run is kept safe and watched. All intervals count steps."""

    seed: int = 0
    save_every: int = 100
    keep_last: int = 3
    keep_every: int | None = None
    """Checkpoints at multiples of this are kept for good."""
    evaluate_every: int | None = None
    """The last step is evaluated in any case."""
    log_every: int = 10
    nan: NanPolicy = "stop"
    """When loss or gradients are not finite: end; leave the state as it was for that step; or go
    back to the last checkpoint and pass over the batch."""
    check_every: int | None = 100
    """Steps between two comparisons of what several devices hold or compute alike; there is also
    one before each checkpoint. None: never."""
    alarm_loss: float | None = 1.4
    alarm_norm: float | None = 2.0
    """A loss, or a norm of the gradients, so many times the usual is computed again before it
    counts (watch/alarms.py). None: it is not watched."""
    sdc_every: int | None = None
    """Steps between two that TPUs compute twice, by the checker in their compiler; elsewhere this
    has no effect."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in _INTERVALS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Mistake(f"{name}: {value} is not a number of steps; use 1 or more")
        for name in ("alarm_loss", "alarm_norm"):
            factor = getattr(self, name)
            if factor is not None and not factor > 1:
                raise Mistake(f"{name}: {factor} times the usual is no alarm; use more than 1")
        if self.nan not in ("stop", "skip", "rollback"):
            raise Mistake(f"nan: {self.nan!r} is no policy; use stop, skip or rollback")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes."""

    model: Model
    optimizer: optax.GradientTransformation
    data: Data
    mesh: Mapping[str, int]
    """Axis → devices along it, in order; one may be -1 and takes what is left."""
    steps: int
    evaluation: Evaluation | None = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check_steps(self.steps)
        rows, records = self.data.batch, len(self.data.records)
        if rows > records:
            raise Mistake(
                f"data: a batch of {rows:,} rows is more than the {records:,} records there are; "
                f"use {records:,} or fewer"
            )


def check_steps(steps: int) -> None:
    """Refuse a run without steps."""
    if steps < 1:
        raise Mistake(f"steps: {steps} leaves nothing to do; use 1 or more")
