"""Cross-entropy, also where the classes are divided between devices: the logits stay there.

Each device needs the largest logit, the sum of exponentials and the target's logit, three numbers
a row, from all the others. For the gradient it keeps the logits in the type they came in and the
logarithm of that sum; left to itself, differentiation would keep the exponentials in float32.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from drumline.models.layouts import sums_over_all

IGNORE_INDEX = -100
"""A target that is not to be predicted, as most libraries number it."""

Saved = tuple[jax.Array, jax.Array, jax.Array]


def cross_entropy(
    logits: Float[Array, "*rows V"],
    targets: Int[Array, "*rows"],
    over: tuple[str, ...] = (),
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Float[Array, "*rows"]:
    """The negative logarithm, in float32, of the probability of each target.

    A target of `ignore_index` has a loss of zero and no gradient. Any other that is no class has
    NaN for both: what is computed cannot raise, and a label that means nothing must not train.

    Args:
        logits: this device's share of the classes.
        targets: numbered over the classes of all devices.
        over: the mesh axes that divide the classes, for use inside `jax.shard_map`.
        ignore_index: the number of a target that is not to be predicted.
    """
    return _cross_entropy(over, ignore_index, logits, targets.astype(jnp.int32))


def mean_of_counted(
    values: Float[Array, "*rows"], targets: Int[Array, "*rows"], *, ignore_index: int
) -> Float[Array, ""]:
    """The mean in float32 over all rows on all devices whose target is not to be ignored.

    It is zero where all are ignored.
    """
    counted = targets != ignore_index
    total = jnp.sum(jnp.where(counted, values.astype(jnp.float32), 0.0))
    total, count = sums_over_all(total, jnp.sum(counted, dtype=jnp.float32))
    return total / jnp.maximum(count, 1.0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    over: tuple[str, ...], ignore_index: int, logits: jax.Array, targets: jax.Array
) -> jax.Array:
    return _forward(over, ignore_index, logits, targets)[0]


def _forward(
    over: tuple[str, ...], ignore_index: int, logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, Saved]:
    wide = logits.astype(jnp.float32)
    peak = jnp.max(wide, axis=-1)
    peak = lax.pmax(peak, over) if over else peak
    total = jnp.sum(jnp.exp(wide - peak[..., None]), axis=-1)
    local = _local(over, logits, targets)
    mine = (local >= 0) & (local < logits.shape[-1])
    index = jnp.clip(local, 0, logits.shape[-1] - 1)
    hit = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0].astype(jnp.float32)
    hit = jnp.where(mine, hit, 0.0)
    if over:
        total, hit = lax.psum((total, hit), over)
    classes = logits.shape[-1] * (lax.axis_size(over) if over else 1)
    ignored = targets == ignore_index
    unknown = ((targets < 0) | (targets >= classes)) & ~ignored
    log_sum = jnp.where(unknown, jnp.nan, peak + jnp.log(total))
    return jnp.where(ignored, 0.0, log_sum - hit), (logits, targets, log_sum)


def _backward(
    over: tuple[str, ...], ignore_index: int, saved: Saved, g: jax.Array
) -> tuple[jax.Array, None]:
    logits, targets, log_sum = saved
    probability = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    local = _local(over, logits, targets)
    hit = local[..., None] == jnp.arange(logits.shape[-1])
    weight = jnp.where(targets == ignore_index, 0.0, g)
    return ((probability - hit) * weight[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _local(over: tuple[str, ...], logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The targets, counted from this device's first class."""
    return targets - lax.axis_index(over) * logits.shape[-1] if over else targets


def check_numbers(what: str, values: Any, count: int, ignore_index: int) -> None:
    """Refuse whole numbers that are none of `count`, where their values are known.

    Args:
        what: whose numbers they are, for the refusal.
        values: an array; one that is traced, or not all here, is taken on trust.
        count: the first number that is too large.
        ignore_index: the one number outside that has a meaning.
    """
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{what} holds {values.dtype}; it must hold integers")
    if isinstance(values, jax.core.Tracer) or not getattr(values, "is_fully_addressable", True):
        return
    known = np.asarray(values)
    wrong = np.argwhere(((known < 0) | (known >= count)) & (known != ignore_index))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"{what}{list(at)} is {known[at]}; it can be 0 to {count - 1}, "
            f"or {ignore_index} for one that is not to be predicted"
        )
