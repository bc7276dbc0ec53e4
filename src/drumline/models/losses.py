"""Cross-entropy with sharded classes, and the inputs and losses of image classifiers.

If the classes are sharded, no device gathers the logits. For every row the devices exchange the
largest logit, the sum of exponentials and the target's logit. The backward pass saves the logits in
their type and the logarithm of the sum. Automatic differentiation would save float32 exponentials.
"""

# Shapes in the types are not Python expressions.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

from drumline.models.sharding import sum_over_devices

IGNORE_INDEX = -100
"""The default target to ignore, the same as in most libraries."""

Total = tuple[jax.Array, jax.Array]
"""The sum of a metric over the rows that count, and their number."""
Reduced = TypeVar("Reduced", jax.Array, Total)

Residuals = tuple[jax.Array, jax.Array, jax.Array]


def cross_entropy(
    logits: Float[Array, "*rows V"],
    targets: Int[Array, "*rows"],
    axes: tuple[str, ...] = (),
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Float[Array, "*rows"]:
    """Return the negative log-probability of each target in float32.

    A target of `ignore_index` has a loss of zero and no gradient. Other targets out of range have a
    loss and gradient of NaN, because compiled code cannot raise an error.

    Args:
        logits: this device's shard of the classes.
        targets: indices into the classes of all devices.
        axes: the mesh axes that shard the classes, inside `jax.shard_map`.
        ignore_index: the target to ignore.
    """
    return _cross_entropy(axes, ignore_index, logits, targets.astype(jnp.int32))


def masked_mean(
    values: Float[Array, "*rows"], targets: Int[Array, "*rows"], *, ignore_index: int
) -> Float[Array, ""]:
    """Return the float32 mean over the rows of all devices, without ignored targets.

    The mean is zero if all targets are ignored.
    """
    total, count = masked_total(values, targets, ignore_index=ignore_index)
    return total / jnp.maximum(count, 1.0)


def masked_total(
    values: Float[Array, "*rows"], targets: Int[Array, "*rows"], *, ignore_index: int
) -> Total:
    """Return the float32 sum over the rows of all devices, and the count of rows in it."""
    mask = targets != ignore_index
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
    total, count = sum_over_devices(total, jnp.sum(mask, dtype=jnp.float32))
    return total, count


def scale_pixels(image: Num[Array, "*dims"], dtype: str) -> Float[Array, "*dims"]:
    """Map bytes from 0..255 to floats from -1 to 1, and cast floats only."""
    if jnp.issubdtype(image.dtype, jnp.integer):
        image = image.astype(jnp.float32) / 127.5 - 1
    return image.astype(dtype)


def classification_metrics(
    logits: Float[Array, "B classes"],
    labels: Int[Array, " B"],
    *,
    ignore_index: int,
    reduce: Callable[..., Reduced],
) -> dict[str, Reduced]:
    """Return the cross-entropy, as "loss", and the accuracy of a batch, without ignored labels.

    `reduce` is `masked_mean` or `masked_total`.
    """
    labels = labels.astype(jnp.int32)
    losses = cross_entropy(logits, labels, ignore_index=ignore_index)
    hits = jnp.argmax(logits, axis=-1) == labels
    return {
        name: reduce(values, labels, ignore_index=ignore_index)
        for name, values in (("loss", losses), ("accuracy", hits))
    }


def check_indices(name: str, values: Any, count: int, ignore_index: int) -> None:
    """Raise ValueError if an index is not in 0..count-1. Skip arrays without concrete values.

    Args:
        name: the array's name in messages.
        values: an array; traced arrays and arrays of more than one host are not checked.
        count: the number of valid indices.
        ignore_index: a valid index outside the range.
    """
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} holds {values.dtype}; it must hold integers")
    if isinstance(values, jax.core.Tracer) or not getattr(values, "is_fully_addressable", True):
        return
    indices = np.asarray(values)
    invalid = np.argwhere(((indices < 0) | (indices >= count)) & (indices != ignore_index))
    if invalid.size:
        position = tuple(int(i) for i in invalid[0])
        raise ValueError(
            f"{name}{list(position)} is {indices[position]}; it can be 0 to {count - 1}, "
            f"or {ignore_index} to ignore it"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    axes: tuple[str, ...], ignore_index: int, logits: jax.Array, targets: jax.Array
) -> jax.Array:
    return _forward(axes, ignore_index, logits, targets)[0]


def _forward(
    axes: tuple[str, ...], ignore_index: int, logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, Residuals]:
    logits32 = logits.astype(jnp.float32)
    peak = jnp.max(logits32, axis=-1)
    peak = lax.pmax(peak, axes) if axes else peak
    total = jnp.sum(jnp.exp(logits32 - peak[..., None]), axis=-1)
    local = _local_targets(axes, logits, targets)
    is_local = (local >= 0) & (local < logits.shape[-1])
    index = jnp.clip(local, 0, logits.shape[-1] - 1)
    target_logit = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    target_logit = jnp.where(is_local, target_logit.astype(jnp.float32), 0.0)
    if axes:
        total, target_logit = lax.psum((total, target_logit), axes)
    classes = logits.shape[-1] * (lax.axis_size(axes) if axes else 1)
    ignored = targets == ignore_index
    invalid = ((targets < 0) | (targets >= classes)) & ~ignored
    log_sum = jnp.where(invalid, jnp.nan, peak + jnp.log(total))
    return jnp.where(ignored, 0.0, log_sum - target_logit), (logits, targets, log_sum)


def _backward(
    axes: tuple[str, ...], ignore_index: int, residuals: Residuals, g: jax.Array
) -> tuple[jax.Array, None]:
    logits, targets, log_sum = residuals
    probability = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    local = _local_targets(axes, logits, targets)
    is_target = local[..., None] == jnp.arange(logits.shape[-1])
    weight = jnp.where(targets == ignore_index, 0.0, g)
    return ((probability - is_target) * weight[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _local_targets(axes: tuple[str, ...], logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the targets relative to this device's first class."""
    return targets - lax.axis_index(axes) * logits.shape[-1] if axes else targets
