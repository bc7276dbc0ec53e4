"""Does a chip compute as the others do: products in bf16 and int8, and functions of every bf16."""

# mypy: allow-untyped-calls

from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.health.bench import Bench, OnChips
from drumline.health.checks.patterns import NUMBERS, Int8Product, bf16_matrix, int8_factors
from drumline.health.checks.rulers import checksums
from drumline.health.checks.sizes import Sizes
from drumline.health.observations import SAME, Observation

FUNCTIONS = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "rsqrt": jax.lax.rsqrt,
    "log": jnp.log,
    "sin": jnp.sin,
}
DTYPES = ("bfloat16", "float32")
"""What they are computed in: some chips have units for both."""


def matmul_bf16(bench: Bench, sizes: Sizes, turn: int) -> Iterator[Observation]:
    """A chain of products, each the left side of the next: one wrong bit is in all that follow."""
    program = _chain(bench.chips, sizes.side, sizes.chain)
    ruler = checksums(bench.chips)
    for numbers in NUMBERS:
        arguments = numbers.arguments(turn + 1, sizes.side)
        for run in range(sizes.repeats):
            ran = bench.run(program, *arguments)
            read = bench.read(ruler, ran.outputs)
            yield Observation(
                "matmul_bf16",
                f"{numbers.name}, round {turn + 1}",
                run,
                SAME,
                {device: tuple(map(int, sums.reshape(-1))) for device, sums in read.items()},
                ran.seconds,
                flops=2.0 * sizes.chain * sizes.side**3,
            )


def matmul_int8(bench: Bench, sizes: Sizes, turn: int) -> Iterator[Observation]:
    """One long product, whose checksum the host knows without computing it."""
    product = Int8Product(turn + 1, sizes.side, sizes.inner)
    program = _bytes(bench.chips, sizes.side, sizes.inner)
    ruler = checksums(bench.chips)
    for run in range(sizes.repeats):
        ran = bench.run(program, np.uint32(product.seed))
        read = bench.read(ruler, ran.outputs)
        yield Observation(
            "matmul_int8",
            f"bytes, round {turn + 1}",
            run,
            SAME,
            {device: tuple(map(int, sums.reshape(-1))) for device, sums in read.items()},
            ran.seconds,
            flops=2.0 * sizes.side**2 * sizes.inner,
            truth=product.checksum,
        )


def functions(bench: Bench, sizes: Sizes, turn: int) -> Iterator[Observation]:
    """Every number that bf16 has, NaN and subnormal ones too, through each function."""
    program, ruler = _functions(bench.chips, sizes.numbers), checksums(bench.chips)
    for run in range(sizes.repeats):
        ran = bench.run(program, np.uint32(0))
        read = bench.read(ruler, *ran.outputs)
        names = [f"{name} in {dtype}" for dtype in DTYPES for name in FUNCTIONS]
        for number, name in enumerate(names):
            yield Observation(
                "functions",
                f"{name}, round {turn + 1}",
                run,
                SAME,
                {device: tuple(map(int, sums[number])) for device, sums in read.items()},
                {} if number else ran.seconds,
            )


@cache
def _chain(mesh: Mesh, side: int, chain: int) -> OnChips:
    def multiply(whole: jax.Array, scale: jax.Array) -> jax.Array:
        seed, low, span, low_right, span_right, checkerboard = whole
        left = bf16_matrix(2 * seed, (low, span), checkerboard, side)
        right = bf16_matrix(2 * seed + 1, (low_right, span_right), checkerboard, side)

        back = right * scale.astype(jnp.bfloat16)  # a power of two: exact
        # Made once and kept: XLA would make them anew, tile by tile, within each product.
        left, right, back = jax.lax.optimization_barrier((left, right, back))

        def twice(_: int, product: jax.Array) -> jax.Array:
            # bf16 out of the unit itself: an epilogue in float32 would cost a GPU a tenth.
            for factor in (right, back):
                product = jax.lax.dot(product, factor, preferred_element_type=jnp.bfloat16)
            return product

        chained: jax.Array = jax.lax.fori_loop(0, chain // 2, twice, left)
        return chained[None, None]

    return OnChips("matmul_bf16", multiply, mesh)


@cache
def _bytes(mesh: Mesh, side: int, inner: int) -> OnChips:
    def multiply(seed: jax.Array) -> jax.Array:
        left, right = jax.lax.optimization_barrier(int8_factors(seed, side, inner))
        return jax.lax.dot(left, right, preferred_element_type=jnp.int32)[None, None]

    return OnChips("matmul_int8", multiply, mesh)


@cache
def _functions(mesh: Mesh, count: int) -> OnChips:
    def evaluate(first: jax.Array) -> tuple[jax.Array, ...]:
        # Counted from an argument: of constants XLA would compute all of it while compiling.
        every = (jax.lax.iota(jnp.uint32, count) + first).astype(jnp.uint16)
        numbers = jax.lax.bitcast_convert_type(every, jnp.bfloat16)
        outputs = []
        for dtype in DTYPES:
            wide = numbers.astype(dtype)
            outputs.append(jnp.stack([function(wide) for function in FUNCTIONS.values()])[None])
        return tuple(outputs)

    return OnChips("functions", evaluate, mesh)
