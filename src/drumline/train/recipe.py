"""The definition of a training run: model, optimizer, data, mesh and settings.

`fit` (loop.py) trains a `Recipe`. The dataclasses in `drumline.models` implement `Model`, and
`Functions` makes a `Model` from plain functions, for example of Equinox or Flax.
"""

# mypy: allow-untyped-calls

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh, PartitionSpec

from drumline.errors import UserError
from drumline.train.data import Data

Params = Any
"""A pytree of arrays."""
Batch = Any
"""A pytree of arrays. Their first dimension is the row of the global batch."""
Metrics = dict[str, jax.Array]
NanPolicy = Literal["stop", "skip", "rollback"]
SaveEvery = int | Literal["auto"]
"""The interval between checkpoints in steps, or the choice of an interval during the run."""


class Model(Protocol):
    """A stateless model. `loss` runs under `jax.set_mesh` and may use `shard_map`.

    A model may also have a method `evaluate(params, batch)`, as for `Evaluation.function`, and
    `compiler_options`, the defaults of the recipe's options by platform.
    """

    @property
    def item(self) -> str:
        """The unit of throughput: `images`, `tokens`."""
        ...

    def init(self, key: jax.Array) -> Params:
        """Return the initial parameters, a pytree of float32 arrays."""
        ...

    def loss(self, params: Params, batch: Batch, key: Any) -> Any:
        """Return the mean loss over the batch, or a pair of the loss and a dict of metrics.

        `key` is different in every step. In an evaluation it is None, and the model must not use
        randomness (dropout, noise). Metrics are means over the batch, too.
        """
        ...

    def specs(self) -> Any:
        """Return the PartitionSpec of each parameter, as a tree like the parameters or a prefix."""
        ...

    def batch_spec(self) -> PartitionSpec:
        """Return the sharding of the leading dimensions of every array in the batch."""
        ...

    def flops(self, batch: Batch) -> float:
        """Return the model FLOPs of a step, forward and backward, for these batch shapes."""
        ...

    def items(self, batch: Batch) -> int:
        """Return the number of items in a batch of these shapes."""
        ...


def _replicated() -> PartitionSpec:
    return PartitionSpec()


def _rows_over_data() -> PartitionSpec:
    return PartitionSpec("data")


def _unknown_flops(_: Batch) -> float:
    return 0.0


def _row_count(batch: Batch) -> int:
    return int(jax.tree.leaves(batch)[0].shape[0])


@dataclass(frozen=True)
class Functions:
    """A model from plain functions. Parameters are replicated and rows sharded over axis `data`."""

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, Any], Any]
    """Map (params, batch, key) to the mean loss of the batch, or to the loss and a dict of metrics.
    In an evaluation the key is None, which turns off dropout."""
    specs: Callable[[], Any] = _replicated
    batch_spec: Callable[[], PartitionSpec] = _rows_over_data
    flops: Callable[[Batch], float] = _unknown_flops
    """If this returns 0 the FLOPs are unknown and no MFU is reported."""
    items: Callable[[Batch], int] = _row_count
    item: str = "rows"
    evaluate: Callable[[Params, Batch], Mapping[str, Any]] | None = None
    """The metrics of an evaluation, as for `Evaluation.function`. The default is the loss."""


@dataclass(frozen=True)
class Evaluation:
    """A data set that is read once, in order, and the function that measures it."""

    data: Data
    function: Callable[[Params, Batch], Mapping[str, Any]] | None = None
    """Each value is a mean over the rows of the batch, an array with a value per row, or a pair
    (total, count). The default is the model's `evaluate`, or else its loss without a key."""


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
    """Checkpoints, logging and hardware checks of a run. All intervals are in steps."""

    seed: int = 0
    save_every: SaveEvery = 100
    """With "auto" the interval follows from the time for which a save holds up training and the
    lifetime of slices (save_interval.py)."""
    keep_last: int = 3
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never removed."""
    evaluate_every: int | None = None
    """The last step is always evaluated."""
    log_every: int = 10
    nan: NanPolicy = "stop"
    """The action after a step with a non-finite loss or gradient: end the run, skip the batch, or
    return to the last checkpoint and leave out the batch."""
    check_every: int | None = 100
    """The interval at which devices compare their replicas. They also do before each checkpoint.
    None turns the checks off."""
    alarm_loss: float | None = 1.4
    alarm_norm: float | None = 2.0
    """A step is replayed if its loss or gradient norm exceeds the recent median by this factor
    (alarms.py). None turns the alarm off."""
    sdc_every: int | None = None
    """The interval of steps that a TPU computes twice, with the checker of its compiler. It has no
    effect on other platforms."""

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        for name in _INTERVALS:
            value = getattr(self, name)
            allows_auto = name == "save_every"
            if value is None or (allows_auto and value == "auto"):
                continue
            if isinstance(value, str) or value < 1:
                choices = "1 or more, or auto" if allows_auto else "1 or more"
                raise UserError(f"{name}: {value} is not a number of steps; use {choices}")
        for name in ("alarm_loss", "alarm_norm"):
            factor = getattr(self, name)
            if factor is not None and not factor > 1:
                raise UserError(f"{name}: {factor} is not a valid factor; use more than 1")
        if self.nan not in ("stop", "skip", "rollback"):
            raise UserError(f"nan: {self.nan!r} is not a policy; use stop, skip or rollback")


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result of a training run."""

    model: Model
    optimizer: optax.GradientTransformation
    data: Data
    mesh: Mapping[str, int]
    """The size of each mesh axis, in order. One size may be -1, for all remaining devices."""
    steps: int
    evaluation: Evaluation | None = None
    settings: Settings = field(default_factory=Settings)
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    """More evaluations by name, on other data sets. Their metrics begin with `eval_NAME_`."""
    init_from: Callable[[Mesh], Params] | None = None
    """Return pretrained parameters, which replace those of `model.init` in a new run. They have its
    structure and shapes. Arrays that are already on the mesh are not copied to the hosts."""
    compiler_options: Mapping[str, bool | str | float | None] = field(default_factory=dict)
    """Options of XLA for the step, by name. They override the defaults or add to them. None removes
    a default."""

    def __post_init__(self) -> None:
        """Reject invalid recipes."""
        check_steps(self.steps)
        rows, records = self.data.batch, len(self.data.records)
        if rows > records:
            raise UserError(
                f"data: a batch of {rows:,} rows is larger than the data set of {records:,} "
                f"records; use {records:,} or fewer"
            )


def check_steps(steps: int) -> None:
    """Raise UserError if there are no steps to train."""
    if steps < 1:
        raise UserError(f"steps: {steps} is too few; use 1 or more")
