"""The Vision Transformer of timm's `vit_*_patch16_224`: S/16, B/16 and L/16.

    images[B, 224, 224, 3] → patches[B, 196, 768] → tokens[B, 197, D], with a class token first
        → L pre-norm blocks of attention and feed-forward → norm → head on the class token

The sequence is padded if a kernel or the mesh needs a multiple of some length. No token attends to
the padding. Tensor parallelism shards the sequence between the projections, and heads and hidden
features inside them.
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, PRNGKeyArray

from drumline.models.losses import (
    IGNORE_INDEX,
    Total,
    check_indices,
    classification_metrics,
    masked_mean,
    masked_total,
    scale_pixels,
)
from drumline.models.remat import Remat, check_remat
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
    Weights,
    check_disjoint_axes,
    check_same_axes,
    resolve_layout,
    unstack_layers,
)
from drumline.parallel.block.attention import CUDNN_MULTIPLE, Kernel, attend, has_cudnn
from drumline.parallel.block.layers import attention_layer, feedforward_layer, layer_norm
from drumline.parallel.block.weights import (
    BlockShape,
    Weight,
    attention_weights,
    feedforward_weights,
    init,
    logical_axes,
    stack_layers,
)
from drumline.parallel.einsum.costs import Implementation
from drumline.parallel.rings.ring import check_choice, check_wire_dtype
from drumline.parallel.taps import scope, tap, tap_lazy

AXES = ("batch", "sequence", "embed", "heads", "hidden")
"""Logical axes: examples, tokens, the model dimension, attention heads, hidden features."""

LAYOUTS: dict[str, Layout] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": {"batch": "data", "sequence": "model", "heads": "model", "hidden": "model"},
    "fsdp+tensor": {
        "batch": "data",
        "embed": "data",
        "sequence": "model",
        "heads": "model",
        "hidden": "model",
    },
}

OUTER_AXES: dict[str, LogicalAxes] = {
    "patch": (None, "embed"),
    "patch_bias": (None,),
    "class_token": (None,),
    "positions": (None, None),
    "norm": (None,),
    "shift": (None,),
    "head": ("embed", None),
    "head_bias": (None,),
}
"""The logical axes of the weights before and after the blocks."""


@dataclass(frozen=True)
class ViT(ShardedModel):
    """A Vision Transformer: its sizes, its layout on a mesh, and the options of its computation.

    Attributes:
        width: D, the model dimension.
        depth: L, the number of blocks.
        heads: N, the number of attention heads of dimension D/N.
        image: the height and width of an image in pixels.
        patch: the height and width of a patch in pixels.
        channels: the number of channels of a pixel.
        classes: the number of classes.
        hidden: F, the hidden dimension of the feed-forward layer; None is 4·D.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type of the matmuls; the weights are stored in float32.
        wire_dtype: the type in which the sums of sharded matmuls are sent, as in `LM`.
        implementation: that of sharded matmuls, as in `LM`.
        attention: `"auto"` for the best kernel of the platform, or the name of a kernel
            (`drumline.parallel.block.attention`).
        scan_layers: True to compile one block and run all layers in a loop.
        remat: the rematerialization policy (`drumline.models.remat`): `"none"`, `"dots"`,
            `"projections"` or `"full"`; True for `"full"`, False for `"none"`.
        ignore_index: the label of images that the loss and the accuracy ignore.
    """

    width: int
    depth: int
    heads: int
    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    hidden: int | None = None
    layout: str | Layout = field(default="data", hash=False)
    compute_dtype: str = "bfloat16"
    wire_dtype: str | None = None
    implementation: Implementation = "auto"
    attention: Kernel = "auto"
    scan_layers: bool = False
    remat: Remat = False
    ignore_index: int = IGNORE_INDEX

    item = "images"

    def __post_init__(self) -> None:
        """Check the sizes, the options and the layout."""
        if self.width % self.heads:
            raise ValueError(f"ViT: width {self.width} cannot be divided into {self.heads} heads")
        if self.image % self.patch:
            raise ValueError(
                f"ViT: images of {self.image} pixels cannot be cut into patches of {self.patch}"
            )
        check_remat("ViT", self.remat)
        check_wire_dtype("ViT", self.wire_dtype)
        check_choice("ViT", "implementation", self.implementation, get_args(Implementation))
        if self.attention not in get_args(Kernel):
            kernels = ", ".join(get_args(Kernel))
            raise ValueError(f"ViT: attention is {self.attention!r}; it can be {kernels}")
        check_same_axes("ViT", self._layout(), ("sequence", "heads", "hidden"))
        check_disjoint_axes("ViT", self._layout(), "batch", "sequence")

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights as timm does, from normals with σ = 0.02 truncated at 2σ.

        The patch embedding has variance 1/inputs. Biases and the class token are zero.
        """
        d, keys = self.width, iter(jax.random.split(key, 9))

        def draw(*dims: int, sigma: float = 0.02) -> jax.Array:
            return jax.random.truncated_normal(next(keys), -2, 2, dims) * sigma

        blocks = init(stack_layers(self._block_weights(), self.depth), lambda w: draw(*w.dims))
        pixels = self.patch**2 * self.channels
        return {
            "patch": draw(pixels, d, sigma=pixels**-0.5),
            "patch_bias": jnp.zeros(d),
            "class_token": jnp.zeros(d),
            "positions": draw(self.tokens, d),
            "blocks": blocks,
            "norm": jnp.ones(d),
            "shift": jnp.zeros(d),
            "head": draw(d, self.classes),
            "head_bias": jnp.zeros(self.classes),
        }

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy of a batch, and its accuracy.

        A label out of range raises ValueError. Under `jit`, where values are unknown, the loss is
        NaN instead.

        Args:
            params: the weights from `init`.
            batch: "image", `[B, H, W, C]`, bytes or floats; "label", `int[B]`, with `ignore_index`
                for images that do not count.
            key: unused.
        """
        del key
        return self._run(self._local_loss, params, batch)

    def evaluate(self, params: Params, batch: dict[str, jax.Array]) -> dict[str, Total]:
        """Return totals and counts of the loss and the accuracy of a batch."""
        return self._run(self._local_totals, params, batch)

    def logits(
        self, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B classes"]:
        """Return the logits of the classes on a single device. Supports `collecting` taps."""
        self._check_images(image)
        sharding = ModelSharding.on_one_device("ViT", self._layout())
        return self._local_logits(sharding, params, image)

    def _check_images(self, image: Num[Array, "B height width C"]) -> None:
        expected = (self.image, self.image, self.channels)
        if image.shape[1:] != expected:
            raise ValueError(f"ViT: images are {image.shape[1:]}, but the model takes {expected}")

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError if a label is out of range. Skip traced labels."""
        check_indices("ViT: label", batch["label"], self.classes, self.ignore_index)

    def flops(self, batch: Mapping[str, Any]) -> float:
        """Return the matmul FLOPs of a training step, three times those of the forward pass.

        A token costs 6 per weight, and 12·S·D per block for attention over S tokens. Norms,
        padding and recomputation are not counted.
        """
        d, s = self.width, self.tokens
        patches = (s - 1) * self.patch**2 * self.channels * d
        block = s * (4 * d * d + 2 * d * self._hidden) + 2 * s * s * d
        return 6.0 * self.items(batch) * (patches + self.depth * block + d * self.classes)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of images in a batch."""
        return int(batch["label"].shape[0])

    @property
    def tokens(self) -> int:
        """The length of the sequence: one token per patch, and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def _hidden(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    def _layout(self) -> Layout:
        return resolve_layout("ViT", self.layout, LAYOUTS, AXES)

    def _block_weights(self) -> dict[str, Weight]:
        shape = BlockShape(
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.width // self.heads,
            hidden=self._hidden,
            gated=False,
            causal=False,
            rotary_base=None,
        )
        return {
            **attention_weights(shape, biased=True),
            **feedforward_weights(shape, biased=True),
        }

    def _logical_axes(self) -> dict[str, Any]:
        blocks = logical_axes(stack_layers(self._block_weights(), self.depth))
        return {**OUTER_AXES, "blocks": blocks}

    def _run(self, local: LocalFunction[Output], params: Params, batch: Batch) -> Output:
        self.check_batch(batch)
        self._check_images(batch["image"])
        sharding = ModelSharding.on_current_mesh("ViT", self._layout())
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
        self, sharding: ModelSharding, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B classes"]:
        x = tap("embedding", self._embed(sharding, params, image))
        sequences = x.shape[:2]
        # Use a row per token. With three dimensions XLA stores some of these arrays with the batch
        # innermost and transposes them for every matmul.
        x = x.reshape(-1, self.width)
        block = sharding.rematerialize(
            lambda x, stored: (self._block(sharding, x, sequences, stored), None),
            remat=self.remat,
            scanned=self.scan_layers,
        )
        if self.scan_layers:
            x, _ = lax.scan(block, x, params["blocks"])
        else:
            for index, stored in enumerate(unstack_layers(params["blocks"], self.depth)):
                with scope(f"blocks.{index}"):
                    x, _ = block(x, stored)
        return self._classify(sharding, params, x.reshape(*sequences, self.width))

    def _embed(
        self, sharding: ModelSharding, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B S D"]:
        """Return this device's shard of the tokens, with positions and padding."""
        batch, grid, size = image.shape[0], self.image // self.patch, self.patch
        pixels = scale_pixels(image, self.compute_dtype)
        pixels = pixels.reshape(batch, grid, size, grid, size, -1).swapaxes(2, 3)
        pixels = pixels.reshape(batch, grid * grid, -1)
        # The class token and the padding are patches of zeros with their own offsets.
        padding = self._padded_length(sharding) - self.tokens
        pixels = jnp.pad(pixels, ((0, 0), (1, padding), (0, 0)))
        names = ("patch", "patch_bias", "class_token", "positions")
        w = self._gathered(sharding, {name: params[name] for name in names})
        offset = w["positions"].at[0].add(w["class_token"]).at[1:].add(w["patch_bias"])
        offset = jnp.pad(offset, ((0, padding), (0, 0))).astype(pixels.dtype)
        patches = sharding.local_rows(pixels, "sequence", axis=1) @ w["patch"]
        tap_lazy(
            "patch", lambda: patches[:, 1 : self.tokens] + w["patch_bias"].astype(pixels.dtype)
        )
        return patches + sharding.local_rows(offset, "sequence")

    def _block(
        self,
        sharding: ModelSharding,
        x: Float[Array, "T D"],
        sequences: tuple[int, ...],
        stored: Weights,
    ) -> Float[Array, "T D"]:
        """Apply a block. `sequences` is `(B, S)` of the B·S rows of x."""
        w = self._gathered(sharding, stored)
        attention = partial(attend, causal=False, kernel=self.attention, length=self.tokens)
        shared: Any = {"norm": layer_norm, "sequences": sequences}
        project_heads, project_hidden = (
            sharding.projections(name, self.wire_dtype, self.implementation)
            for name in ("heads", "hidden")
        )
        x = attention_layer(x, w, project_heads, attend=attention, **shared)
        return feedforward_layer(x, w, project_hidden, activation=gelu, **shared)

    def _classify(
        self, sharding: ModelSharding, params: Params, x: Float[Array, "B S D"]
    ) -> Float[Array, "B classes"]:
        token = x[:, 0]
        if axes := sharding.axes("sequence"):
            # Only the first device of the ring has the class token.
            token = lax.psum(jnp.where(lax.axis_index(axes) == 0, token, 0), axes)
        names = ("norm", "shift", "head", "head_bias")
        w = self._gathered(sharding, {name: params[name] for name in names}, rows=("batch",))
        logits = tap("norm", layer_norm(token, w["norm"], w["shift"])) @ w["head"]
        return tap("head", logits + w["head_bias"].astype(logits.dtype))

    def _gathered(self, sharding: ModelSharding, stored: Weights, **rows: Any) -> Weights:
        all_axes = {**OUTER_AXES, **logical_axes(self._block_weights())}
        axes = {name: all_axes[name] for name in stored}
        return sharding.gathered(stored, axes, jnp.dtype(self.compute_dtype), **rows)

    def _padded_length(self, sharding: ModelSharding) -> int:
        uses_cudnn = self.attention == "cudnn" or (self.attention == "auto" and has_cudnn())
        multiple = math.lcm(sharding.shards("sequence"), CUDNN_MULTIPLE if uses_cudnn else 1)
        return -(-self.tokens // multiple) * multiple


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Compute the exact GELU `x · Φ(x)` in float32, without the tanh approximation.

    The backward pass needs only x. Automatic differentiation would save the factors of the
    derivative, on a GPU two more arrays of the hidden dimension.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps XLA from saving intermediate results of the forward pass.
    wide = lax.optimization_barrier(x).astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * math.pi) ** -0.5
    return ((g.astype(jnp.float32) * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + lax.erf(x * 0.5**0.5))


def vit_s16(**changes: Any) -> ViT:
    """Return ViT-S/16 with 22,050,664 parameters."""
    return replace(ViT(width=384, depth=12, heads=6), **changes)


def vit_b16(**changes: Any) -> ViT:
    """Return ViT-B/16 with 86,567,656 parameters."""
    return replace(ViT(width=768, depth=12, heads=12), **changes)


def vit_l16(**changes: Any) -> ViT:
    """Return ViT-L/16 with 304,326,632 parameters."""
    return replace(ViT(width=1024, depth=24, heads=16), **changes)
