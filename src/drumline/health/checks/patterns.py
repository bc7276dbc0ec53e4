"""Numbers without order that every chip makes for itself, from a counter.

Nothing is sent to the chips: what they compute with depends on no link, no host memory and no
random state, and numpy makes the same numbers with the same functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Words = Any
"""uint32, of numpy or of JAX: the same operators serve both."""


def mixed(words: Words) -> Words:
    """Each 32-bit word to another one, one to one, so that neighbours have nothing in common."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


def counted(seed: Words, indices: Words) -> Words:
    """The word at each index of the sequence that a seed names."""
    return mixed(indices ^ mixed(seed + np.uint32(0x9E3779B9)))


@dataclass(frozen=True)
class Numbers:
    """What bf16 products are made of: the exponents of the left side and of the right."""

    name: str
    left: tuple[int, int]
    """The lowest exponent as bits, and how many there are from it on."""
    right: tuple[int, int]
    checkerboard: bool = False

    def arguments(self, seed: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """The integers and the factor that the program takes, for products of that side.

        The factor makes of the right side another that takes back what two products added to the
        exponents, so that a chain of pairs stays in range, and meets small numbers beside large.
        """
        if self.checkerboard:
            # Half of the products count, and have one sign; 5/3 is the mantissa of 0x5555.
            top, growth = 0x5555 >> 7, np.log2(side / 2 * 5 / 3)
        else:
            # A sum of either sign grows as its root, times the root mean square of the right side:
            # 28/9 is the sum of mantissas' squares (7/3) over exponents 0, -1, -2, … (4/3).
            top, growth = sum(self.right) - 1, np.log2(side * 28 / 9 / self.right[1]) / 2
        scale = 2.0 ** -round(2 * (top - 127 + growth))
        whole = (seed, *self.left, *self.right, int(self.checkerboard))
        return np.array(whole, np.uint32), np.array(scale, np.float32)


NUMBERS = (
    Numbers("uniform", (119, 8), (119, 8)),
    Numbers("large exponents", (167, 16), (167, 16)),
    Numbers("checkerboard bits", (127, 1), (127, 1), checkerboard=True),
    # RunTimes numbers as large as they are small: the products of two such would all be zero.
    Numbers("near zero", (0, 8), (167, 16)),
)


def bf16_matrix(
    seed: Words, exponents: Sequence[Words], checkerboard: Words, side: int
) -> jax.Array:
    """A matrix of bf16 with every sign and mantissa, and these exponents; or a checkerboard."""
    index = jax.lax.iota(jnp.uint32, side * side).reshape(side, side)
    low, span = exponents
    word = counted(seed, index)
    # The upper half of the word chooses the exponent; a TPU has no division of integers.
    bits = (word & 0x807F) | ((low + (((word >> 16) * span) >> 16)) << 7)
    row = jax.lax.broadcasted_iota(jnp.uint32, (side, side), 0)
    odd = (row + index) & 1  # a side is even, so this is the parity of row and column
    bits = jnp.where(checkerboard > 0, jnp.where(odd > 0, 0xAAAA, 0x5555).astype(jnp.uint32), bits)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


@dataclass(frozen=True)
class Int8Product:
    """A product of bytes [side, inner] × [inner, side] whose checksum is known without it.

    Each factor is `u[row] ^ v[column]`: on the chip as good as random, and for a sum over its rows
    there are only 256 different terms. So the host knows the truth about 10¹² operations at once.
    """

    seed: int
    side: int
    inner: int

    @cached_property
    def checksum(self) -> tuple[int, int]:
        """The sums of the product's elements, plain and by position, as `rulers.checksum` does."""
        seed = np.array([self.seed], np.uint32)
        u, v = _bytes(seed, 0, self.side), _bytes(seed, 1, self.inner)
        w, z = _bytes(seed, 2, self.inner), _bytes(seed, 3, self.side)
        place = np.arange(self.side, dtype=np.int64)
        columns, placed_columns = _sums(u, v, np.ones_like(place)), _sums(u, v, place)
        rows, placed_rows = _sums(z, w, np.ones_like(place)), _sums(z, w, place)
        plain = int((columns * rows).sum())
        # Σ C[i, l] · (2 (i · side + l) + 1), the sum over the inner dimension last.
        by_place = 2 * self.side * placed_columns * rows + columns * (2 * placed_rows + rows)
        return plain % 2**32, int(by_place.sum()) % 2**32


def int8_factors(seed: jax.Array, side: int, inner: int) -> tuple[jax.Array, jax.Array]:
    """[side, inner] and [inner, side], as `Int8Product` knows them."""
    u, v = _bytes(seed, 0, side), _bytes(seed, 1, inner)
    w, z = _bytes(seed, 2, inner), _bytes(seed, 3, side)
    return _crossed(u, v), _crossed(w, z)


def _bytes(seed: Words, which: int, size: int) -> Words:
    """So many bytes, of numpy if the seed is."""
    xp: Any = np if isinstance(seed, np.ndarray) else jnp
    words = counted(seed * np.uint32(4) + np.uint32(which), xp.arange(size, dtype=xp.uint32))
    return (words >> np.uint32(24)).astype(xp.uint8)


def _crossed(rows: Any, columns: Any) -> Any:
    return jax.lax.bitcast_convert_type(rows[:, None] ^ columns[None, :], jnp.int8)


def _sums(summed: np.ndarray, along: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ over `summed` of weight · int8(summed ^ a), for each `a`; modulo 2⁶⁴, which is enough."""
    every = np.arange(256, dtype=np.uint8)
    table = ((every[:, None] ^ summed[None, :]).view(np.int8) * weights).sum(axis=1)
    chosen: np.ndarray = table[along]
    return chosen
