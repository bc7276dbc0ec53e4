"""What travels, read from the StableHLO text of a lowered program."""

from __future__ import annotations

import re
from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh

BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1}
_PERMUTE = re.compile(
    r"stablehlo\.collective_permute.*source_target_pairs = dense<(\[\[.*?\]\])>"
    r".*: \(tensor<([\dx]+)x(\w+)>\) ->"
)
_LOOP = re.compile(
    r"cond \{\n\s*%\S+ = stablehlo\.constant dense<(\d+)> : tensor<i32>.*?do \{.*?call @(\w+)\(",
    re.DOTALL,
)


def bytes_each_way(lowered: jax.stages.Lowered, mesh: Mesh, axis: str) -> dict[int, int]:
    """Bytes that each device sends to the next (+1) and the one before (-1) along a mesh axis.

    A loop's body is a function of its own in the text; what it sends counts as often as the loop
    goes round.
    """
    main, *functions = lowered.as_text().split("func.func private @")
    bodies = {text.partition("(")[0]: text for text in functions}
    sent = _sent(main, mesh, axis)
    for trips, name in _LOOP.findall(main):
        for way, size in _sent(bodies[name], mesh, axis).items():
            sent[way] += int(trips) * size
    return dict(sent)


def _sent(text: str, mesh: Mesh, axis: str) -> Counter[int]:
    sent: Counter[int] = Counter()
    for pairs, dimensions, dtype in _PERMUTE.findall(text):
        size = BYTES[dtype]
        for length in dimensions.split("x"):
            size *= int(length)
        sent[_way(pairs, mesh, axis)] += size
    return sent


def _way(pairs: str, mesh: Mesh, axis: str) -> int:
    """Which way round every device of the mesh sends, alike in each of its rings."""
    moves = {int(source): int(to) for source, to in re.findall(r"(\d+), (\d+)", pairs)}
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    for way in (1, -1):
        targets = np.roll(numbers, -way, mesh.axis_names.index(axis))
        if moves == dict(zip(numbers.flat, targets.flat, strict=True)):
            return way
    raise AssertionError(f"not all neighbours along {axis} of {dict(mesh.shape)}: {pairs}")
