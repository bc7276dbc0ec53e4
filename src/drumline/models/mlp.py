"""A multilayer perceptron for image classification: linear layers with ReLU between them.

    images[B, …] → flat[B, 784] → 1024 → ReLU → 512 → ReLU → logits[B, 10]

Tensor parallelism divides the layers into pairs. The first layer of a pair is column-parallel and
gathers the rows of the batch while it multiplies. The second is row-parallel and scatters the rows.
An unpaired last layer computes the local rows.
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.models.losses import (
    IGNORE_INDEX,
    Total,
    check_indices,
    classification_metrics,
    masked_mean,
    masked_total,
    scale_pixels,
)
from drumline.models.sharding import (
    Batch,
    Layout,
    LocalFunction,
    LogicalAxes,
    Metrics,
    ModelSharding,
    Output,
    Params,
    ShardedModel,
    axes_of,
    check_disjoint_axes,
    resolve_layout,
)

AXES = ("batch", "embed", "hidden")
"""Logical axes: examples; the outer dimensions of each pair of layers; the inner dimensions."""

LAYOUTS: dict[str, Layout] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": {"batch": ("data", "model"), "hidden": "model"},
    "fsdp+tensor": {"batch": ("data", "model"), "embed": "data", "hidden": "model"},
}


@dataclass(frozen=True)
class MLP(ShardedModel):
    """A multilayer perceptron for image classification.

    Attributes:
        input_dim: the number of values in an image.
        hidden_sizes: the sizes of the hidden layers.
        num_classes: the number of classes.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type of the matmuls; the weights are stored in float32.
        ignore_index: the label of images that the loss and the accuracy ignore.
    """

    input_dim: int = 28 * 28
    hidden_sizes: tuple[int, ...] = (1024, 512)
    num_classes: int = 10
    layout: str | Layout = field(default="data", hash=False)
    compute_dtype: str = "float32"
    ignore_index: int = IGNORE_INDEX

    item = "images"

    def __post_init__(self) -> None:
        """Check the sizes and the layout."""
        for name, size in (("input_dim", self.input_dim), ("num_classes", self.num_classes)):
            if size < 1:
                raise ValueError(f"MLP: {name} is {size}; it must be at least 1")
        if not all(size > 0 for size in self.hidden_sizes):
            raise ValueError(f"MLP: hidden_sizes is {self.hidden_sizes}; each must be at least 1")
        layout = self._layout()
        check_disjoint_axes("MLP", layout, "embed", "hidden")
        if not set(axes_of(layout, "hidden")) <= set(axes_of(layout, "batch")):
            raise ValueError(
                f"MLP: layout shards hidden over {layout.get('hidden')!r} but not the batch; "
                "the rows of the batch move around that ring, so name that axis for both"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights with variance 1/inputs. Biases are zero."""
        keys = jax.random.split(key, len(self._sizes) - 1)
        return {
            f"layer{i}": {
                "weight": jax.random.normal(keys[i], (inputs, outputs)) * inputs**-0.5,
                "bias": jnp.zeros(outputs),
            }
            for i, (inputs, outputs) in enumerate(pairwise(self._sizes))
        }

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy of a batch, and its accuracy.

        A label out of range raises ValueError. Under `jit`, where values are unknown, the loss is
        NaN instead.

        Args:
            params: the weights from `init`.
            batch: "image", `[B, …]`, bytes or floats; "label", `int[B]`, with `ignore_index` for
                images that do not count.
            key: unused.
        """
        del key
        return self._run(self._local_loss, params, batch)

    def evaluate(self, params: Params, batch: dict[str, jax.Array]) -> dict[str, Total]:
        """Return totals and counts of the loss and the accuracy of a batch."""
        return self._run(self._local_totals, params, batch)

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError if a label is out of range. Skip traced labels."""
        check_indices("MLP: label", batch["label"], self.num_classes, self.ignore_index)

    def flops(self, batch: Mapping[str, Any]) -> float:
        """Return the FLOPs of a training step: 6 per weight and example.

        The forward pass takes 2, a multiplication and an addition, and the backward pass 4.
        """
        return 6.0 * sum(a * b for a, b in pairwise(self._sizes)) * self.items(batch)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of images in a batch."""
        return int(batch["label"].shape[0])

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.input_dim, *self.hidden_sizes, self.num_classes)

    def _layout(self) -> Layout:
        return resolve_layout("MLP", self.layout, LAYOUTS, AXES)

    def _logical_axes(self) -> dict[str, dict[str, LogicalAxes]]:
        last = len(self.hidden_sizes)

        def axes(i: int) -> dict[str, LogicalAxes]:
            if i == last:  # the classes are not sharded
                inputs = ("hidden", "embed") if i % 2 else "embed"
                return {"weight": (inputs, None), "bias": (None,)}
            if i % 2:
                return {"weight": ("hidden", "embed"), "bias": (None,)}
            return {"weight": ("embed", "hidden"), "bias": ("hidden",)}

        return {f"layer{i}": axes(i) for i in range(last + 1)}

    def _run(self, local: LocalFunction[Output], params: Params, batch: Batch) -> Output:
        self.check_batch(batch)
        sharding = ModelSharding.on_current_mesh("MLP", self._layout())
        sharding.check_rows("a batch of", self.items(batch), "batch")
        return sharding.run(local, params, self._logical_axes(), batch)

    def _local_loss(
        self, sharding: ModelSharding, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        logits = self._local_logits(sharding, params, batch["image"])
        metrics = classification_metrics(
            logits, batch["label"], ignore_index=self.ignore_index, reduce=masked_mean
        )
        return metrics.pop("loss"), metrics

    def _local_totals(
        self, sharding: ModelSharding, params: Params, batch: dict[str, jax.Array]
    ) -> dict[str, Total]:
        logits = self._local_logits(sharding, params, batch["image"])
        return classification_metrics(
            logits, batch["label"], ignore_index=self.ignore_index, reduce=masked_total
        )

    def _local_logits(
        self, sharding: ModelSharding, params: Params, image: Float[Array, "B ..."]
    ) -> Float[Array, "B classes"]:
        x = scale_pixels(image.reshape(image.shape[0], -1), self.compute_dtype)
        dtype = jnp.dtype(self.compute_dtype)
        weights = sharding.gathered(params, self._logical_axes(), dtype, rows=("batch",))
        project, last = sharding.projections("hidden"), len(self.hidden_sizes)
        for i in range(last + 1):
            weight, bias = weights[f"layer{i}"]["weight"], weights[f"layer{i}"]["bias"]
            if i % 2:
                x = project.row_parallel(x, weight)
            elif i < last:
                (x,) = project.column_parallel(x, [weight])
            else:
                x = x @ weight
            x = x + bias.astype(x.dtype)
            x = x if i == last else jax.nn.relu(x)
        return x
