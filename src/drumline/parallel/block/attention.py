"""Attention over the heads of one device: rotary embedding, grouped queries, causal or full.

Attention needs no communication, because under tensor parallelism a device has complete heads for
the full sequence.

`kernel="auto"` picks a kernel that keeps the scores on the chip if there is one:

| platform | kernel | condition |
|---|---|---|
| TPU | splash, from JAX | at least 512 positions; padded to blocks of 128 |
| GPU | cuDNN | 16-bit types; positions and head_dim multiples of 8, head_dim up to 128 |
| other | XLA | |

The platform is known when the program is lowered; cuDNN must be installed on the machine that
lowers it. Outside of `jax.shard_map`, where XLA shards the arrays itself, XLA's attention is used,
because XLA cannot shard a TPU kernel.
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import pi, sqrt
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from drumline.parallel.grouped.blocks import match_varying
from drumline.parallel.transforms import ArrayType, trace_without_mesh
from drumline.parallel.typed import by_platform

Kernel = Literal["auto", "xla", "cudnn", "splash"]

CUDNN_MULTIPLE = 8
"""cuDNN's attention has a gradient only if the sequence length is a multiple of this."""
_CUDNN_MAX_HEAD_DIM = 128

_SPLASH_LANES = 128
"""The number of positions in the smallest block of the splash kernel."""
_SPLASH_MIN_LENGTH = 512
"""The sequence length from which splash is used. Its layout has heads before positions. The
transposes take time proportional to the length, XLA's attention to its square."""
_SPLASH_BLOCKS = (512, 384, 256, 128)
"""Block lengths, best first. Longer blocks read the keys less often, but blocks longer than these
do not fit in the memory."""

HeadMajor = Float[Array, "B heads S H"]


class RotaryScaling(NamedTuple):
    """Slower rotations for longer sequences than in pre-training.

    With a factor alone, all frequencies are divided by it ("linear"). With the other values, which
    have the names of Llama's configurations, only long wavelengths are ("llama3").
    """

    factor: float
    low_freq_factor: float | None = None
    """Pairs with at most this number of turns within the original length are scaled in full."""
    high_freq_factor: float | None = None
    """Pairs with at least this number of turns are not scaled."""
    original_max_position_embeddings: int | None = None
    """The length of the sequences in pre-training."""


def rotary_frequencies(
    count: int, base: float, scaling: RotaryScaling | None
) -> Float[Array, " count"]:
    """Return the float32 angles between neighbouring positions, for each pair of a head."""
    frequency = base ** (-jnp.arange(count, dtype=jnp.float32) / count)
    if scaling is None:
        return frequency
    factor, low, high, length = scaling
    scaled = frequency / factor
    if low is None or high is None or length is None:
        return scaled
    turns = frequency * (length / (2 * pi))
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return kept * frequency + (1 - kept) * scaled


def apply_rotary(
    x: Float[Array, "B S heads H"], *, base: float, scaling: RotaryScaling | None = None
) -> Float[Array, "B S heads H"]:
    """Rotate the pairs (i, i + H/2) of a head by angles proportional to the position.

    The angles are float32 for any type of x: bfloat16 cannot represent positions above 256.
    """
    frequency = rotary_frequencies(x.shape[-1] // 2, base, scaling)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    kernel: Kernel,
    rotary_base: float | None = None,
    rotary_scaling: RotaryScaling | None = None,
    length: int | None = None,
) -> Float[Array, "B S N H"]:
    """Apply softmax attention, N/K queries per key. Scores and their sums are float32.

    Args:
        query: the queries.
        key: the keys; N/K queries share a key.
        value: the values; N/K queries share a value.
        causal: True if a token attends only to itself and earlier tokens.
        kernel: `"auto"`, or a kernel to use in any case: `"xla"`, `"cudnn"` (GPUs only), `"splash"`
            (TPUs only).
        rotary_base: the base of the rotary embedding of queries and keys, or None for none.
        rotary_scaling: the scaling of its frequencies.
        length: the number of tokens that are not padding; None if there is no padding.
    """
    if rotary_base is not None:
        query = apply_rotary(query, base=rotary_base, scaling=rotary_scaling)
        key = apply_rotary(key, base=rotary_base, scaling=rotary_scaling)
    splash = partial(attend_splash, causal=causal, length=length)
    library = partial(_dot_product_attention, causal=causal, length=length)
    if kernel == "splash":
        return splash(query, key, value)
    if kernel != "auto":
        return library(query, key, value, kernel=kernel)
    branches: dict[str, Callable[..., Any]] = {}
    if _splash_supports(query) and not _sharded_by_xla():
        branches["tpu"] = splash
    if has_cudnn() and _cudnn_supports(query):
        branches["cuda"] = partial(library, kernel="cudnn")
    default = partial(library, kernel="xla")
    if not branches:
        return default(query, key, value)
    # Marks the operations as a kernel for the cost model.
    with jax.named_scope(f"kernel[flash_attention work={0.5 if causal else 1.0}]"):
        out: jax.Array = by_platform(query, key, value, default=default, **branches)
    return out


def has_cudnn() -> bool:
    """Return True if this machine has a GPU that supports cuDNN's attention: Ampere or later."""
    if jax.default_backend() != "gpu":
        return False
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return capability[:1].isdigit() and float(capability) >= 8.0


def _dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    length: int | None,
    kernel: Literal["xla", "cudnn"],
) -> jax.Array:
    batch, padded = query.shape[:2]
    lengths = None if length is None or length == padded else jnp.full(batch, length, jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        implementation=kernel,
    )


def _cudnn_supports(query: jax.Array) -> bool:
    length, _, head_dim = query.shape[1:]
    aligned = length % CUDNN_MULTIPLE == 0 and head_dim % CUDNN_MULTIPLE == 0
    return query.dtype.itemsize == 2 and aligned and head_dim <= _CUDNN_MAX_HEAD_DIM


def _sharded_by_xla() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and kind != AxisType.Manual for kind, size in axes)


# Splash


def _splash_supports(query: jax.Array) -> bool:
    long_enough = query.shape[1] >= _SPLASH_MIN_LENGTH
    return long_enough and jnp.issubdtype(query.dtype, jnp.floating)


def attend_splash(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    length: int | None,
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Apply attention with JAX's splash kernel for TPUs, also under a checked `shard_map`.

    The kernel keeps the scores on the chip and skips blocks that are fully masked. It needs heads
    before positions, whole blocks of 128 positions, scaled queries, and one example at a time.
    `interpret` runs it without a TPU, slowly. The other arguments are those of `attend`.
    """
    padded_length = query.shape[1]
    scaled = (query.astype(jnp.float32) / sqrt(query.shape[-1])).astype(query.dtype)
    padding = -padded_length % _SPLASH_LANES

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))

    valid = padded_length if length is None else length
    # Causal attention needs no mask for padding to full blocks, because queries after the last
    # token are discarded.
    masked = valid < padded_length + padding and (not causal or valid < padded_length)
    kernel = _Splash(causal, valid if masked else None, interpret)
    out = _splash(kernel, *match_varying(by_head(scaled), by_head(key), by_head(value)))
    return jnp.swapaxes(out[:, :, :padded_length], 1, 2)


class _Splash(NamedTuple):
    causal: bool
    length: int | None
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(kernel: _Splash, query: HeadMajor, key: HeadMajor, value: HeadMajor) -> HeadMajor:
    return _splash_forward(kernel, query, key, value)[0]


def _splash_forward(
    kernel: _Splash, query: HeadMajor, key: HeadMajor, value: HeadMajor
) -> tuple[HeadMajor, Any]:
    forward = _splash_passes(kernel, ArrayType.of(query), ArrayType.of(key)).forward
    out, *residuals = match_varying(query, *forward(query, key, value))[1:]
    return out, (query, key, residuals)


def _splash_backward(
    kernel: _Splash, saved: Any, g: HeadMajor
) -> tuple[HeadMajor, HeadMajor, HeadMajor]:
    query, key, residuals = saved
    backward = _splash_passes(kernel, ArrayType.of(query), ArrayType.of(key)).backward
    dquery, dkey, dvalue = match_varying(query, *backward(*residuals, g))[1:]
    return dquery, dkey, dvalue


_splash.defvjp(_splash_forward, _splash_backward)


class _SplashPasses(NamedTuple):
    forward: Callable[..., list[jax.Array]]
    """Maps query, key and value to the output and the residuals."""
    backward: Callable[..., list[jax.Array]]
    """Maps the residuals and the output's gradient to the gradients of query, key and value."""


@cache
def _splash_passes(kernel: _Splash, query: ArrayType, key: ArrayType) -> _SplashPasses:
    def forward(*arrays: jax.Array) -> Any:
        return jax.vjp(jax.vmap(_splash_kernel(kernel, query)), *arrays)

    traced_forward = trace_without_mesh(forward, query, key, key)
    out, pullback = traced_forward.result
    residuals, structure = jax.tree.flatten(pullback)

    def backward(*arrays: jax.Array) -> Any:
        return jax.tree.unflatten(structure, arrays[:-1])(arrays[-1])

    traced_backward = trace_without_mesh(backward, *map(ArrayType.of, (*residuals, out)))
    return _SplashPasses(traced_forward.call, traced_backward.call)


def _splash_kernel(kernel: _Splash, query: ArrayType) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, heads, length, _ = query.shape
    block = next(block for block in _SPLASH_BLOCKS if length % block == 0)
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_kv"), block)
    sizes |= dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    shape = (length, length)
    mask = masks.CausalMask(shape) if kernel.causal else masks.FullMask(shape)
    run = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        interpret=kernel.interpret,
    )
    if kernel.length is None:
        return partial(run)
    # Tokens attend only within their segment. Padding keys are a second segment without queries.
    position = jnp.arange(length, dtype=jnp.int32)
    key_segments = (position >= kernel.length).astype(jnp.int32)
    segments = splash.SegmentIds(jnp.zeros_like(position), key_segments)
    return partial(run, segment_ids=segments)
