"""What a program should communicate, written down by hand, and the ring algorithm's bytes.

The formulas are here a second time on purpose: a test that took them from the code it tests would
agree with whatever that code says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Key = tuple[str, tuple[str, ...], str, int]
"""A collective's kind, axes, dtype and bytes sent by one device in one execution."""


class Built(NamedTuple):
    """A program, ready to be compiled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: jax.sharding.Mesh


@dataclass(frozen=True)
class Expected:
    """A collective that theory says the program has, and how often it runs in one call."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    sent: int
    count: int = 1

    @property
    def key(self) -> Key:
        """What is compared, apart from the count."""
        return self.kind, self.axes, self.dtype, self.sent


@dataclass(frozen=True)
class Program:
    """A small program whose communication is known without compiling it."""

    name: str
    build: Callable[[], Built]
    expected: tuple[Expected, ...]
    merged: bool = False
    """Whether XLA may make one collective of several, so that only their bytes are certain."""
    at_least: bool = False
    """Whether a loop's length is decided by the data: the counts are then those of one step."""


def all_gather(
    axes: str, devices: int, shard: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """Every device sends each shard but the last one it receives, once: n − 1 shards."""
    return Expected("all-gather", tuple(axes), dtype, (devices - 1) * shard, count)


def reduce_scatter(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """Every device sends each n-th of its operand but the one it keeps."""
    sent = (devices - 1) * operand // devices
    return Expected("reduce-scatter", tuple(axes), dtype, sent, count)


def all_reduce(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """A reduce-scatter, and an all-gather of what it leaves."""
    sent = 2 * (devices - 1) * operand // devices
    return Expected("all-reduce", tuple(axes), dtype, sent, count)


def all_to_all(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """An n-th of the operand for every other device."""
    sent = (devices - 1) * operand // devices
    return Expected("all-to-all", tuple(axes), dtype, sent, count)


def permute(axes: str, operand: int, dtype: str = "float32", count: int = 1) -> Expected:
    """All of the operand, to one other device."""
    return Expected("collective-permute", tuple(axes), dtype, operand, count)


def tally(collectives: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    """How often each of them runs, those that are alike counted together.

    Three instructions and one that runs three times are the same communication.
    """
    counts: Counter[Key] = Counter()
    for key, count in collectives:
        counts[key] += count
    return dict(counts)


def expected_counts(collectives: Iterable[Expected]) -> dict[Key, int]:
    """What is expected, as a tally."""
    return tally((collective.key, collective.count) for collective in collectives)


def told_counts(collectives: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """What a report's dictionary tells, as a tally."""
    return tally(
        ((one["kind"], tuple(one["axes"]), one["dtype"], one["sent"]), one["count"])
        for one in collectives
    )


def totals(counts: Mapping[Key, int]) -> dict[tuple[str, tuple[str, ...], str], int]:
    """The bytes that each kind sends over each group of axes, whoever is merged with whom."""
    sums: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for (kind, axes, dtype, sent), count in counts.items():
        sums[kind, axes, dtype] += sent * count
    return dict(sums)
