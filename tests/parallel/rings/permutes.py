"""Byte counts of permutes, read from the StableHLO text of a lowered program."""

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


def bytes_per_direction(lowered: jax.stages.Lowered, mesh: Mesh, axis: str) -> dict[int, int]:
    """Return the bytes that each device sends to the next (+1) and the previous device (-1).

    The permutes of a loop's body count as often as the loop runs. The text may contain the body
    inline or, as in JAX 0.10, as a separate function.
    """
    main, *functions = lowered.as_text().split("func.func private @")
    bodies = {text.partition("(")[0]: text for text in functions}
    return dict(_count_bytes(main, bodies, mesh, axis))


def _count_bytes(text: str, bodies: dict[str, str], mesh: Mesh, axis: str) -> Counter[int]:
    bytes_by_direction: Counter[int] = Counter()
    open_loops: list[tuple[int, int]] = []  # the depth and trip count of each open loop
    depth, trips = 0, 0
    for line in text.splitlines():
        if "cond {" in line:
            trips = 0
        elif not trips and (bound := _CONSTANT.search(line)):
            trips = int(bound[1])
        depth += line.count("{") - line.count("}")
        while open_loops and depth < open_loops[-1][0]:
            open_loops.pop()
        if "} do {" in line:
            open_loops.append((depth, trips))
        repetitions = prod(count for _, count in open_loops)
        for pairs, dimensions, dtype in _PERMUTE.findall(line):
            size = BYTES[dtype] * prod(map(int, dimensions.split("x")))
            bytes_by_direction[_direction(pairs, mesh, axis)] += repetitions * size
        for name in _CALL.findall(line):
            for direction, size in _count_bytes(bodies[name], bodies, mesh, axis).items():
                bytes_by_direction[direction] += repetitions * size
    return bytes_by_direction


def _direction(pairs: str, mesh: Mesh, axis: str) -> int:
    """Return the direction in which every device of the mesh sends, equal in each of its rings."""
    target_of_source = {int(source): int(to) for source, to in re.findall(r"(\d+), (\d+)", pairs)}
    device_ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    for direction in (1, -1):
        targets = np.roll(device_ids, -direction, mesh.axis_names.index(axis))
        if target_of_source == dict(zip(device_ids.flat, targets.flat, strict=True)):
            return direction
    raise AssertionError(f"not all neighbours along {axis} of {dict(mesh.shape)}: {pairs}")
