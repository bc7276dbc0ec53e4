"""Helpers of the examples in this folder: count collectives and measure bytes, errors and times."""

# mypy: allow-untyped-calls

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_NAMES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_PERMUTE = re.compile(
    r"collective_permute.*?source_target_pairs = dense<(\[\[.*?\]\])>.*?: \(tensor<([^>]*)>\)"
)


def collectives(compiled: Any) -> str:
    """Return the collectives of a compiled program with their counts."""
    counts = Counter(re.findall(rf" ({_NAMES})(?:-start)?\(", compiled.as_text()))
    return ", ".join(f"{name} ×{count}" for name, count in sorted(counts.items())) or "none"


def bytes_sent(lowered: Any) -> list[int]:
    """Return the bytes that a device sends with permutes in each direction of an unrolled
    program.
    """
    bytes_by_direction: Counter[str] = Counter()
    for pairs, tensor in _PERMUTE.findall(lowered.as_text()):
        *dims, dtype = tensor.split("x")
        bytes_by_direction[pairs] += (
            int(np.prod([int(dim) for dim in dims])) * {"f32": 4, "bf16": 2}[dtype]
        )
    return sorted(bytes_by_direction.values())


def error(result: Any, exact: Any) -> str:
    """Return the largest error against float64, relative to the largest entry."""
    worst = np.abs(np.asarray(result, np.float64) - exact).max() / np.abs(exact).max()
    return f"error {worst:.0e} of the largest entry"


def milliseconds(function: Callable[..., Any], *arrays: Any) -> str:
    """Return the best time of five runs."""
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        durations.append(time.perf_counter() - start)
    return f"{min(durations) * 1e3:.2f} ms"
