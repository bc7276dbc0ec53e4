"""What travels, read from the StableHLO text of a lowered program."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

import jax
import numpy as np
from jax.sharding import Mesh

BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1}
_PERMUTE = re.compile(
    r"stablehlo\.collective_permute.*source_target_pairs = dense<(\[\[.*?\]\])>"
    r".*: \(tensor<([\dx]+)x(\w+)>\) ->"
)
_CALL = re.compile(r"\bcall @(\w+)\(")
_CONSTANT = re.compile(r"stablehlo\.constant dense<(\d+)> : tensor<i32>")


def bytes_each_way(lowered: jax.stages.Lowered, mesh: Mesh, axis: str) -> dict[int, int]:
    """Bytes that each device sends to the next (+1) and the one before (-1) along a mesh axis.

    What a loop's body sends counts as often as the loop goes round, whether the text has the body
    in its place or, as that of JAX 0.10, as a function of its own.
    """
    main, *functions = lowered.as_text().split("func.func private @")
    bodies = {text.partition("(")[0]: text for text in functions}
    return dict(_sent(main, bodies, mesh, axis))


def _sent(text: str, bodies: dict[str, str], mesh: Mesh, axis: str) -> Counter[int]:
    sent: Counter[int] = Counter()
    around: list[tuple[int, int]] = []  # of each loop that is open, its depth and its trips
    depth, trips = 0, 0
    for line in text.splitlines():
        if "cond {" in line:
            trips = 0
        elif not trips and (bound := _CONSTANT.search(line)):
            trips = int(bound[1])
        depth += line.count("{") - line.count("}")
        while around and depth < around[-1][0]:
            around.pop()
        if "} do {" in line:
            around.append((depth, trips))
        times = prod(count for _, count in around)
        for pairs, dimensions, dtype in _PERMUTE.findall(line):
            size = BYTES[dtype] * prod(map(int, dimensions.split("x")))
            sent[_way(pairs, mesh, axis)] += times * size
        for name in _CALL.findall(line):
            for way, size in _sent(bodies[name], bodies, mesh, axis).items():
                sent[way] += times * size
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
