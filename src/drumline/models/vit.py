"""The Vision Transformer of timm's `vit_*_patch16_224`: S/16, B/16 and L/16.

    images[B, 224, 224, 3] → patches[B, 196, 768] → tokens[B, 197, D], a class token first
        → blocks of attention and feed-forward, pre-norm → norm → head on the class token

The sequence carries a few tokens of padding where a kernel or a mesh wants a rounder length; no
other token ever sees them. Under tensor parallelism each device has its own part of the sequence
between the projections, and its own heads and hidden features within them.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, PRNGKeyArray

from drumline.models.activations import gelu
from drumline.models.images import as_floats, judge
from drumline.models.layouts import (
    Dims,
    Division,
    Layout,
    Metrics,
    OnMesh,
    Params,
    Weights,
    check_apart,
    check_together,
    layers,
    read_layout,
)
from drumline.models.losses import IGNORE_INDEX, check_numbers
from drumline.models.remat import Remat, check_remat
from drumline.parallel.block import steps
from drumline.parallel.block.attention import CUDNN_MULTIPLE, Kernel, attend, has_cudnn
from drumline.parallel.block.norms import layer_norm
from drumline.parallel.block.shape import BlockShape
from drumline.parallel.block.weights import (
    Weight,
    attention_weights,
    axes_by_name,
    begin,
    feedforward_weights,
    stacked,
)
from drumline.parallel.rings.ring import read_wire_dtype
from drumline.parallel.taps import look, scope, tap

AXES = ("batch", "sequence", "embed", "heads", "hidden")
"""Logical axes: examples, tokens, a token's vector, attention heads, feed-forward features."""

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

OUTSIDE: dict[str, Dims] = {
    "patch": (None, "embed"),
    "patch_bias": (None,),
    "class_token": (None,),
    "positions": (None, None),
    "norm": (None,),
    "shift": (None,),
    "head": ("embed", None),
    "head_bias": (None,),
}
"""Weights before and after the blocks, and the logical axes of their dimensions."""


@dataclass(frozen=True)
class ViT(OnMesh):
    """The sizes of a Vision Transformer, how it computes, and how it lies on a mesh.

    Attributes:
        width: D, the length of a token's vector.
        depth: L, the number of blocks.
        heads: N, the number of attention heads, of D/N features each.
        image: pixels on a side.
        patch: pixels on a side of a patch.
        channels: numbers in a pixel.
        classes: how many there are to tell apart.
        hidden: F, the width of the feed-forward part; 4·D if None.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type to multiply in; the weights are stored in float32.
        wire_dtype: the type in which sums travel on the rings of divided weights; None is float32,
            `"bfloat16"` half the bytes, rounded at every hop.
        attention: `"auto"` for the best kernel of the platform, or the name of one
            (`drumline.parallel.block.attention`).
        scan_layers: whether one compiled block serves all layers, in a loop.
        remat: what the blocks keep for the backward pass, the rest being computed again: True or
            `"full"` for nothing, `"projections"`, `"dots"`, False or `"none"` for everything
            (`drumline.models.remat`).
        ignore_index: the label of an image that counts neither for the loss nor for the accuracy.
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
    attention: Kernel = "auto"
    scan_layers: bool = False
    remat: Remat = False
    ignore_index: int = IGNORE_INDEX

    item = "images"

    def __post_init__(self) -> None:
        """Refuse sizes and layouts that no mesh could mend."""
        if self.width % self.heads:
            raise ValueError(f"ViT: width {self.width} cannot be divided into {self.heads} heads")
        if self.image % self.patch:
            raise ValueError(
                f"ViT: images of {self.image} pixels cannot be cut into patches of {self.patch}"
            )
        check_remat("ViT", self.remat)
        read_wire_dtype("ViT", self.wire_dtype)
        if self.attention not in get_args(Kernel):
            known = ", ".join(get_args(Kernel))
            raise ValueError(f"ViT: attention is {self.attention!r}; it can be {known}")
        check_together("ViT", self._layout(), ("sequence", "heads", "hidden"))
        check_apart("ViT", self._layout(), "batch", "sequence")

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights from normals of σ = 0.02 cut off at 2σ, as timm does, but the patches'.

        Those have variance 1/(their inputs). Biases and the class token are zero.
        """
        d, keys = self.width, iter(jax.random.split(key, 9))

        def draw(*dims: int, sigma: float = 0.02) -> jax.Array:
            return jax.random.truncated_normal(next(keys), -2, 2, dims) * sigma

        blocks = begin(stacked(self._block_weights(), self.depth), lambda w: draw(*w.dims))
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
        """The mean cross-entropy of a batch, and its accuracy.

        A label that is no class is refused where its value is known. Under `jit` it is not, and
        the loss is NaN.

        Args:
            params: as `init` draws them.
            batch: "image", `[B, H, W, C]`, bytes from 0 to 255 or floats; "label", `int[B]`, with
                `ignore_index` for an image that does not count.
            key: for models with randomness in them; here there is none.
        """
        del key
        self.check_batch(batch)
        self._check_images(batch["image"])
        here = Division.here("ViT", self._layout())
        here.check_rows("a batch of", self.items(batch), "batch")
        return here.run(self._local_loss, params, self._dims(), batch)

    def logits(
        self, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B classes"]:
        """The scores of each class, on one device. Every step of the way can be tapped."""
        self._check_images(image)
        here = Division.whole("ViT", self._layout())
        return self._local_logits(here, params, image)

    def _check_images(self, image: Num[Array, "B height width C"]) -> None:
        expected = (self.image, self.image, self.channels)
        if image.shape[1:] != expected:
            raise ValueError(f"ViT: images are {image.shape[1:]}, but the model takes {expected}")

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Refuse labels that are no classes, where their values are known."""
        check_numbers("ViT: label", batch["label"], self.classes, self.ignore_index)

    def flops(self, batch: Mapping[str, Any]) -> float:
        """FLOPs of a training step: of the multiplications, three times those of the forward pass.

        That is 6 for each weight and token, and 12·S·D a token and block for attention over S
        tokens; norms, padding and what is computed again do not count.
        """
        d, s = self.width, self.tokens
        patches = (s - 1) * self.patch**2 * self.channels * d
        block = s * (4 * d * d + 2 * d * self._hidden) + 2 * s * s * d
        return 6.0 * self.items(batch) * (patches + self.depth * block + d * self.classes)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Images in a batch."""
        return int(batch["label"].shape[0])

    @property
    def tokens(self) -> int:
        """The length of the sequence: one token a patch, and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def _hidden(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    def _layout(self) -> Layout:
        return read_layout("ViT", self.layout, LAYOUTS, AXES)

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

    def _dims(self) -> dict[str, Any]:
        return {**OUTSIDE, "blocks": axes_by_name(stacked(self._block_weights(), self.depth))}

    def _local_loss(
        self, here: Division, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        logits = self._local_logits(here, params, batch["image"])
        return judge(logits, batch["label"], ignore_index=self.ignore_index)

    def _local_logits(
        self, here: Division, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B classes"]:
        x = tap("embedding", self._embed(here, params, image))
        rows = x.shape[:2]
        # One row for each token: given three dimensions, XLA lays some of these arrays out with the
        # batch innermost, and transposes them for every multiplication.
        x = x.reshape(-1, self.width)
        block = here.block(
            lambda x, stored: (self._block(here, x, rows, stored), None),
            remat=self.remat,
            scanned=self.scan_layers,
        )
        if self.scan_layers:
            x, _ = lax.scan(block, x, params["blocks"])
        else:
            for number, stored in enumerate(layers(params["blocks"], self.depth)):
                with scope(f"blocks.{number}"):
                    x, _ = block(x, stored)
        return self._classify(here, params, x.reshape(*rows, self.width))

    def _embed(
        self, here: Division, params: Params, image: Num[Array, "B height width C"]
    ) -> Float[Array, "B S D"]:
        """Tokens of the device's own part of the sequence, with positions and padding."""
        batch, side, cut = image.shape[0], self.image // self.patch, self.patch
        rows = as_floats(image, self.compute_dtype)
        rows = rows.reshape(batch, side, cut, side, cut, -1).swapaxes(2, 3)
        rows = rows.reshape(batch, side * side, -1)
        # The class token is a patch of zeros with an offset of its own; so is padding.
        padding = self._padded(here) - self.tokens
        rows = jnp.pad(rows, ((0, 0), (1, padding), (0, 0)))
        names = ("patch", "patch_bias", "class_token", "positions")
        w = self._at_hand(here, {name: params[name] for name in names})
        offset = w["positions"].at[0].add(w["class_token"]).at[1:].add(w["patch_bias"])
        offset = jnp.pad(offset, ((0, padding), (0, 0))).astype(rows.dtype)
        patches = here.own_rows(rows, "sequence", axis=1) @ w["patch"]
        look("patch", lambda: patches[:, 1 : self.tokens] + w["patch_bias"].astype(rows.dtype))
        return patches + here.own_rows(offset, "sequence")

    def _block(
        self, here: Division, x: Float[Array, "T D"], rows: tuple[int, ...], stored: Weights
    ) -> Float[Array, "T D"]:
        """One block further; `rows` are the images and their tokens that make up the T rows."""
        w = self._at_hand(here, stored)
        mix = partial(attend, causal=False, kernel=self.attention, tokens=self.tokens)
        shared: Any = {"norm": layer_norm, "sequences": rows}
        heads, hidden = (here.projections(name, self.wire_dtype) for name in ("heads", "hidden"))
        x = steps.attention(x, w, heads, attend=mix, **shared)
        return steps.feedforward(x, w, hidden, activation=gelu, **shared)

    def _classify(
        self, here: Division, params: Params, x: Float[Array, "B S D"]
    ) -> Float[Array, "B classes"]:
        token = x[:, 0]
        if over := here.axes("sequence"):
            # Only the first device of the ring has it.
            token = lax.psum(jnp.where(lax.axis_index(over) == 0, token, 0), over)
        names = ("norm", "shift", "head", "head_bias")
        w = self._at_hand(here, {name: params[name] for name in names}, rows=("batch",))
        logits = tap("norm", layer_norm(token, w["norm"], w["shift"])) @ w["head"]
        return tap("head", logits + w["head_bias"].astype(logits.dtype))

    def _at_hand(self, here: Division, stored: Weights, **rows: Any) -> Weights:
        known = {**OUTSIDE, **axes_by_name(self._block_weights())}
        dims = {name: known[name] for name in stored}
        return here.at_hand(stored, dims, jnp.dtype(self.compute_dtype), **rows)

    def _padded(self, here: Division) -> int:
        cudnn = self.attention == "cudnn" or (self.attention == "auto" and has_cudnn())
        multiple = lcm(here.count("sequence"), CUDNN_MULTIPLE if cudnn else 1)
        return -(-self.tokens // multiple) * multiple


def vit_s16(**changes: Any) -> ViT:
    """ViT-S/16: 22,050,664 parameters."""
    return replace(ViT(width=384, depth=12, heads=6), **changes)


def vit_b16(**changes: Any) -> ViT:
    """ViT-B/16: 86,567,656 parameters."""
    return replace(ViT(width=768, depth=12, heads=12), **changes)


def vit_l16(**changes: Any) -> ViT:
    """ViT-L/16: 304,326,632 parameters."""
    return replace(ViT(width=1024, depth=24, heads=16), **changes)
