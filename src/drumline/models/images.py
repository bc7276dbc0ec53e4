"""What classifiers of images share: numbers from bytes, and how an answer is judged."""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from drumline.models.layouts import Metrics
from drumline.models.losses import cross_entropy, mean_of_counted


def as_floats(image: Num[Array, "*dims"], dtype: str) -> Float[Array, "*dims"]:
    """Bytes from 0 to 255 become floats from -1 to 1; floats stay as they are."""
    if jnp.issubdtype(image.dtype, jnp.integer):
        image = image.astype(jnp.float32) / 127.5 - 1
    return image.astype(dtype)


def judge(
    logits: Float[Array, "B classes"], labels: Int[Array, " B"], *, ignore_index: int
) -> tuple[Float[Array, ""], Metrics]:
    """The mean cross-entropy over the whole batch, and its accuracy, without ignored labels."""
    labels = labels.astype(jnp.int32)
    losses = cross_entropy(logits, labels, ignore_index=ignore_index)
    hits = jnp.argmax(logits, axis=-1) == labels
    loss, accuracy = (
        mean_of_counted(each, labels, ignore_index=ignore_index) for each in (losses, hits)
    )
    return loss, {"accuracy": accuracy}
