"""The published steps: the settings of each recipe, and the line it printed.

All come from AI-Hypercomputer/tpu-recipes at c8cfe2f; a source is a path there. If a recipe names a
configuration of MaxText instead of printing it, the note states the commit of MaxText that was
read. Precision is bfloat16 in all of them, and none accumulates gradients.

MaxText counts the full square of the attention in `tflops` before its pull request 1988 and half of
it afterwards. `half_attention` records the version that printed the row. Compare seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, AxisType

from published.attention import Flash
from published.decoder import Remat, Training
from published.models import (
    GEMMA3_12B,
    GPT3_175B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    Model,
)


@dataclass(frozen=True)
class PublishedStep:
    """One training step on TPUs, timed by the publishers of the recipe."""

    name: str
    model: Model
    slice: str
    """The name for `drumline.chips.slice_of`."""
    batch: int
    """The sequences on each device."""
    length: int
    seconds: float
    tflops: float
    """The TFLOP/s per device printed by MaxText; per chip on tpu7x."""
    source: str
    mesh: tuple[tuple[str, int], ...]
    """The mesh axes with more than one device, axes between slices first."""
    remat: str
    """The policy in the recipe's words."""
    remat_values: Remat
    """The values kept by this policy."""
    flash: Flash
    slices: int = 1
    weight_dtype: str = "float32"
    mu_dtype: str | None = None
    """The dtype of AdamW's first moment if the recipe sets it; otherwise that of the weights."""
    vocab_tiles: int = 1
    half_attention: bool = False
    printed_tokens: int | None = None
    """The tokens of the step in the log line (`total_weights`)."""
    notes: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> int:
        """The devices of all slices as JAX counts them: two per chip on tpu7x, otherwise one."""
        return math.prod(size for _, size in self.mesh)

    @property
    def tokens(self) -> int:
        """The tokens of one step, all devices together."""
        return self.devices * self.batch * self.length

    @property
    def training(self) -> Training:
        """The arguments of `decoder.step`."""
        return Training(
            model=self.model,
            batch=self.devices * self.batch,
            length=self.length,
            remat=self.remat_values,
            flash=self.flash,
            weight_dtype=self.weight_dtype,
            mu_dtype=self.mu_dtype or self.weight_dtype,
            vocab_tiles=self.vocab_tiles,
        )

    def abstract_mesh(self) -> AbstractMesh:
        """Return the recipe's mesh without devices."""
        names, sizes = zip(*self.mesh, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


_QKV = ("query_proj", "key_proj", "value_proj")
_SQUARE = Flash((2048, 2048), (2048, 2048))
"""The blocks of 2048 by 2048 with the fused backward kernel."""
_UNFUSED = Flash((1024, 512), (2048, 512), (2048, 512))
"""The query blocks of these recipes with MaxText's default key blocks of 512, not fused."""
_LAYER_QKV_OUT = "custom: decoder_layer_input, out_proj, query, key, value offloaded"
_LAYER_QKV = "custom: decoder_layer_input, query, key, value offloaded"


def _llama_8b(chips: int, batch: int, seconds: float, tflops: float, tokens: int) -> PublishedStep:
    flags = "collective matmul off" if chips <= 32 else "collective matmul on"
    return PublishedStep(
        name=f"llama3.1-8b v6e-{chips}",
        model=LLAMA_8B,
        slice=f"v6e-{chips}",
        batch=batch,
        length=8192,
        seconds=seconds,
        tflops=tflops,
        source=f"training/trillium/Llama3.1-8B-MaxText/v6e-{chips}/README.md",
        mesh=(("fsdp", chips),),
        remat=_LAYER_QKV_OUT,
        remat_values=Remat(offloaded=("decoder_layer_input", "out_proj", *_QKV)),
        flash=_SQUARE,
        printed_tokens=tokens,
        notes=("MaxText tpu-recipes-v0.1.4, JAX 0.6.1", flags),
    )


def _llama_70b(
    chips: int,
    batch: int,
    seconds: float,
    tflops: float,
    tokens: int,
    *notes: str,
    dtype: str = "float32",
) -> PublishedStep:
    return PublishedStep(
        name=f"llama3.1-70b v6e-{chips}",
        model=LLAMA_70B,
        slice=f"v6e-{chips}",
        batch=batch,
        length=8192,
        seconds=seconds,
        tflops=tflops,
        source=f"training/trillium/Llama3.1-70B-MaxText/v6e-{chips}/README.md",
        mesh=(("fsdp", chips),),
        remat=_LAYER_QKV,
        remat_values=Remat(offloaded=("decoder_layer_input", *_QKV)),
        flash=_SQUARE,
        weight_dtype=dtype,
        printed_tokens=tokens,
        notes=("MaxText tpu-recipes-v0.1.4, JAX 0.6.1", *notes),
    )


_STEPS = (
    _llama_8b(8, 3, 3.443, 413.433, 196_608),
    _llama_8b(16, 3, 3.393, 419.485, 393_216),
    _llama_8b(32, 3, 3.495, 407.225, 786_432),
    _llama_8b(64, 5, 5.652, 419.701, 2_621_440),
    _llama_8b(128, 4, 4.602, 412.319, 4_194_304),
    _llama_8b(256, 4, 4.546, 417.397, 8_388_608),
    _llama_70b(
        32, 2, 17.790, 443.385, 524_288,
        "weights and both moments in bfloat16, unlike the other rows of this model",
        "collective matmul off",
        dtype="bfloat16",
    ),
    _llama_70b(64, 2, 18.688, 422.091, 1_048_576),
    _llama_70b(128, 4, 34.786, 453.500, 4_194_304),
    _llama_70b(256, 5, 42.656, 462.297, 10_485_760),
    PublishedStep(
        name="llama3.1-405b 2x v6e-256",
        model=LLAMA_405B,
        slice="v6e-256",
        slices=2,
        batch=1,
        length=8192,
        seconds=54.803,
        tflops=392.454,
        source="training/trillium/Llama3.1-405B-MaxText/README.md",
        mesh=(("dcn_fsdp", 2), ("fsdp", 256)),
        remat="custom: decoder_layer_input offloaded",
        remat_values=Remat(offloaded=("decoder_layer_input",)),
        flash=_UNFUSED,
        printed_tokens=4_194_304,
        notes=(
            "MaxText tpu-recipes-v0.1.2",
            "FSDP spans both slices: weights are gathered over the data centre's network too",
        ),
    ),
    PublishedStep(
        name="gpt3-175b v6e-256",
        model=GPT3_175B,
        slice="v6e-256",
        batch=3,
        length=2048,
        seconds=17.182,
        tflops=384.891,
        source="training/trillium/GPT3-175B-MaxText/bf16/README.md",
        mesh=(("fsdp", 256),),
        remat="full",
        remat_values=Remat(),
        flash=_UNFUSED,
        printed_tokens=1_572_864,
        notes=(
            "MaxText tpu-recipes-v0.1.2",
            "the sequence length is MaxText's default; total_weights confirms it",
            "adam_pax instead of AdamW, and q, k, v as one product",
        ),
    ),
    PublishedStep(
        name="mixtral-8x7b v6e-256",
        model=MIXTRAL_8X7B,
        slice="v6e-256",
        batch=12,
        length=4096,
        seconds=13.484,
        tflops=302.311,
        source="training/trillium/Mixtral-8x7B-MaxText/README.md",
        mesh=(("fsdp", 256),),
        remat=_LAYER_QKV_OUT,
        remat_values=Remat(offloaded=("decoder_layer_input", "out_proj", *_QKV)),
        flash=Flash((2048, 512), (2048, 512), (2048, 512)),
        printed_tokens=12_582_912,
        notes=(
            "MaxText tpu-recipes-v0.1.2",
            "drops tokens at a capacity factor of 1.25, by products with masks: neither their "
            "FLOPs nor the quarter of capacity is in the printed TFLOP/s",
        ),
    ),
    PublishedStep(
        name="mixtral-8x22b v6e-256",
        model=MIXTRAL_8X22B,
        slice="v6e-256",
        batch=8,
        length=4096,
        seconds=24.706,
        tflops=332.463,
        source="training/trillium/Mixtral-8x22B-MaxText/README.md",
        mesh=(("fsdp", 64), ("expert", 4)),
        remat=_LAYER_QKV_OUT,
        remat_values=Remat(offloaded=("decoder_layer_input", "out_proj", *_QKV)),
        flash=Flash((2048, 512), (2048, 512), (2048, 512)),
        weight_dtype="bfloat16",
        printed_tokens=8_388_608,
        notes=(
            "unsure: the recipe prints no configuration and its commit of MaxText (261a8be) has "
            "none of this name; taken from tpu-recipes-v0.1.0, which is later",
            "custom_mesh hybrid_ring_64x4: rings of 64 for FSDP, squares of 4 for the experts",
        ),
    ),
    PublishedStep(
        name="mistral-7b v6e-8",
        model=MISTRAL_7B,
        slice="v6e-8",
        batch=6,
        length=8192,
        seconds=6.320,
        tflops=431.981,
        source="training/trillium/Mistral-7B-MaxText/README.md",
        mesh=(("fsdp", 8),),
        remat=_LAYER_QKV_OUT,
        remat_values=Remat(offloaded=("decoder_layer_input", "out_proj", *_QKV)),
        flash=_SQUARE,
        printed_tokens=393_216,
        notes=("MaxText tpu-recipes-v0.1.2", "no sliding window in MaxText's model"),
    ),
    PublishedStep(
        name="gemma3-12b v6e-256",
        model=GEMMA3_12B,
        slice="v6e-256",
        batch=1,
        length=32768,
        seconds=7.318,
        tflops=349.442,
        source="training/trillium/Gemma3-12B-MaxText/v6e-256/README.md",
        mesh=(("fsdp", 256),),
        remat="custom: decoder_layer_input on the device, query, key, value rematerialised",
        remat_values=Remat(saved=("decoder_layer_input",)),
        flash=Flash((1024, 1024), (512, 2048), (1024, 1024)),
        vocab_tiles=16,
        half_attention=True,
        printed_tokens=8_388_608,
        notes=(
            "MaxText tpu-recipes-v0.1.5",
            "five layers of a window of 1024, then one of the whole sequence",
            "unsure: whether the head's gradient is reduced once or, as in our program, per tile",
        ),
    ),
    PublishedStep(
        name="llama3.1-405b v5p-1024",
        model=LLAMA_405B,
        slice="v5p-1024",
        batch=2,
        length=8192,
        seconds=131.474,
        tflops=314.530,
        source="training/v5p/Llama3.1-405B-MaxText/README.md",
        mesh=(("fsdp", 512),),
        remat="custom: context and mlpwo offloaded",
        remat_values=Remat(saved=("decoder_layer_input",), offloaded=("context", "mlpwo")),
        flash=Flash((2048, 2048), (2048, 2048), (2048, 2048)),
        vocab_tiles=4,
        half_attention=True,
        printed_tokens=8_388_608,
        notes=(
            "configuration llama3_1_405b_8192_v5p_1024 of MaxText at 3eb77db, JAX 0.7.0",
            "the layer's input stays on the device: that is the default of a custom policy",
        ),
    ),
    PublishedStep(
        name="llama3.1-70b tpu7x-128",
        model=LLAMA_70B,
        slice="tpu7x-128",
        batch=2,
        length=8192,
        seconds=12.20,
        tflops=1207.05,
        source="training/ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4/xpk/run_recipe.sh",
        mesh=(("fsdp", 128),),
        remat="custom: decoder_layer_input, context, query, key, value on the device",
        remat_values=Remat(saved=("decoder_layer_input", "context", *_QKV)),
        flash=_SQUARE,
        mu_dtype="bfloat16",
        half_attention=True,
        notes=(
            "seconds and TFLOP/s of a chip from training/ironwood/README.md, no log line",
            "MaxText maxtext-tutorial-v1.5.0; two devices a chip, global batch 256",
        ),
    ),
    PublishedStep(
        name="llama3.1-405b tpu7x-512",
        model=LLAMA_405B,
        slice="tpu7x-512",
        batch=3,
        length=8192,
        seconds=98.34,
        tflops=1261.40,
        source="training/ironwood/llama3.1-405b/8k-bf16-tpu7x-4x8x8/run_recipe.sh",
        mesh=(("fsdp", 512),),
        remat="custom: decoder_layer_input and mlpwo offloaded, key and value on the device",
        remat_values=Remat(
            saved=("key_proj", "value_proj"), offloaded=("decoder_layer_input", "mlpwo")
        ),
        flash=_SQUARE,
        mu_dtype="bfloat16",
        vocab_tiles=4,
        half_attention=True,
        notes=(
            "seconds and TFLOP/s of a chip from training/ironwood/README.md, no log line",
            "MaxText a0fceb5; two devices a chip, global batch 1536",
        ),
    ),
)  # fmt: skip

ROWS = {row.name: row for row in _STEPS}
"""All rows by name, in the order of the recipes."""
