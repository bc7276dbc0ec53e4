"""What an expert does with its rows, forward and backward, on rows already sorted by expert.

Each function gets the rows whole and its matrices as this device holds them. Its backward takes
the gate as well: the gate's own gradient falls out of products that are needed anyway, so the
experts' outputs are never computed a second time. Gradients of the matrices leave in float32, to
be summed over rounds before they are rounded. Groups of rows are aligned as `row_alignment` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from drumline.parallel.grouped.blocks import accumulator
from drumline.parallel.grouped.matmul import outer, product

Matrices = tuple[jax.Array, ...]
Activation = Callable[[jax.Array], jax.Array]


class ExpertFunction(Protocol):
    """What the exchange asks of an expert."""

    @property
    def sums_columns(self) -> bool:
        """Whether devices along the column axis hold summands of an answer, not its columns."""
        ...

    def width(self, matrices: Matrices) -> int:
        """Return the columns of an answer before any are shared out."""
        ...

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return the answers for sorted rows."""
        ...

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return the gradients of rows, matrices and gates; `dy` is not yet weighed by `gate`."""
        ...


@dataclass(frozen=True)
class Linear:
    """`x @ w`, with `w[E, D, F]`."""

    sums_columns: bool = False

    def width(self, matrices: Matrices) -> int:
        """Return F."""
        return matrices[0].shape[2]

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return `x @ w`, by group."""
        return product(x, matrices[0], sizes, aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return gradients; the gate's is `(dy @ wᵀ) · x`, which equals `dy · (x @ w)`."""
        dtype = accumulator(x.dtype)
        dx = product(dy, matrices[0], sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(dx * x.astype(dtype), axis=1)
        dw = outer((gate[:, None] * x).astype(x.dtype), dy, sizes, aligned=True)
        return gate[:, None] * dx, (dw,), dgate


@dataclass(frozen=True)
class GatedFeedforward:
    """`(activation(x @ gate) * (x @ up)) @ w_out`, with `w_in[E, D, 2, F]` and `w_out[E, F, D]`."""

    activation: Activation
    sums_columns: bool = True

    def width(self, matrices: Matrices) -> int:
        """Return D."""
        return matrices[1].shape[2]

    def hidden(self, h: jax.Array) -> jax.Array:
        """Return the gated activation of `h`, which holds gate and up side by side."""
        dtype = accumulator(h.dtype)
        gate, up = jnp.split(h.astype(dtype), 2, axis=1)
        return (self.activation(gate) * up).astype(h.dtype)

    def forward(self, matrices: Matrices, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Return the layer's answers in float32: they may be summands."""
        w_in, w_out = side_by_side(matrices[0]), matrices[1]
        hidden = self.hidden(product(x, w_in, sizes, aligned=True))
        return product(hidden, w_out, sizes, out_dtype=accumulator(x.dtype), aligned=True)

    def backward(
        self, matrices: Matrices, x: jax.Array, gate: jax.Array, dy: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, Matrices, jax.Array]:
        """Return gradients, computing the hidden rows again."""
        w_in, w_out = side_by_side(matrices[0]), matrices[1]
        dtype = accumulator(x.dtype)
        gate = gate[:, None]
        hidden, pull = jax.vjp(self.hidden, product(x, w_in, sizes, aligned=True))
        toward = product(dy, w_out, sizes, transpose=True, out_dtype=dtype, aligned=True)
        dgate = jnp.sum(toward * hidden.astype(dtype), axis=1)
        dw_out = outer((gate * hidden).astype(x.dtype), dy, sizes, aligned=True)
        (dh,) = pull((gate * toward).astype(x.dtype))
        dw_in = outer(x, dh, sizes, aligned=True).reshape(matrices[0].shape)
        dx = product(dh, w_in, sizes, transpose=True, out_dtype=dtype, aligned=True)
        return dx, (dw_in, dw_out), dgate


def side_by_side(w_in: jax.Array) -> jax.Array:
    """Return `[E, D, 2, F]` as `[E, D, 2 F]`: the gate's columns, then those of up."""
    return w_in.reshape(*w_in.shape[:2], -1)
