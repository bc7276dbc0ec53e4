"""The rows of (token, slot) pairs that are sorted into one group per expert.

A device may need every group to start on a multiple of some number of rows, so that a tile has rows
of a single group. A row is one of these:

- the row of a pair;
- padding inside a group, which is zero in every array of rows and in every matmul;
- a row past the last group, which is zero in every array of rows, but may be NaN after a grouped
  matmul. No operation reads it: grouped matmuls stop at the last group, and `rows_or_zero` returns
  zeros for a pair without a group.

On a GPU a kernel scatters tokens to their rows. It reads a token once and writes it k times,
sixteen bytes at a time. XLA would gather: it reads every token k times, eight bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.grouped.blocks import accumulator, match_varying
from drumline.parallel.typed import array_type, by_platform

# The elements and columns of a program. Similar sizes are equally fast.
_SCATTER_TILE = 4096
_SCATTER_COLUMNS = 512


def supports_scatter(tokens: jax.Array) -> bool:
    """Return True if the kernel supports these tokens: 16-bit rows of whole 256 bytes."""
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
    """Write the tokens, times their gates, to their rows, and zeros to the padding.

    Args:
        tokens: `[S, D]`.
        gates: `[S, k]`, or None for ones.
        row: `int[S, k]`, the rows of the slots; `rows` or more for none.
        padding: `int[2, G]`, the start and end of the padding of the groups.
        rows: the rows of the result; rows without a token or padding are uninitialized.
        interpret: True to run without a GPU, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    count, width = tokens.shape
    columns = min(width & -width, _SCATTER_COLUMNS)  # a power of two
    tile_rows = _SCATTER_TILE // columns
    steps = pl.cdiv(count, tile_rows)

    def body(*refs: Any) -> None:
        tokens_ref, row_ref, padding_ref, *gates_ref, out_ref = refs
        step = pl.program_id(0)
        across = (pl.program_id(1) * columns + jnp.arange(columns))[None, :]

        @pl.when(step < steps)
        def move() -> None:
            row_index = step * tile_rows + jnp.arange(tile_rows)
            valid = row_index < count
            loaded = plt.load(
                tokens_ref.at[row_index[:, None], across], mask=valid[:, None], other=0
            )
            for slot in range(row.shape[1]):
                target_rows = plt.load(row_ref.at[row_index, slot], mask=valid, other=rows)
                scaled = loaded
                if gates is not None:
                    gate = plt.load(gates_ref[0].at[row_index, slot], mask=valid, other=0)
                    scaled = (gate[:, None] * loaded.astype(jnp.float32)).astype(loaded.dtype)
                plt.store(
                    out_ref.at[target_rows[:, None], across],
                    scaled,
                    mask=(target_rows < rows)[:, None],
                )

        @pl.when(step >= steps)
        def clear() -> None:
            start, end = padding_ref[0, step - steps], padding_ref[1, step - steps]

            def clear_tile(i: jax.Array, _: None) -> None:
                target_rows = start + i * tile_rows + jnp.arange(tile_rows)
                zeros = jnp.zeros((tile_rows, columns), tokens.dtype)
                plt.store(
                    out_ref.at[target_rows[:, None], across],
                    zeros,
                    mask=(target_rows < end)[:, None],
                )

            lax.fori_loop(0, lax.div(end - start + (tile_rows - 1), tile_rows), clear_tile, None)

    call = pl.pallas_call(
        body,
        out_shape=array_type((rows, width), tokens.dtype, tokens),
        grid=(steps + padding.shape[1], width // columns),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4),
        name="scatter_rows",
    )
    operands = (tokens, row, padding) if gates is None else (tokens, row, padding, gates)
    return match_varying(call(*operands), tokens)[0]


class Grouping(NamedTuple):
    """Pairs sorted by group: `pair[row]` and `row[pair]`, with indices past the end for none."""

    pair: jax.Array  # int32[R]; the number of pairs where a row holds none
    row: jax.Array  # int32[N]; R or more where a pair has no group
    sizes: jax.Array  # int32[G], rows of each group with its padding
    counts: jax.Array  # int32[G], pairs of each group

    def to_rows(
        self, tokens: jax.Array, slots: int = 1, gates: jax.Array | None = None
    ) -> jax.Array:
        """Return a row per pair in sorted order.

        Args:
            tokens: a token per `slots` pairs.
            slots: the number of pairs of a token.
            gates: `[S, slots]`, the factors of the rows.
        """
        gathered = partial(_rows_by_gather, slots=slots)
        if self.pair.shape == self.row.shape or not supports_scatter(tokens):
            return gathered(self, tokens, gates)
        scattered = partial(_rows_by_scatter, slots=slots)
        return by_platform(self, tokens, gates, cuda=scattered, default=gathered)

    def to_pairs(self, rows: jax.Array) -> jax.Array:
        """Return sorted rows in the order of the pairs."""
        return rows_or_zero(rows, self.row)

    def weighted_sum(
        self, rows: jax.Array, gates: jax.Array, out_dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Return the sums of the tokens' sorted rows, weighted by `gates[S, k]`."""
        dtype = accumulator(rows.dtype)
        total = jnp.zeros_like(rows, shape=(gates.shape[0], rows.shape[1]), dtype=dtype)
        for j, in_group in enumerate(self._by_slot(rows, gates.shape[1])):
            total += gates[:, j, None].astype(dtype) * in_group
        return total.astype(out_dtype or rows.dtype)

    def dots(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return `[S, k]`: the dot products of the tokens with their sorted rows."""
        k = self.row.shape[0] // tokens.shape[0]
        columns_ = tokens.astype(accumulator(rows.dtype))
        return jnp.stack(
            [jnp.sum(in_group * columns_, axis=1) for in_group in self._by_slot(rows, k)], axis=1
        )

    def _by_slot(self, rows: jax.Array, k: int) -> Iterator[jax.Array]:
        """Yield the tokens' rows slot by slot. A gather of [S, k, F] would not be fused."""
        row = self.row.reshape(-1, k)
        for j in range(k):
            yield rows_or_zero(rows, row[:, j]).astype(accumulator(rows.dtype))


def _rows_by_gather(
    groups: Grouping, tokens: jax.Array, gates: jax.Array | None, *, slots: int
) -> jax.Array:
    rows = rows_or_zero(tokens, lax.div(groups.pair, jnp.int32(slots)))
    if gates is None:
        return rows
    return (rows_or_zero(gates.reshape(-1), groups.pair)[:, None] * rows).astype(tokens.dtype)


def _rows_by_scatter(
    groups: Grouping, tokens: jax.Array, gates: jax.Array | None, *, slots: int
) -> jax.Array:
    ends = jnp.cumsum(groups.sizes)
    padding = jnp.stack([ends - groups.sizes + groups.counts, ends])
    row, rows = groups.row.reshape(-1, slots), groups.pair.shape[0]
    return scatter_tokens(tokens, gates, row, padding, rows=rows)


def rows_or_zero(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index, and zeros for an index past the end."""
    return rows.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def group_rows(keys: jax.Array, groups: int, alignment: int = 1) -> Grouping:
    """Sort pairs by key.

    Args:
        keys: `int[N]`, the groups of the pairs; `groups` for none.
        groups: the number of groups.
        alignment: the rows of every group are padded to a multiple of this.
    """
    n = keys.shape[0]
    keys = keys.astype(jnp.int32)
    sizes = group_sizes(keys, groups)
    padded = (sizes + (alignment - 1)) // alignment * alignment
    rows = (n + groups * (alignment - 1)) // alignment * alignment
    keys, order = _sort_keys(keys, groups)
    position = jnp.arange(n, dtype=jnp.int32)
    shift = jnp.cumsum(padded - sizes) - (padded - sizes)
    # Pairs without a group are last, and get distinct rows past the end.
    row_index = jnp.where(keys < groups, position + rows_or_zero(shift, keys), rows + position)
    if alignment == 1:
        pair = jnp.where(keys < groups, order, n)
    else:
        pair = jnp.full_like(order, n, shape=(rows,))
        pair = pair.at[row_index].set(order, mode="drop", unique_indices=True)
    row = jnp.zeros_like(order).at[order].set(row_index, unique_indices=True)
    return Grouping(pair, row, padded, sizes)


def group_sizes(keys: jax.Array, groups: int) -> jax.Array:
    """Return the number of keys per group.

    All keys are compared with all groups in a single pass. A search in sorted keys would be a loop
    of many small steps with kernel launches.
    """
    return jnp.sum(keys[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)


def _sort_keys(keys: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Return the sorted keys and their original positions.

    The keys are cast to the narrowest type, because a GPU sorts eight bits at a time.
    """
    key_dtype = jnp.uint8 if groups < 2**8 else jnp.uint16 if groups < 2**16 else jnp.uint32
    position = jnp.arange(keys.shape[0], dtype=jnp.int32)
    keys, order = lax.sort((keys.astype(key_dtype), position), num_keys=1)
    return keys.astype(jnp.int32), order
