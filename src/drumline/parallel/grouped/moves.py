"""Tokens to their rows on a GPU, each byte moved once and sixteen at a time.

Left to XLA this is a gather, which reads every token k times, and eight bytes at a time. Here it
is a scatter: a token is read once and written k times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.grouped.blocks import alike
from drumline.parallel.grouped.typed import array_type

# Elements that one program moves at a time, and in how many columns; sizes near these are as fast.
_TILE = 4096
_COLUMNS = 512


def takes(tokens: jax.Array) -> bool:
    """Return whether the kernel can move these tokens: rows of whole 256 bytes."""
    return tokens.ndim == 2 and tokens.shape[1] % 128 == 0 and tokens.dtype.itemsize == 2


def scatter_rows(
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
    columns = min(width & -width, _COLUMNS)  # the largest power of two that divides the width
    tall = _TILE // columns
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
