"""Rulers: small programs that turn what a chip computed into a few integers, on the chip.

Integers add up to the same sum in any order, so a checksum is the same however a compiler arranges
it. They count modulo 2³², and are the only thing that leaves the chip.
"""

from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from drumline.health.bench import CHIP, EACH, OnChips


def bits(values: jax.Array) -> jax.Array:
    """The values' bits as uint32, so that NaN equals the same NaN and 0 is not -0."""
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    return jax.lax.bitcast_convert_type(values, words).astype(jnp.uint32)


def checksum(values: jax.Array) -> jax.Array:
    """[rows, …] to [rows, 2]: the sum of a row's bits, and with each place's odd weight."""
    rows = bits(values).reshape(values.shape[0], -1)
    weights = 2 * jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1) + 1
    both = [rows.sum(axis=1, dtype=jnp.uint32), (rows * weights).sum(axis=1, dtype=jnp.uint32)]
    return jnp.stack(both, axis=1)


@cache
def checksums(mesh: Mesh) -> OnChips:
    """A chip's [1, rows, …] to [1, rows, 2]; of several arrays the rows follow each other."""

    def rule(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate([checksum(values[0]) for values in arrays])[None]

    return OnChips(f"checksum over {CHIP}", rule, mesh, EACH)


def wrong_words(values: jax.Array, expected: jax.Array) -> jax.Array:
    """[3]: how many words are not as expected, and the checksum of all."""
    count = (values != expected).sum(dtype=jnp.uint32)
    return jnp.concatenate([count[None], checksum(values.reshape(1, -1))[0]])
