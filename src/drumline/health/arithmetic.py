"""Tests of arithmetic: matmuls in bf16 and int8, and functions of every bf16 value."""

# mypy: allow-untyped-calls

from collections.abc import Iterator, Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.health.findings import SAME, Observation
from drumline.health.inputs import MATMUL_INPUTS, Int8Matmul, Sizes, bf16_matrix, int8_operands
from drumline.health.runner import PER_CHIP, ChipProgram, ChipRunner, checksum_program

FUNCTIONS = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "rsqrt": jax.lax.rsqrt,
    "log": jnp.log,
    "sin": jnp.sin,
}
DTYPES = ("bfloat16", "float32")
"""The types to evaluate the functions in. Some chips have separate units for them."""


def run_matmul_bf16_test(
    runner: ChipRunner, sizes: Sizes, round_index: int
) -> Iterator[Observation]:
    """Run chained matmuls. The result is the lhs of the next matmul, so a bad bit persists."""
    program = _matmul_chain_program(runner.host_mesh, sizes.matmul_size, sizes.chain)
    checksums = checksum_program(runner.host_mesh)
    for inputs in MATMUL_INPUTS:
        arguments = inputs.arguments(round_index + 1, sizes.matmul_size)
        for repeat in range(sizes.repeats):
            run = runner.run(program, *arguments)
            yield Observation(
                "matmul_bf16",
                f"{inputs.name}, round {round_index + 1}",
                repeat,
                SAME,
                _as_integers(runner.measure(checksums, run.outputs)),
                run.seconds,
                flops=2.0 * sizes.chain * sizes.matmul_size**3,
            )


def run_matmul_int8_test(
    runner: ChipRunner, sizes: Sizes, round_index: int
) -> Iterator[Observation]:
    """Run a long matmul with a checksum that the host knows."""
    matmul = Int8Matmul(round_index + 1, sizes.matmul_size, sizes.inner)
    operand_program = _int8_operand_program(runner.host_mesh, sizes.matmul_size, sizes.inner)
    program = _int8_matmul_program(runner.host_mesh)
    checksums = checksum_program(runner.host_mesh)
    for repeat in range(sizes.repeats):
        # The operands are made by another program, so that only the matmul is timed.
        operands = runner.run(operand_program, np.uint32(matmul.seed)).outputs
        run = runner.run(program, *operands)
        yield Observation(
            "matmul_int8",
            f"bytes, round {round_index + 1}",
            repeat,
            SAME,
            _as_integers(runner.measure(checksums, run.outputs)),
            run.seconds,
            flops=2.0 * sizes.matmul_size**2 * sizes.inner,
            expected=matmul.checksum,
        )


def run_functions_test(runner: ChipRunner, sizes: Sizes, round_index: int) -> Iterator[Observation]:
    """Evaluate the functions on every bf16 value, including NaN and subnormals."""
    program = _function_program(runner.host_mesh, sizes.numbers)
    checksums = checksum_program(runner.host_mesh)
    names = [f"{name} in {dtype}" for dtype in DTYPES for name in FUNCTIONS]
    for repeat in range(sizes.repeats):
        run = runner.run(program, np.uint32(0))
        measured = runner.measure(checksums, *run.outputs)
        for row, name in enumerate(names):
            yield Observation(
                "functions",
                f"{name}, round {round_index + 1}",
                repeat,
                SAME,
                _as_integers({device: sums[row] for device, sums in measured.items()}),
                {} if row else run.seconds,
            )


def _as_integers(checksums: Mapping[int, np.ndarray]) -> dict[int, tuple[int, ...]]:
    return {device: tuple(map(int, sums.reshape(-1))) for device, sums in checksums.items()}


@cache
def _matmul_chain_program(mesh: Mesh, size: int, chain: int) -> ChipProgram:
    def multiply(integers: jax.Array, scale: jax.Array) -> jax.Array:
        seed, low, span, rhs_low, rhs_span, checkerboard = integers
        lhs = bf16_matrix(2 * seed, (low, span), checkerboard, size)
        rhs = bf16_matrix(2 * seed + 1, (rhs_low, rhs_span), checkerboard, size)

        scaled = rhs * scale.astype(jnp.bfloat16)  # exact, since the scale is a power of two
        # Without the barrier XLA recomputes the operands, tile by tile, within each matmul.
        lhs, rhs, scaled = jax.lax.optimization_barrier((lhs, rhs, scaled))

        def multiply_twice(_: int, result: jax.Array) -> jax.Array:
            # The unit's own bf16 output: an epilogue in float32 takes a tenth of a GPU's time.
            for operand in (rhs, scaled):
                result = jax.lax.dot(result, operand, preferred_element_type=jnp.bfloat16)
            return result

        result: jax.Array = jax.lax.fori_loop(0, chain // 2, multiply_twice, lhs)
        return result[None, None]

    return ChipProgram("matmul_bf16", multiply, mesh)


@cache
def _int8_operand_program(mesh: Mesh, size: int, inner: int) -> ChipProgram:
    def generate(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        lhs, rhs = int8_operands(seed, size, inner)
        return lhs[None], rhs[None]

    return ChipProgram("int8 operands", generate, mesh)


@cache
def _int8_matmul_program(mesh: Mesh) -> ChipProgram:
    def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot(lhs[0], rhs[0], preferred_element_type=jnp.int32)[None, None]

    return ChipProgram("matmul_int8", multiply, mesh, (PER_CHIP, PER_CHIP))


@cache
def _function_program(mesh: Mesh, count: int) -> ChipProgram:
    def evaluate(first: jax.Array) -> tuple[jax.Array, ...]:
        # The count starts at an argument. XLA would evaluate constants during compilation.
        words = (jax.lax.iota(jnp.uint32, count) + first).astype(jnp.uint16)
        numbers = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
        outputs = []
        for dtype in DTYPES:
            operand = numbers.astype(dtype)
            outputs.append(jnp.stack([function(operand) for function in FUNCTIONS.values()])[None])
        return tuple(outputs)

    return ChipProgram("functions", evaluate, mesh)
