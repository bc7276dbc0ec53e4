"""Test the memory: write six patterns to nearly all free memory and read them back.

Alternating bits find cells that stick or depend on their neighbours. Addresses as values find
address lines that select an incorrect cell. Repeated inversions of a block run the memory at full
speed.
"""

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.health.findings import ZERO, Observation
from drumline.health.inputs import Sizes
from drumline.health.runner import PER_CHIP, REPLICATED, ChipProgram, ChipRunner

WORD_BYTES = 4
INVERSIONS = 32
"""The number of inversions of a block; even, so that the bits do not change."""
PATTERNS = {
    "00": (0x00000000, 0),
    "FF": (0xFFFFFFFF, 0),
    "AA": (0xAAAAAAAA, 0),
    "55": (0x55555555, 0),
    "address": (0x00000000, 1),
    "inverse address": (0xFFFFFFFF, 1),
}
"""A mask and a factor. A word is its address times the factor, exclusive-or the mask."""


def run_memory_test(runner: ChipRunner, sizes: Sizes, round_index: int) -> Iterator[Observation]:
    """Fill all blocks before reading them, so that a block is read long after the write."""
    size = min(sizes.block, sizes.memory) // WORD_BYTES
    fill = _fill_program(runner.host_mesh, size)
    mismatch_program = _mismatch_program(runner.host_mesh, size)
    block_count = max(sizes.memory // (size * WORD_BYTES), 1)
    for name, (mask, factor) in PATTERNS.items():
        seconds = dict.fromkeys((device.id for device in runner.local_devices), 0.0)
        blocks: list[Any] = []
        arguments = []
        for block in range(block_count):
            pattern = (mask, factor, block * size % 2**32)
            arguments.append(np.array(pattern, np.uint32))
            try:
                run = runner.run(fill, arguments[-1])
            except RuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or not blocks:
                    raise
                # Free memory is fragmented. Test the allocated blocks.
                break
            blocks.append(run.outputs)
            seconds = {device: seconds[device] + run.seconds[device] for device in run.seconds}
        if not mismatch_program.compiled:
            runner.measure(mismatch_program, blocks[0], arguments[0])
            mismatch_program.compiled = True
        started_at = time.perf_counter()
        mismatches: dict[int, int] = dict.fromkeys(seconds, 0)
        while blocks:
            counts = runner.measure(mismatch_program, blocks.pop(0), arguments.pop(0))
            for device, count in counts.items():
                mismatches[device] += int(count)
        read_seconds = time.perf_counter() - started_at
        yield Observation(
            "memory",
            f"pattern {name}, round {round_index + 1}",
            0,
            ZERO,
            {device: (count,) for device, count in mismatches.items()},
            {device: fill_seconds + read_seconds for device, fill_seconds in seconds.items()},
        )
    yield from _run_inversion_test(runner, size, round_index)


def _run_inversion_test(runner: ChipRunner, size: int, round_index: int) -> Iterator[Observation]:
    fill = _fill_program(runner.host_mesh, size)
    mismatch_program = _mismatch_program(runner.host_mesh, size)
    pattern = np.array(PATTERNS["address"] + (0,), np.uint32)
    for repeat in range(2):
        block = runner.run(fill, pattern).outputs
        run = runner.run(_inversion_program(runner.host_mesh), block)
        counts = runner.measure(mismatch_program, run.outputs, pattern)
        yield Observation(
            "memory",
            f"inverted {INVERSIONS} times, round {round_index + 1}",
            repeat,
            ZERO,
            {device: (int(count),) for device, count in counts.items()},
            run.seconds,
            bytes=2.0 * INVERSIONS * size * WORD_BYTES,
        )


def _pattern_block(pattern: jax.Array, size: int) -> jax.Array:
    mask, factor, base = pattern
    block: jax.Array = ((jax.lax.iota(jnp.uint32, size) + base) * factor) ^ mask
    return block


@cache
def _fill_program(mesh: Mesh, size: int) -> ChipProgram:
    def fill(pattern: jax.Array) -> jax.Array:
        return _pattern_block(pattern, size)[None]

    return ChipProgram("memory", fill, mesh)


@cache
def _inversion_program(mesh: Mesh) -> ChipProgram:
    def invert(block: jax.Array) -> jax.Array:
        inverted: jax.Array = jax.lax.fori_loop(0, INVERSIONS, lambda _, values: ~values, block)
        return inverted

    return ChipProgram("inversion", invert, mesh, PER_CHIP)


@cache
def _mismatch_program(mesh: Mesh, size: int) -> ChipProgram:
    def count(block: jax.Array, pattern: jax.Array) -> jax.Array:
        return (block[0] != _pattern_block(pattern, size)).sum(dtype=jnp.uint32)[None]

    return ChipProgram("memory, read", count, mesh, (PER_CHIP, REPLICATED))
