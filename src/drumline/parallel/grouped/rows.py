"""X"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.grouped.blocks import accumulator, alike
from drumline.parallel.typed import array_type, by_platform

# Elements that one program moves at a time, and in how many columns; sizes near these are as fast.
_SCATTER_TILE = 4096
_SCATTER_COLUMNS = 512


def supports_scatter(tokens: jax.Array) -> bool:
    """Return whether the kernel can move these tokens: rows of whole 256 bytes."""
    return tokens.ndim == 2 and tokens.shape[1] % 128 == 0 and tokens.dtype.itemsize == 2


def scatter_tokens(
    tokens: jax.Array,
    gates: jax.Array | None,
    row: jax.Array,
    padding: jax.Array,
    *,
    rows: int,
    interpret: bool = False,
) -> jax.Array:
    """Write each token, times its gates, to its rows, and zeros to the padding.

    Args:
        tokens: `[S, D]`.
        gates: `[S, k]`, or None for ones.
        row: `int[S, k]`, the row of each slot; `rows` or more for none.
        padding: `int[2, G]`, where the padding of each group starts and ends.
        rows: rows of the result; those that are neither a token's nor padding hold anything.
        interpret: whether to run without a GPU, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    count, width = tokens.shape
    columns = min(
        width & -width, _SCATTER_COLUMNS
    )  # the largest power of two that divides the width
    tall = _SCATTER_TILE // columns
    steps = pl.cdiv(count, tall)

    def body(*refs: Any) -> None:
        tokens_ref, row_ref, padding_ref, *gates_ref, out_ref = refs
        step = pl.program_id(0)
        across = (pl.program_id(1) * columns + jnp.arange(columns))[None, :]

        @pl.when(step < steps)
        def move() -> None:
            at = step * tall + jnp.arange(tall)
            inside = at < count
            found = plt.load(tokens_ref.at[at[:, None], across], mask=inside[:, None], other=0)
            for slot in range(row.shape[1]):
                to = plt.load(row_ref.at[at, slot], mask=inside, other=rows)
                moved = found
                if gates is not None:
                    gate = plt.load(gates_ref[0].at[at, slot], mask=inside, other=0)
                    moved = (gate[:, None] * found.astype(jnp.float32)).astype(found.dtype)
                plt.store(out_ref.at[to[:, None], across], moved, mask=(to < rows)[:, None])

        @pl.when(step >= steps)
        def clear() -> None:
            start, end = padding_ref[0, step - steps], padding_ref[1, step - steps]

            def some(i: jax.Array, _: None) -> None:
                to = start + i * tall + jnp.arange(tall)
                zeros = jnp.zeros((tall, columns), tokens.dtype)
                plt.store(out_ref.at[to[:, None], across], zeros, mask=(to < end)[:, None])

            lax.fori_loop(0, lax.div(end - start + (tall - 1), tall), some, None)

    call = pl.pallas_call(
        body,
        out_shape=array_type((rows, width), tokens.dtype, tokens),
        grid=(steps + padding.shape[1], width // columns),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="scatter_rows",
    )
    operands = (tokens, row, padding) if gates is None else (tokens, row, padding, gates)
    return alike(call(*operands), tokens)[0]


class Grouping(NamedTuple):
    """Pairs sorted by group: `pair[row]` and `row[pair]` lead to and fro, or past the end."""

    pair: jax.Array  # int32[R]; the number of pairs where a row holds none
    row: jax.Array  # int32[N]; R or more where a pair has no group
    sizes: jax.Array  # int32[G], rows of each group with its padding
    counts: jax.Array  # int32[G], pairs of each group

    def spread(
        self, tokens: jax.Array, slots: int = 1, gates: jax.Array | None = None
    ) -> jax.Array:
        """Return one row for each pair in sorted order.

        Args:
            tokens: one for every `slots` pairs.
            slots: pairs of a token.
            gates: `[S, slots]`, what to multiply each pair's row by.
        """
        gathered = partial(_gathered, slots=slots)
        if self.pair.shape == self.row.shape or not supports_scatter(tokens):
            return gathered(self, tokens, gates)
        scattered = partial(_scattered, slots=slots)
        return by_platform(self, tokens, gates, cuda=scattered, default=gathered)

    def collect(self, rows: jax.Array) -> jax.Array:
        """Return sorted rows in the order of the pairs."""
        return rows_or_zero(rows, self.row)

    def weighted_sum(
        self, rows: jax.Array, gates: jax.Array, out_dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Return for each token the sum of its sorted rows, weighted by `gates[S, k]`."""
        dtype = accumulator(rows.dtype)
        total = jnp.zeros_like(rows, shape=(gates.shape[0], rows.shape[1]), dtype=dtype)
        for j, mine in enumerate(self._by_slot(rows, gates.shape[1])):
            total += gates[:, j, None].astype(dtype) * mine
        return total.astype(out_dtype or rows.dtype)

    def dots(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return `[S, k]`: the dot product of each token with each of its sorted rows."""
        k = self.row.shape[0] // tokens.shape[0]
        wide = tokens.astype(accumulator(rows.dtype))
        return jnp.stack([jnp.sum(mine * wide, axis=1) for mine in self._by_slot(rows, k)], axis=1)

    def _by_slot(self, rows: jax.Array, k: int) -> Iterator[jax.Array]:
        """Yield each token's row, slot by slot: k gathers fuse where a [S, k, F] would not."""
        row = self.row.reshape(-1, k)
        for j in range(k):
            yield rows_or_zero(rows, row[:, j]).astype(accumulator(rows.dtype))


def _gathered(
    groups: Grouping, tokens: jax.Array, gates: jax.Array | None, *, slots: int
) -> jax.Array:
    rows = rows_or_zero(tokens, lax.div(groups.pair, jnp.int32(slots)))
    if gates is None:
        return rows
    return (rows_or_zero(gates.reshape(-1), groups.pair)[:, None] * rows).astype(tokens.dtype)


def _scattered(
    groups: Grouping, tokens: jax.Array, gates: jax.Array | None, *, slots: int
) -> jax.Array:
    ends = jnp.cumsum(groups.sizes)
    padding = jnp.stack([ends - groups.sizes + groups.counts, ends])
    row, rows = groups.row.reshape(-1, slots), groups.pair.shape[0]
    return scatter_tokens(tokens, gates, row, padding, rows=rows)


def rows_or_zero(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index, and zeros for an index past the last, whatever the rows hold."""
    return rows.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def group_rows(keys: jax.Array, groups: int, alignment: int = 1) -> Grouping:
    """Sort pairs by key.

    Args:
        keys: `int[N]`, the group of each pair; `groups` for none.
        groups: number of groups.
        alignment: every group takes a multiple of this many rows.
    """
    n = keys.shape[0]
    keys = keys.astype(jnp.int32)
    sizes = group_sizes(keys, groups)
    padded = (sizes + (alignment - 1)) // alignment * alignment
    rows = (n + groups * (alignment - 1)) // alignment * alignment
    keys, order = _sorted(keys, groups)
    place = jnp.arange(n, dtype=jnp.int32)
    shift = jnp.cumsum(padded - sizes) - (padded - sizes)
    # Pairs without a group come last; each gets a row of its own past the end.
    at = jnp.where(keys < groups, place + rows_or_zero(shift, keys), rows + place)
    if alignment == 1:
        pair = jnp.where(keys < groups, order, n)
    else:
        pair = jnp.full_like(order, n, shape=(rows,))
        pair = pair.at[at].set(order, mode="drop", unique_indices=True)
    row = jnp.zeros_like(order).at[order].set(at, unique_indices=True)
    return Grouping(pair, row, padded, sizes)


def group_sizes(keys: jax.Array, groups: int) -> jax.Array:
    """Return how many of `keys` name each group.

    By comparing each with all: one pass over the keys, where a search of sorted ones is a loop of
    many small steps, each of which costs an accelerator a launch.
    """
    return jnp.sum(keys[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)


def _sorted(keys: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys in order and the place each had.

    The narrowest type that holds the keys: a GPU sorts eight bits at a time.
    """
    narrow = jnp.uint8 if groups < 2**8 else jnp.uint16 if groups < 2**16 else jnp.uint32
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    keys, order = lax.sort((keys.astype(narrow), place), num_keys=1)
    return keys.astype(jnp.int32), order
