"""The sharded matmuls of a block with blocking collectives, instead of permutes on a ring.

A gather is complete before its matmul starts, and a matmul before its sums are scattered. Nothing
overlaps, but the matmuls are not split. A split matmul is slower if the weights of a device are
small, and a program with rings takes longer to compile. `costs` decides which form is faster.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName, match_varying_on
from drumline.parallel.rings.local import contract, result_dtype, sum_dtype
from drumline.parallel.transforms import reverse_only


@dataclass(frozen=True)
class BlockingCollective:
    """A mesh axis (or axes), the type in which sums are sent, and the precision of matmuls."""

    axis_name: AxisName
    wire_dtype: jnp.dtype | None
    """The type of sums when sent; None is the type in which they are added."""
    precision: lax.PrecisionLike = None

    def dot(self, x: jax.Array, w: jax.Array, *, w_dim: int = 0) -> jax.Array:
        """Multiply x[..., K] · w[K, N] in the type of the result; with `w_dim=1`, w is [N, K]."""
        return contract(x, w, (x.ndim - 1,), (w_dim,), result_dtype(x, w), self.precision)

    def partial_sums(self, x: jax.Array, w: jax.Array, *, w_dim: int = 0) -> jax.Array:
        """Multiply like `dot`, in the type in which the sums are sent."""
        dtype = self.wire_dtype or sum_dtype(x, w)
        return contract(x, w, (x.ndim - 1,), (w_dim,), dtype, self.precision)

    def outer(self, x: jax.Array, g: jax.Array) -> jax.Array:
        """Multiply x[..., K]ᵀ · g[..., N] → [K, N], contracting all leading dimensions."""
        rows = tuple(range(x.ndim - 1))
        return contract(x, g, rows, rows, sum_dtype(x, g), self.precision)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return all rows of x."""
        return cast(jax.Array, lax.all_gather(x, self.axis_name, axis=x.ndim - 2, tiled=True))

    def scatter(self, sums: jax.Array) -> jax.Array:
        """Return this device's rows of the sums over all devices."""
        dim = sums.ndim - 2
        return cast(
            jax.Array, lax.psum_scatter(sums, self.axis_name, scatter_dimension=dim, tiled=True)
        )


def gather_then_multiply(
    collective: BlockingCollective, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Gather the rows of x, and multiply them by each of the weights."""
    x, *varying = reverse_only(
        "gather_then_multiply", *match_varying_on(collective.axis_name, x, *weights)
    )
    return _gather(collective, x, tuple(varying))


def multiply_then_scatter(collective: BlockingCollective, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x by w, and return this device's rows of the sums over all devices."""
    x, w = reverse_only("multiply_then_scatter", *match_varying_on(collective.axis_name, x, w))
    return _scatter(collective, x, w)


# The gradients are written out, so that the gradients of rows are sent in `wire_dtype` and those of
# weights are summed in float32.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(
    collective: BlockingCollective, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return _gather_forward(collective, x, weights)[0]


def _gather_forward(
    collective: BlockingCollective, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, tuple[jax.Array, ...]]]:
    rows = collective.gather(x)
    return tuple(collective.dot(rows, w) for w in weights), (rows, weights)


def _gather_backward(
    collective: BlockingCollective,
    saved: tuple[jax.Array, tuple[jax.Array, ...]],
    gs: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rows, weights = saved
    terms = [collective.partial_sums(g, w, w_dim=1) for g, w in zip(gs, weights, strict=True)]
    dx = collective.scatter(reduce(jnp.add, terms)).astype(rows.dtype)
    pairs = zip(gs, weights, strict=True)
    return dx, tuple(collective.outer(rows, g).astype(w.dtype) for g, w in pairs)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(collective: BlockingCollective, x: jax.Array, w: jax.Array) -> jax.Array:
    sums = collective.scatter(collective.partial_sums(x, w))
    return sums.astype(result_dtype(x, w))


def _scatter_forward(
    collective: BlockingCollective, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scatter(collective, x, w), (x, w)


def _scatter_backward(
    collective: BlockingCollective, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows = collective.gather(g)
    dx = collective.dot(rows, w, w_dim=1).astype(x.dtype)
    return dx, collective.outer(x, rows).astype(w.dtype)


_scatter.defvjp(_scatter_forward, _scatter_backward)
