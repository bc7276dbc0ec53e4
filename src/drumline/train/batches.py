"""Global batches on the devices: each host reads the rows its own devices hold, ahead of time.

`grain` does the reading ahead, in threads, from a `MapDataset` with one element for each batch.
"""

# mypy: allow-untyped-calls

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import grain  # type: ignore[import-untyped]
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drumline.train.data import Data, Rows
from drumline.train.mistakes import Mistake

AHEAD = 4
"""Batches that wait on the devices: enough for a slow read, few enough for their memory."""

Numbers = Callable[[int, np.ndarray], np.ndarray]
"""Records taken before it and rows of the global batch → numbers of records."""


@dataclass(frozen=True)
class Placed:
    """Puts any batch of a data set where the model wants it."""

    data: Data
    mesh: Mesh
    spec: PartitionSpec

    def __post_init__(self) -> None:
        """Refuse rows that do not divide."""
        over = _axes_of_rows(self.spec)
        unknown = [axis for axis in over if axis not in self.mesh.shape]
        if unknown:
            axes = ", ".join(self.mesh.shape)
            raise Mistake(f"mesh: the batch lies over axis {unknown[0]!r}, the mesh has {axes}")
        parts = prod(self.mesh.shape[axis] for axis in over)
        if self.data.batch % parts:
            raise Mistake(f"data: a batch of {self.data.batch} rows does not divide by {parts}")

    def load(self, taken: int, numbers: Numbers) -> dict[str, jax.Array]:
        """The global batch after so many records, of which this host reads what it needs."""
        mine = self.rows_of_hosts[jax.process_index()]
        block = self.data.records.rows(numbers(taken, mine))
        start_of = {int(row): place for place, row in enumerate(mine)}
        return {name: self._place(array, start_of) for name, array in block.items()}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a global batch and their places, without reading one."""

        def shape(row: np.ndarray) -> jax.ShapeDtypeStruct:
            whole = (self.data.batch, *row.shape[1:])
            # As on the devices, where there are no doubles unless they are asked for.
            dtype = jax.dtypes.canonicalize_dtype(row.dtype)
            return jax.ShapeDtypeStruct(whole, dtype, sharding=self._sharding(row.ndim))

        one: Rows = self.data.records.rows(np.zeros(1, np.int64))
        return {name: shape(row) for name, row in one.items()}

    @cached_property
    def rows_of_hosts(self) -> dict[int, np.ndarray]:
        """Which rows of the global batch each host's devices hold."""
        held: dict[int, set[range]] = {}
        sharding = self._sharding(1)
        places: Any = sharding.devices_indices_map((self.data.batch,))
        for device, (index,) in places.items():
            rows = range(*index.indices(self.data.batch))
            held.setdefault(device.process_index, set()).add(rows)
        return {host: _sorted(held[host]) for host in sorted(held)}

    def next_to(self, taken: int) -> dict[str, jax.Array]:
        """The batch of a training run after so many records, read now and by whoever asks."""
        return self.load(taken, self.data.numbers)

    def _place(self, block: np.ndarray, start_of: dict[int, int]) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            rows = range(*index[0].indices(self.data.batch))
            start = start_of[rows.start]
            found: np.ndarray = block[(slice(start, start + len(rows)), *index[1:])]
            return found

        shape = (self.data.batch, *block.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding(block.ndim), piece)

    def _sharding(self, dimensions: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*self.spec[:dimensions]))


class Batches:
    """The batches of a training run, in order from any record on."""

    def __init__(self, placed: Placed) -> None:
        """Read nothing yet."""
        self.placed = placed
        self._ahead: Any = None
        self._next = -1

    def take(self, taken: int) -> dict[str, jax.Array]:
        """The batch after so many records; in order it is there already, elsewhere it is read."""
        if taken != self._next:
            self.close()
            data = self.placed.data
            reading = grain.ReadOptions(num_threads=data.threads, prefetch_buffer_size=AHEAD)
            source = grain.MapDataset.source(_From(self.placed, taken))
            self._ahead = iter(source.to_iter_dataset(reading))
        batch: dict[str, jax.Array] = next(self._ahead)
        self._next = taken + self.placed.data.batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.close()


@dataclass(frozen=True)
class _From:
    """What grain reads from: element i is batch number i, counted from some record on."""

    placed: Placed
    first: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: Any) -> dict[str, jax.Array]:
        return self.placed.next_to(self.first + int(number) * self.placed.data.batch)


def once_through(placed: Placed) -> Iterator[tuple[dict[str, jax.Array], int]]:
    """All records once, in order: batches, and how many of their rows count.

    The last batch is filled up with the first record, and then one batch of nothing else follows,
    which counts for minus the filling: a sum of means over rows is exact with every batch of one
    shape.
    """
    count, size = len(placed.data.records), placed.data.batch

    def numbers(taken: int, rows: np.ndarray) -> np.ndarray:
        in_order = taken + rows
        return np.where(in_order < count, in_order, 0)

    whole = -(-count // size) * size
    for taken in range(0, whole, size):
        yield placed.load(taken, numbers), size
    filling = whole - count
    if filling:
        yield placed.load(whole, numbers), -filling


def _axes_of_rows(spec: PartitionSpec) -> tuple[str, ...]:
    first = spec[0] if len(spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def _sorted(ranges: set[range]) -> np.ndarray:
    return np.unique(np.concatenate([np.array(rows) for rows in ranges]))
