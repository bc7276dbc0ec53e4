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
    """The collectives of a compiled program with how often each stands there."""
    counts = Counter(re.findall(rf" ({_NAMES})(?:-start)?\(", compiled.as_text()))
    return ", ".join(f"{name} ×{count}" for name, count in sorted(counts.items())) or "none"


def bytes_sent(lowered: Any) -> list[int]:
    """What a device sends with permutes in each direction, from an unrolled program's text."""
    ways: Counter[str] = Counter()
    for pairs, tensor in _PERMUTE.findall(lowered.as_text()):
        *dims, kind = tensor.split("x")
        ways[pairs] += int(np.prod([int(dim) for dim in dims])) * {"f32": 4, "bf16": 2}[kind]
    return sorted(ways.values())


def error(result: Any, exact: Any) -> str:
    """The largest error against float64, beside the largest entry."""
    worst = np.abs(np.asarray(result, np.float64) - exact).max() / np.abs(exact).max()
    return f"error {worst:.0e} of the largest entry"


def milliseconds(function: Callable[..., Any], *arrays: Any) -> str:
    """The best of five runs."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - begin)
    return f"{min(times) * 1e3:.2f} ms"
