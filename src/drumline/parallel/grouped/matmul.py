"""Matmuls of sorted rows with one matrix per group, by device.

`grouped_matmul(x, w, sizes)` multiplies the first `sizes[0]` rows of `x` by `w[0]`, the next
`sizes[1]` by `w[1]`, and so on. Rows past the last group are zero, unless the caller does not need
them.

| device                                          | implementation              |
|-------------------------------------------------|-----------------------------|
| TPU, bfloat16 or float32, dimensions from 128 on | the kernels in `megablox`   |
| TPU, all others                                 | `lax.ragged_dot_general`    |
| Hopper GPU, 16-bit, aligned sizes               | the kernels in `hopper`     |
| all others                                      | the block loops in `blocks` |

`lax.ragged_dot` is used on TPUs only: on other devices it multiplies every row by every matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.grouped import megablox
from drumline.parallel.grouped.blocks import (
    accumulator,
    blocked_matmul,
    blocked_outer,
    match_varying,
)
from drumline.parallel.transforms import batch_first, once_only
from drumline.parallel.typed import array_type, by_platform


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    aligned: bool = False,
    zero_rest: bool = True,
) -> jax.Array:
    """Multiply groups of rows by their matrices.

    Args:
        x: `[N, D]`, rows sorted by group.
        w: `[G, D, F]`, one matrix per group.
        sizes: `int[G]`, the rows of the groups, in order; their sum is at most `N`.
        aligned: guarantees that N and all sizes are multiples of `row_alignment((w,))`, which the
            Hopper kernels need.
        zero_rest: True to set rows past the last group to zero, here and in the gradient of `x`. If
            False they are arbitrary, which saves a pass over the output on TPU and Hopper.

    Returns:
        `[N, F]` in the type of `x`, summed in float32.
    """
    x, w, sizes = match_varying(x, w, sizes)
    return _grouped_matmul(_Guarantees(aligned, zero_rest), x, w, sizes)


class _Guarantees(NamedTuple):
    aligned: bool
    zero_rest: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    guarantees: _Guarantees, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    return product(x, w, sizes, **guarantees._asdict())


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    guarantees: _Guarantees, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, _Saved]:
    return product(x, w, sizes, **guarantees._asdict()), (x, w, sizes)


def _backward(
    guarantees: _Guarantees, saved: _Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    dy = once_only("grouped_matmul", dy)
    dx = product(dy, w, sizes, transpose=True, **guarantees._asdict())
    return dx, outer(x, dy, sizes, out_dtype=w.dtype, aligned=guarantees.aligned), None


_grouped_matmul.defvjp(_forward, _backward)


def row_alignment(matrices: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Return the multiple to which this device needs groups padded: 1 on most.

    Args:
        matrices: the matrices of the groups, `[G, D, ...]` each.
    """
    if not _on_hopper():
        return 1
    from drumline.parallel.grouped import hopper

    supported = [hopper.supports(m.dtype, m.shape[1], math.prod(m.shape[2:])) for m in matrices]
    return hopper.ROWS if all(supported) else 1


def product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
    aligned: bool = False,
    zero_rest: bool = False,
) -> jax.Array:
    """Return the grouped matmul without a gradient; `transpose` uses `w[g].T`.

    Rows past the last group are arbitrary unless `zero_rest`.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    options: dict[str, Any] = {"transpose": transpose, "out_dtype": dtype}
    branches = {"tpu": partial(_ragged_matmul, **options)}
    if megablox.supports(x, w.shape[1 if transpose else 2]):
        on_tpu = partial(megablox.matmul, **options)
        branches["tpu"] = partial(_zero_rest, on_tpu) if zero_rest else on_tpu
    if aligned and row_alignment((w,)) > 1:
        from drumline.parallel.grouped import hopper

        on_hopper = partial(hopper.matmul, **options)
        branches["cuda"] = partial(_zero_rest, on_hopper) if zero_rest else on_hopper
    default = partial(blocked_matmul, max_rows=_max_block_rows(), **options)
    return by_platform(x, w, sizes, default=default, **branches)


def outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: DTypeLike | None = None,
    aligned: bool = False,
) -> jax.Array:
    """Return `[G, D, F]`: the sums of `x[i]ᵀ y[i]` by group, in float32 by default."""
    dtype = jnp.dtype(out_dtype or accumulator(x.dtype))
    on_tpu = megablox.outer if megablox.supports(x, y.shape[1]) else _ragged_outer
    branches = {"tpu": partial(on_tpu, out_dtype=dtype)}
    matrix = array_type((1, x.shape[1], y.shape[1]), x.dtype)
    if aligned and row_alignment((matrix,)) > 1:
        from drumline.parallel.grouped import hopper

        branches["cuda"] = partial(hopper.outer, out_dtype=dtype)
    default = partial(blocked_outer, out_dtype=dtype, max_rows=_max_block_rows())
    return by_platform(x, y, sizes, default=default, **branches)


def _zero_rest(
    multiply: Callable[..., jax.Array], x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.where(rows < jnp.sum(sizes), multiply(x, w, sizes), 0)


def _ragged_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose: bool, out_dtype: jnp.dtype
) -> jax.Array:
    dimensions = lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        dot_dimension_numbers=(((1,), (2 if transpose else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    multiply = partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimensions,
        preferred_element_type=accumulator(x.dtype),
    )
    x, w, sizes = batch_first(x, w, sizes)
    # JAX does not define the result of ragged_dot in rows without a group.
    return _zero_rest(multiply, x, w, sizes).astype(out_dtype)


def _ragged_outer(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, out_dtype: jnp.dtype
) -> jax.Array:
    dimensions = lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    x, y, sizes = batch_first(x, y, sizes)
    return lax.ragged_dot_general(
        x, y, sizes, dimensions, preferred_element_type=accumulator(x.dtype)
    ).astype(out_dtype)


def _on_hopper() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


def _max_block_rows() -> int:
    """Return the maximum block length. On a GPU a block must take longer than a launch."""
    return 2048 if jax.default_backend() == "gpu" else 256
