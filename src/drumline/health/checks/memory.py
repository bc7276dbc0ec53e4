"""Does memory keep what was written: six patterns over nearly all that is free of it.

Alternating bits find cells that stick or lean on their neighbours; a word's own address as its
value finds lines that select the wrong cell, which no constant would show. One block has all its
bits inverted, over and over: that is memory at its full speed.
"""

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.health.bench import ALL, EACH, Bench, OnChips
from drumline.health.checks.sizes import Sizes
from drumline.health.observations import ZERO, Observation

WORD = 4
INVERSIONS = 32
"""How often each bit of a block is inverted; even, so that all are as they were."""
PATTERNS = {
    "00": (0x00000000, 0),
    "FF": (0xFFFFFFFF, 0),
    "AA": (0xAAAAAAAA, 0),
    "55": (0x55555555, 0),
    "address": (0x00000000, 1),
    "inverse address": (0xFFFFFFFF, 1),
}
"""A word is its address times the second number, with the bits of the first flipped."""


def memory(bench: Bench, sizes: Sizes, turn: int) -> Iterator[Observation]:
    """Fill all blocks, then read all of them: what is read was written long before."""
    size = min(sizes.block, sizes.memory) // WORD
    fill, check = _fill(bench.chips, size), _check(bench.chips, size)
    blocks = max(sizes.memory // (size * WORD), 1)
    for name, (flipped, addressed) in PATTERNS.items():
        seconds = dict.fromkeys((device.id for device in bench.local), 0.0)
        filled: list[Any] = []
        arguments = []
        for block in range(blocks):
            place = (flipped, addressed, block * size % 2**32)
            arguments.append(np.array(place, np.uint32))
            try:
                ran = bench.run(fill, arguments[-1])
            except RuntimeError as trouble:
                if "RESOURCE_EXHAUSTED" not in str(trouble) or not filled:
                    raise
                # Free memory is in pieces; what is filled by now is what can be tested.
                break
            filled.append(ran.outputs)
            seconds = {device: seconds[device] + taken for device, taken in ran.seconds.items()}
        if not check.warm:
            bench.read(check, filled[0], arguments[0])
            check.warm = True
        began = time.perf_counter()
        wrong: dict[int, int] = dict.fromkeys(seconds, 0)
        while filled:
            for device, told in bench.read(check, filled.pop(0), arguments.pop(0)).items():
                wrong[device] += int(told)
        reading = time.perf_counter() - began
        yield Observation(
            "memory",
            f"pattern {name}, round {turn + 1}",
            0,
            ZERO,
            {device: (count,) for device, count in wrong.items()},
            {device: taken + reading for device, taken in seconds.items()},
        )
    yield from _inverted(bench, size, turn)


def _inverted(bench: Bench, size: int, turn: int) -> Iterator[Observation]:
    fill, check = _fill(bench.chips, size), _check(bench.chips, size)
    place = np.array(PATTERNS["address"] + (0,), np.uint32)
    for run in range(2):
        ran = bench.run(_invert(bench.chips), bench.run(fill, place).outputs)
        read = bench.read(check, ran.outputs, place)
        yield Observation(
            "memory",
            f"inverted {INVERSIONS} times, round {turn + 1}",
            run,
            ZERO,
            {device: (int(told),) for device, told in read.items()},
            ran.seconds,
            bytes=2.0 * INVERSIONS * size * WORD,
        )


def _word(place: jax.Array, size: int) -> jax.Array:
    flipped, addressed, base = place
    word: jax.Array = ((jax.lax.iota(jnp.uint32, size) + base) * addressed) ^ flipped
    return word


@cache
def _fill(mesh: Mesh, size: int) -> OnChips:
    def fill(place: jax.Array) -> jax.Array:
        return _word(place, size)[None]

    return OnChips("memory", fill, mesh)


@cache
def _invert(mesh: Mesh) -> OnChips:
    def invert(block: jax.Array) -> jax.Array:
        inverted: jax.Array = jax.lax.fori_loop(0, INVERSIONS, lambda _, words: ~words, block)
        return inverted

    return OnChips("inversion", invert, mesh, EACH)


@cache
def _check(mesh: Mesh, size: int) -> OnChips:
    def check(block: jax.Array, place: jax.Array) -> jax.Array:
        return (block[0] != _word(place, size)).sum(dtype=jnp.uint32)[None]

    return OnChips("memory, read", check, mesh, (EACH, ALL))
