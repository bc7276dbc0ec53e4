"""Which row each (token, slot) pair takes when pairs are sorted into one group an expert.

A device may want every group to start on a multiple of some number of rows, so that a tile never
holds two groups; the rows between are padding and hold zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Grouping(NamedTuple):
    """Pairs sorted by group: `pair[row]` and `row[pair]` lead to and fro."""

    pair: jax.Array  # int32[R]; the number of pairs where a row is padding
    row: jax.Array  # int32[N]
    sizes: jax.Array  # int32[G], rows of each group with its padding

    def spread(self, rows: jax.Array, slots: int = 1) -> jax.Array:
        """Return one row for each pair in sorted order; `rows` has one for every `slots` pairs."""
        pairs = self.row.shape[0]
        if self.pair.shape[0] == pairs:
            return rows[self.pair // slots]
        found = rows[jnp.minimum(self.pair, pairs - 1) // slots]
        real = (self.pair < pairs).reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(real, found, 0)

    def collect(self, rows: jax.Array) -> jax.Array:
        """Return sorted rows in the order of the pairs."""
        return rows[self.row]


def group_rows(keys: jax.Array, groups: int, alignment: int = 1) -> Grouping:
    """Sort pairs by key.

    Args:
        keys: `int[N]`, the group of each pair; `groups` for none, which sorts behind the last.
        groups: number of groups.
        alignment: every group takes a multiple of this many rows.
    """
    n = keys.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    keys, order = lax.sort((keys.astype(jnp.int32), place), num_keys=1)
    ends = jnp.searchsorted(keys, jnp.arange(groups, dtype=jnp.int32), side="right")
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    if alignment == 1:
        row = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
        return Grouping(order, row, sizes)
    padded = (sizes + (alignment - 1)) // alignment * alignment
    shift = jnp.cumsum(padded - sizes)
    shift = jnp.concatenate([jnp.zeros_like(shift[:1]), shift])
    at = place + shift[keys]
    rows = -(-(n + groups * (alignment - 1)) // alignment) * alignment
    pair = jnp.full_like(order, n, shape=(rows,)).at[at].set(order, unique_indices=True)
    row = jnp.zeros_like(order).at[order].set(at, unique_indices=True)
    return Grouping(pair, row, padded)


def group_sizes(keys: jax.Array, groups: int) -> jax.Array:
    """Return how many of `keys` name each group."""
    ends = jnp.searchsorted(jnp.sort(keys), jnp.arange(groups), side="right")
    return jnp.diff(ends, prepend=0).astype(jnp.int32)
