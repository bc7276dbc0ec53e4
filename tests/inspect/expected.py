"""The expected communication of a program, written by hand, and the ring algorithm's bytes.

The formulas are repeated here on purpose. A test that took them from the tested code would agree
with any error in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Key = tuple[str, tuple[str, ...], str, int]
"""A collective's kind, axes, dtype and bytes sent by one device in one execution."""


class ProgramCall(NamedTuple):
    """A function with its arguments and mesh, ready to be compiled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: jax.sharding.Mesh


@dataclass(frozen=True)
class Expected:
    """A collective that a program must have, and its number of executions in one call."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    sent: int
    count: int = 1

    @property
    def key(self) -> Key:
        """The compared fields, without the count."""
        return self.kind, self.axes, self.dtype, self.sent


@dataclass(frozen=True)
class Program:
    """A small program with communication that is known without compiling it."""

    name: str
    build: Callable[[], ProgramCall]
    expected: tuple[Expected, ...]
    merged: bool = False
    """True if XLA may merge several collectives into one, so that only their bytes are certain."""
    at_least: bool = False
    """True if the data decide a loop's length. The counts are then those of one iteration."""


def all_gather(
    axes: str, devices: int, shard: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """Every device sends each shard except the last one it receives: n − 1 shards."""
    return Expected("all-gather", tuple(axes), dtype, (devices - 1) * shard, count)


def reduce_scatter(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """Every device sends each n-th of its operand except the one that it keeps."""
    sent = (devices - 1) * operand // devices
    return Expected("reduce-scatter", tuple(axes), dtype, sent, count)


def all_reduce(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """A reduce-scatter, followed by an all-gather of the result."""
    sent = 2 * (devices - 1) * operand // devices
    return Expected("all-reduce", tuple(axes), dtype, sent, count)


def all_to_all(
    axes: str, devices: int, operand: int, dtype: str = "float32", count: int = 1
) -> Expected:
    """Every device sends an n-th of the operand to every other device."""
    sent = (devices - 1) * operand // devices
    return Expected("all-to-all", tuple(axes), dtype, sent, count)


def permute(axes: str, operand: int, dtype: str = "float32", count: int = 1) -> Expected:
    """Every device sends its whole operand to one other device."""
    return Expected("collective-permute", tuple(axes), dtype, operand, count)


def tally(collectives: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    """Return the executions of each collective, with equal ones added up.

    Three instructions and one instruction that runs three times are the same communication.
    """
    counts: Counter[Key] = Counter()
    for key, count in collectives:
        counts[key] += count
    return dict(counts)


def expected_counts(collectives: Iterable[Expected]) -> dict[Key, int]:
    """Return the tally of the expected collectives."""
    return tally((collective.key, collective.count) for collective in collectives)


def reported_counts(collectives: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """Return the tally of the collectives in a report's dictionary."""
    return tally(
        ((row["kind"], tuple(row["axes"]), row["dtype"], row["sent"]), row["count"])
        for row in collectives
    )


def totals(counts: Mapping[Key, int]) -> dict[tuple[str, tuple[str, ...], str], int]:
    """Return the bytes of each kind over each group of axes, regardless of merging."""
    bytes_by_kind: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for (kind, axes, dtype, sent), count in counts.items():
        bytes_by_kind[kind, axes, dtype] += sent * count
    return dict(bytes_by_kind)
