"""Attention of one device's own heads: rotary positions, grouped queries, causal or full.

Nothing here communicates. Under tensor parallelism a device has whole heads for the whole
sequence, so this is the same code on one device and on many.

`kernel="auto"` takes what keeps the scores on the chip, where there is such a kernel:

| platform | kernel | for |
|---|---|---|
| TPU | splash, which JAX ships | 512 positions or more; padded to whole blocks of 128 |
| GPU | cuDNN | 16-bit types; positions and head_dim multiples of 8, head_dim up to 128 |
| else | XLA | everything |

The platform is the one that a program is lowered for; cuDNN has to be on the machine that does it.
Where XLA divides arrays between devices itself, outside of `jax.shard_map`, XLA's own is taken: it
cannot divide a TPU kernel.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from drumline.parallel.block import splash
from drumline.parallel.grouped.typed import by_platform

Kernel = Literal["auto", "xla", "cudnn", "splash"]

CUDNN_MULTIPLE = 8
"""cuDNN's attention has no gradient for other sequence lengths than multiples of this."""
_CUDNN_HEAD_DIM = 128


def rotate(x: Float[Array, "B S heads H"], *, base: float) -> Float[Array, "B S heads H"]:
    """Turn each pair (i, i + H/2) of a head by its position, slower for later pairs.

    The angles are in float32 whatever x is: bfloat16 cannot tell positions apart beyond 256.
    """
    half = x.shape[-1] // 2
    speed = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speed
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    causal: bool,
    kernel: Kernel,
    rotary_base: float | None = None,
    tokens: int | None = None,
) -> Float[Array, "B S N H"]:
    """Softmax attention, N/K queries to each key; scores and their sums are in float32.

    Args:
        query: of each head.
        key: of each head that N/K of the queries share.
        value: likewise.
        causal: whether a token sees only those before it.
        kernel: `"auto"`, or one that is taken in any case: `"xla"`, `"cudnn"` (GPUs only),
            `"splash"` (TPUs only).
        rotary_base: turns queries and keys by their positions; None leaves them.
        tokens: how many of the S there are to be seen, the others being padding; None for all.
    """
    if rotary_base is not None:
        query, key = rotate(query, base=rotary_base), rotate(key, base=rotary_base)
    fused = partial(splash.attend, causal=causal, tokens=tokens)
    library = partial(_dot_product_attention, causal=causal, tokens=tokens)
    if kernel == "splash":
        return fused(query, key, value)
    if kernel != "auto":
        return library(query, key, value, kernel=kernel)
    branches: dict[str, Callable[..., Any]] = {}
    if splash.takes(query) and not _divided_by_xla():
        branches["tpu"] = fused
    if has_cudnn() and _cudnn_takes(query):
        branches["cuda"] = partial(library, kernel="cudnn")
    plain = partial(library, kernel="xla")
    if not branches:
        return plain(query, key, value)
    # For whoever reads the program: this is one kernel where it matters, whatever it is here.
    with jax.named_scope(f"kernel[flash_attention work={0.5 if causal else 1.0}]"):
        out: jax.Array = by_platform(query, key, value, default=plain, **branches)
    return out


def has_cudnn() -> bool:
    """Whether this machine has a GPU that cuDNN has fused attention for: Ampere and later."""
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
    tokens: int | None,
    kernel: Literal["xla", "cudnn"],
) -> jax.Array:
    batch, length = query.shape[:2]
    seen = None if tokens is None or tokens == length else jnp.full(batch, tokens, jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        key_value_seq_lengths=seen,
        implementation=kernel,
    )


def _cudnn_takes(query: jax.Array) -> bool:
    length, _, features = query.shape[1:]
    even = length % CUDNN_MULTIPLE == 0 and features % CUDNN_MULTIPLE == 0
    return query.dtype.itemsize == 2 and even and features <= _CUDNN_HEAD_DIM


def _divided_by_xla() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and kind != AxisType.Manual for kind, size in kinds)
