"""The slides' MLP: linear layers with ReLU between them, a classifier of images.

    images[B, …] → flat[B, 784] → 1024 → ReLU → 512 → ReLU → logits[B, 10]

Under tensor parallelism the layers go in pairs. The first of a pair has its columns divided and
gathers the rows of the batch while it multiplies; the second has its rows divided and scatters
them again. A last layer without a partner works on each device's own rows.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from drumline.models.images import as_floats, judge
from drumline.models.layouts import (
    Dims,
    Division,
    Layout,
    Metrics,
    OnMesh,
    Params,
    axes_of,
    check_apart,
    read_layout,
)
from drumline.models.losses import IGNORE_INDEX, check_numbers

AXES = ("batch", "embed", "hidden")
"""Logical axes: examples; the undivided side of each pair's weights; what is between the pairs."""

LAYOUTS: dict[str, Layout] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": {"batch": ("data", "model"), "hidden": "model"},
    "fsdp+tensor": {"batch": ("data", "model"), "embed": "data", "hidden": "model"},
}


@dataclass(frozen=True)
class MLP(OnMesh):
    """The sizes of an MLP and how it lies on a mesh.

    Attributes:
        input_dim: numbers in an image.
        hidden_sizes: the widths of the hidden layers.
        num_classes: how many there are to tell apart.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type to multiply in; the weights are stored in float32.
        ignore_index: the label of an image that counts neither for the loss nor for the accuracy.
    """

    input_dim: int = 28 * 28
    hidden_sizes: tuple[int, ...] = (1024, 512)
    num_classes: int = 10
    layout: str | Layout = field(default="data", hash=False)
    compute_dtype: str = "float32"
    ignore_index: int = IGNORE_INDEX

    item = "images"

    def __post_init__(self) -> None:
        """Refuse sizes and layouts that no mesh could mend."""
        for name, size in (("input_dim", self.input_dim), ("num_classes", self.num_classes)):
            if size < 1:
                raise ValueError(f"MLP: {name} is {size}; it must be at least 1")
        if not all(size > 0 for size in self.hidden_sizes):
            raise ValueError(f"MLP: hidden_sizes is {self.hidden_sizes}; each must be at least 1")
        layout = self._layout()
        check_apart("MLP", layout, "embed", "hidden")
        if not set(axes_of(layout, "hidden")) <= set(axes_of(layout, "batch")):
            raise ValueError(
                f"MLP: layout divides hidden over {layout.get('hidden')!r} but not the batch; "
                "the batch's rows travel round that ring, so name that axis for both"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights, each with variance 1/(its inputs); the biases are zero."""
        keys = jax.random.split(key, len(self._widths) - 1)
        return {
            f"layer{i}": {
                "weight": jax.random.normal(keys[i], (inputs, outputs)) * inputs**-0.5,
                "bias": jnp.zeros(outputs),
            }
            for i, (inputs, outputs) in enumerate(pairwise(self._widths))
        }

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """The mean cross-entropy of a batch, and its accuracy.

        A label that is no class is refused where its value is known. Under `jit` it is not, and
        the loss is NaN.

        Args:
            params: as `init` draws them.
            batch: "image", `[B, …]`, bytes from 0 to 255 or floats; "label", `int[B]`, with
                `ignore_index` for an image that does not count.
            key: for models with randomness in them; here there is none.
        """
        del key
        self.check_batch(batch)
        here = Division.here("MLP", self._layout())
        here.check_rows("a batch of", self.items(batch), "batch")
        return here.run(self._local_loss, params, self._dims(), batch)

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Refuse labels that are no classes, where their values are known."""
        check_numbers("MLP: label", batch["label"], self.num_classes, self.ignore_index)

    def flops(self, batch: Mapping[str, Any]) -> float:
        """FLOPs of a training step: 6 for each weight and example, the usual convention.

        A multiplication and an addition forward, and twice that backward.
        """
        return 6.0 * sum(a * b for a, b in pairwise(self._widths)) * self.items(batch)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Images in a batch."""
        return int(batch["label"].shape[0])

    @property
    def _widths(self) -> tuple[int, ...]:
        return (self.input_dim, *self.hidden_sizes, self.num_classes)

    def _layout(self) -> Layout:
        return read_layout("MLP", self.layout, LAYOUTS, AXES)

    def _dims(self) -> dict[str, dict[str, Dims]]:
        last = len(self.hidden_sizes)

        def dims(i: int) -> dict[str, Dims]:
            if i == last:  # the classes stay whole
                inputs = ("hidden", "embed") if i % 2 else "embed"
                return {"weight": (inputs, None), "bias": (None,)}
            if i % 2:
                return {"weight": ("hidden", "embed"), "bias": (None,)}
            return {"weight": ("embed", "hidden"), "bias": ("hidden",)}

        return {f"layer{i}": dims(i) for i in range(last + 1)}

    def _local_loss(
        self, here: Division, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        logits = self._local_logits(here, params, batch["image"])
        return judge(logits, batch["label"], ignore_index=self.ignore_index)

    def _local_logits(
        self, here: Division, params: Params, image: Float[Array, "B ..."]
    ) -> Float[Array, "B classes"]:
        x = as_floats(image.reshape(image.shape[0], -1), self.compute_dtype)
        weights = here.at_hand(params, self._dims(), jnp.dtype(self.compute_dtype), rows=("batch",))
        project, last = here.projections("hidden"), len(self.hidden_sizes)
        for i in range(last + 1):
            weight, bias = weights[f"layer{i}"]["weight"], weights[f"layer{i}"]["bias"]
            if i % 2:
                x = project.bring_back(x, weight)
            elif i < last:
                (x,) = project.spread_out(x, [weight])
            else:
                x = x @ weight
            x = x + bias.astype(x.dtype)
            x = x if i == last else jax.nn.relu(x)
        return x
