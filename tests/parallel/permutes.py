"""What travels, read from the StableHLO text of a lowered program."""

from __future__ import annotations

import re
from collections import Counter

import jax

BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1}
_PERMUTE = re.compile(
    r"stablehlo\.collective_permute.*source_target_pairs = dense<(\[\[.*?\]\])>"
    r".*: \(tensor<([\dx]+)x(\w+)>\) ->"
)
_TRIPS = re.compile(r"cond \{\n\s*%\S+ = stablehlo\.constant dense<(\d+)> : tensor<i32>")


def bytes_each_way(lowered: jax.stages.Lowered, ring: int) -> dict[int, int]:
    """Bytes that each device sends to its right (+1) and to its left (-1) neighbour.

    The ring is the last axis of the mesh. A loop's body is a function of its own in the text;
    what it sends counts as often as the loop goes round.
    """
    main, *bodies = lowered.as_text().split("func.func private")
    sent = _sent(main, ring)
    if "stablehlo.while" in main:
        (trip,) = {int(count) for count in _TRIPS.findall(main)}
        for body in bodies:
            for way, size in _sent(body, ring).items():
                sent[way] += trip * size
    return dict(sent)


def _sent(text: str, ring: int) -> Counter[int]:
    sent: Counter[int] = Counter()
    for pairs, dimensions, dtype in _PERMUTE.findall(text):
        size = BYTES[dtype]
        for length in dimensions.split("x"):
            size *= int(length)
        sent[_way(pairs, ring)] += size
    return sent


def _way(pairs: str, ring: int) -> int:
    moves = [tuple(map(int, pair)) for pair in re.findall(r"(\d+), (\d+)", pairs)]
    for way in (1, -1):
        if all(
            target == source - source % ring + (source + way) % ring for source, target in moves
        ):
            return way
    raise AssertionError(f"not a ring of {ring}: {pairs}")
