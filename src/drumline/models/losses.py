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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Saved = tuple[jax.Array, jax.Array, jax.Array]


def cross_entropy(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], over: tuple[str, ...] = ()
) -> Float[Array, "*rows"]:
    """The negative logarithm, in float32, of the probability of each target.

    Args:
        logits: this device's share of the classes.
        targets: numbered over the classes of all devices.
        over: the mesh axes that divide the classes, for use inside `jax.shard_map`.
    """
    return _cross_entropy(over, logits, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(over: tuple[str, ...], logits: jax.Array, targets: jax.Array) -> jax.Array:
    return _forward(over, logits, targets)[0]


def _forward(
    over: tuple[str, ...], logits: jax.Array, targets: jax.Array
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
    log_sum = peak + jnp.log(total)
    return log_sum - hit, (logits, targets, log_sum)


def _backward(over: tuple[str, ...], saved: Saved, g: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, log_sum = saved
    probability = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    local = _local(over, logits, targets)
    hit = local[..., None] == jnp.arange(logits.shape[-1])
    return ((probability - hit) * g[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _local(over: tuple[str, ...], logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The targets, counted from this device's first class."""
    targets = targets.astype(jnp.int32)
    return targets - lax.axis_index(over) * logits.shape[-1] if over else targets
