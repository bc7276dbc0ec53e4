"""Grouped matmuls on TPUs with JAX's megablox kernels.

A tile with rows of more than one group is processed once per group, so groups need no alignment,
and the work is that of a dense matmul plus a tile per group. Sums are float32 on the chip and
written in the requested type. `lax.ragged_dot_general` does more work on a TPU: the matmul with
`w[g].T` first copies `w`, and the sum of outer products multiplies all rows for every group.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from drumline.parallel.grouped.blocks import match_varying
from drumline.parallel.transforms import ArrayType, trace_without_mesh

LANES = 128
"""The minimum side of a matrix, below which most of the work is padding; rows are a multiple."""
ROWS, COLUMNS = 512, 1024
"""The size of a bfloat16 tile: 341 FLOPs per byte (a v5e needs 240), in 12 of its 16 MiB."""


def supports(x: jax.Array, columns: int) -> bool:
    """Return True if the kernels support rows of x and results with this many columns."""
    return x.dtype in (jnp.bfloat16, jnp.float32) and min(*x.shape, columns) >= LANES


def matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool,
    out_dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    """Multiply the groups of rows by their matrices. Rows past the last group are arbitrary."""
    options = _Options(out_dtype, interpret)
    return _call(_matmul_transposed if transpose else _matmul, options, x, w, sizes)


def outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    """Sum the outer products of the rows of `x` and `y` by group."""
    return _call(_outer, _Options(out_dtype, interpret), x, y, sizes)


class _Options(NamedTuple):
    out_dtype: jnp.dtype
    interpret: bool


def _call(multiply: Callable[..., jax.Array], options: _Options, *operands: jax.Array) -> jax.Array:
    (out,) = _traced(multiply, options, *map(ArrayType.of, operands))(*operands)
    return match_varying(out, *operands)[0]


@cache
def _traced(
    multiply: Callable[..., jax.Array], options: _Options, *types: ArrayType
) -> Callable[..., list[jax.Array]]:
    return trace_without_mesh(partial(multiply, options), *types).call


def _matmul(
    options: _Options, x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    padded = _whole_tiles(x)
    tiling = _tiling(padded, x.shape[1], w.shape[1 if transpose else 2])
    out: jax.Array = gmm(
        padded,
        w,
        sizes,
        options.out_dtype,
        tiling,
        transpose_rhs=transpose,
        interpret=options.interpret,
    )
    return out[: x.shape[0]]


_matmul_transposed = partial(_matmul, transpose=True)


def _outer(options: _Options, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, y = _whole_tiles(x), _whole_tiles(y)
    rows, inner, columns = _tiling(x, x.shape[1], y.shape[1])
    # The tile of the result takes three float32 buffers, so it has half as many columns.
    tiling = (rows, inner, min(columns, COLUMNS // 2))
    out: jax.Array = tgmm(x.T, y, sizes, options.out_dtype, tiling, interpret=options.interpret)
    return out


def _whole_tiles(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % LANES), (0, 0)))


def _tiling(x: jax.Array, inner: int, columns: int) -> tuple[int, int, int]:
    scale = x.dtype.itemsize // 2
    rows = next(rows for rows in (ROWS, ROWS // 2, LANES) if x.shape[0] % rows == 0)
    return rows, min(COLUMNS // scale, inner), min(COLUMNS // scale, columns)
