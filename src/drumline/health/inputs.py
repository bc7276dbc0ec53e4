"""The inputs of the tests and their sizes.

The chips generate their inputs from a counter, without links, host memory or random state. numpy
can generate the same inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.health.host_checks import available_memory

UInt32s = Any
"""uint32 values of numpy or JAX."""
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """The sizes of the tests in a round."""

    matmul_size: int
    """The number of rows and columns of the square matrices; even."""
    chain: int
    """The number of chained bf16 matmuls; even."""
    inner: int
    """The inner dimension of the int8 matmul."""
    memory: int
    """The bytes to fill per chip."""
    block: int
    """The bytes that a program fills."""
    link_buffer: int
    """The 32-bit words per hop."""
    numbers: int = 2**16
    """The number of bf16 values, out of 65,536, for the functions."""
    repeats: int = 2
    """Runs with the same inputs. With fewer than three chips, only repeats show the bad chip."""


def sizes_for(devices: list[Any]) -> Sizes:
    """Return sizes for this host's devices with which a round takes about a second."""
    platform = devices[0].platform
    memory = min(_testable_memory(device, len(devices)) for device in devices)
    if platform == "cpu":
        return Sizes(
            matmul_size=128,
            chain=4,
            inner=256,
            memory=memory,
            block=MIB,
            link_buffer=2**12,
            repeats=3,
        )
    # A GPU needs larger matmuls to reach its peak than a TPU's systolic array.
    matmul_size = 8192 if platform == "gpu" else 4096
    return Sizes(
        matmul_size=matmul_size,
        chain=2**18 // matmul_size // 2,
        inner=2**15,
        memory=memory,
        block=1024 * MIB,
        link_buffer=2**24,
    )


def _testable_memory(device: Any, device_count: int) -> int:
    """Return the bytes that the memory test may fill on a device."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        free = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
        # Reserve memory for the test's programs and for other users of the device.
        return max(int(0.92 * free) - 512 * MIB, 64 * MIB)
    if device.platform != "cpu":
        return 1024 * MIB
    # Emulated chips share the memory of the machine with other programs.
    return max(min(available_memory() // (8 * device_count), 2 * MIB), MIB)


def hash_uint32(x: UInt32s) -> UInt32s:
    """Permute the 32-bit integers so that neighbours are unrelated."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_uint32(seed: UInt32s, indices: UInt32s) -> UInt32s:
    """Return the values at these indices of the sequence with this seed."""
    return hash_uint32(indices ^ hash_uint32(seed + np.uint32(0x9E3779B9)))


@dataclass(frozen=True)
class MatmulInputs:
    """The ranges of exponents of a bf16 matmul's operands."""

    name: str
    lhs: tuple[int, int]
    """The minimum of the exponents, as stored, and their number."""
    rhs: tuple[int, int]
    checkerboard: bool = False

    def arguments(self, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the integers and the scale that the program takes, for matrices of this size.

        The scaled rhs undoes the growth of the exponents over two matmuls, so that a
        chain of pairs stays in range and combines small numbers with large ones.
        """
        if self.checkerboard:
            # Half of the terms are nonzero, with equal signs; 5/3 is the mantissa of 0x5555.
            top, growth = 0x5555 >> 7, np.log2(size / 2 * 5 / 3)
        else:
            # A sum with random signs grows as its root, times the root mean square of the rhs.
            # 28/9 is the mean square of the mantissas (7/3) summed over the exponents 0,
            # -1, -2, … (4/3).
            top, growth = sum(self.rhs) - 1, np.log2(size * 28 / 9 / self.rhs[1]) / 2
        scale = 2.0 ** -round(2 * (top - 127 + growth))
        integers = (seed, *self.lhs, *self.rhs, int(self.checkerboard))
        return np.array(integers, np.uint32), np.array(scale, np.float32)


MATMUL_INPUTS = (
    MatmulInputs("uniform", (119, 8), (119, 8)),
    MatmulInputs("large exponents", (167, 16), (167, 16)),
    MatmulInputs("checkerboard bits", (127, 1), (127, 1), checkerboard=True),
    # Large rhs exponents offset the lhs. Otherwise every result would be zero.
    MatmulInputs("near zero", (0, 8), (167, 16)),
)


def bf16_matrix(
    seed: UInt32s, exponents: Sequence[UInt32s], checkerboard: UInt32s, size: int
) -> jax.Array:
    """Return a bf16 matrix with all signs and mantissas and these exponents, or a checkerboard."""
    index = jax.lax.iota(jnp.uint32, size * size).reshape(size, size)
    low, span = exponents
    hashed = random_uint32(seed, index)
    # The upper half of the hash chooses the exponent, because a TPU has no integer division.
    bits = (hashed & 0x807F) | ((low + (((hashed >> 16) * span) >> 16)) << 7)
    row = jax.lax.broadcasted_iota(jnp.uint32, (size, size), 0)
    odd = (row + index) & 1  # the size is even, so this is the parity of row + column
    bits = jnp.where(checkerboard > 0, jnp.where(odd > 0, 0xAAAA, 0x5555).astype(jnp.uint32), bits)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


@dataclass(frozen=True)
class Int8Matmul:
    """An int8 matmul [size, inner] × [inner, size] with a checksum that needs no matmul.

    Each operand is `u[row] ^ v[column]`. On the chip this is as good as random, but a sum over its
    rows has only 256 different terms. So the host can derive the checksum of 10¹² operations.
    """

    seed: int
    size: int
    inner: int

    @cached_property
    def checksum(self) -> tuple[int, int]:
        """The checksum of the result, as `runner.checksum` computes it."""
        seed = np.array([self.seed], np.uint32)
        u, v = _random_bytes(seed, 0, self.size), _random_bytes(seed, 1, self.inner)
        w, z = _random_bytes(seed, 2, self.inner), _random_bytes(seed, 3, self.size)
        index = np.arange(self.size, dtype=np.int64)
        columns, weighted_columns = _xor_sums(u, v, np.ones_like(index)), _xor_sums(u, v, index)
        rows, weighted_rows = _xor_sums(z, w, np.ones_like(index)), _xor_sums(z, w, index)
        plain = int((columns * rows).sum())
        # Σ C[i, l] · (2 (i · size + l) + 1), with the sum over the inner dimension last.
        weighted = 2 * self.size * weighted_columns * rows + columns * (2 * weighted_rows + rows)
        return plain % 2**32, int(weighted.sum()) % 2**32


def int8_operands(seed: jax.Array, size: int, inner: int) -> tuple[jax.Array, jax.Array]:
    """Return the operands [size, inner] and [inner, size] of an `Int8Matmul`."""
    u, v = _random_bytes(seed, 0, size), _random_bytes(seed, 1, inner)
    w, z = _random_bytes(seed, 2, inner), _random_bytes(seed, 3, size)
    return _outer_xor(u, v), _outer_xor(w, z)


def _random_bytes(seed: UInt32s, stream: int, size: int) -> UInt32s:
    """Return random bytes as an array of the seed's library."""
    xp: Any = np if isinstance(seed, np.ndarray) else jnp
    stream_seed = seed * np.uint32(4) + np.uint32(stream)
    values = random_uint32(stream_seed, xp.arange(size, dtype=xp.uint32))
    return (values >> np.uint32(24)).astype(xp.uint8)


def _outer_xor(rows: Any, columns: Any) -> Any:
    return jax.lax.bitcast_convert_type(rows[:, None] ^ columns[None, :], jnp.int8)


def _xor_sums(summed: np.ndarray, along: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Σ over `summed` of weight · int8(summed ^ a) for each `a` of `along`, modulo 2⁶⁴."""
    byte_values = np.arange(256, dtype=np.uint8)
    table = ((byte_values[:, None] ^ summed[None, :]).view(np.int8) * weights).sum(axis=1)
    sums: np.ndarray = table[along]
    return sums
