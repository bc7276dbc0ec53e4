"""Global batches on the devices. Each host reads the rows of its own devices, ahead of time.

`grain` reads ahead in threads, from a `MapDataset` with an element per batch. The *position* of a
run in its data is the number of records that it has consumed.
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

from drumline.errors import UserError
from drumline.train.data import Data, Rows

PREFETCH = 4
"""The number of batches to place on the devices in advance. More would use too much memory."""

RecordIndices = Callable[[int, np.ndarray], np.ndarray]
"""A function from a position and rows of the global batch to the indices of their records."""


@dataclass(frozen=True)
class BatchLoader:
    """The loader of any batch of a data set with the sharding that the model requires."""

    data: Data
    mesh: Mesh
    spec: PartitionSpec

    def __post_init__(self) -> None:
        """Reject a batch that the mesh does not divide."""
        axes = _row_axes(self.spec)
        unknown = [axis for axis in axes if axis not in self.mesh.shape]
        if unknown:
            names = ", ".join(self.mesh.shape)
            raise UserError(
                f"mesh: the batch is sharded over axis {unknown[0]!r}, but the mesh has {names}"
            )
        shards = prod(self.mesh.shape[axis] for axis in axes)
        if self.data.batch % shards:
            raise UserError(
                f"data: a batch of {self.data.batch} rows is not divisible by {shards} devices"
            )

    def load(self, position: int, record_indices: RecordIndices) -> dict[str, jax.Array]:
        """Return the global batch at a position. This host reads only the rows that it needs."""
        local_rows = self.rows_by_host[jax.process_index()]
        columns = self.data.records.rows(record_indices(position, local_rows))
        starts = {int(row): index for index, row in enumerate(local_rows)}
        return {name: self._shard(column, starts) for name, column in columns.items()}

    def load_training(self, position: int) -> dict[str, jax.Array]:
        """Return the batch of the training run at a position, read now and by the caller."""
        return self.load(position, self.data.numbers)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of a global batch. This reads a record."""

        def shape(row: np.ndarray) -> jax.ShapeDtypeStruct:
            # JAX arrays have no 64-bit types by default.
            dtype = jax.dtypes.canonicalize_dtype(row.dtype)
            global_shape = (self.data.batch, *row.shape[1:])
            return jax.ShapeDtypeStruct(global_shape, dtype, sharding=self._sharding(row.ndim))

        first: Rows = self.data.records.rows(np.zeros(1, np.int64))
        return {name: shape(row) for name, row in first.items()}

    @cached_property
    def rows_by_host(self) -> dict[int, np.ndarray]:
        """The rows of the global batch that the devices of each host have."""
        rows: dict[int, set[range]] = {}
        indices: Any = self._sharding(1).devices_indices_map((self.data.batch,))
        for device, (index,) in indices.items():
            shard = range(*index.indices(self.data.batch))
            rows.setdefault(device.process_index, set()).add(shard)
        return {host: _sorted(rows[host]) for host in sorted(rows)}

    def _shard(self, column: np.ndarray, starts: dict[int, int]) -> jax.Array:
        """Make a global array from the rows of this host. `starts` maps global to local rows."""

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            rows = range(*index[0].indices(self.data.batch))
            start = starts[rows.start]
            values: np.ndarray = column[(slice(start, start + len(rows)), *index[1:])]
            return values

        shape = (self.data.batch, *column.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding(column.ndim), shard)

    def _sharding(self, dimensions: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*self.spec[:dimensions]))


class Prefetcher:
    """Reads the batches of a training run ahead, in order from any position."""

    def __init__(self, loader: BatchLoader) -> None:
        """Do not read anything yet."""
        self.loader = loader
        self._iterator: Any = None
        self._next_position = -1

    def next_batch(self, position: int) -> dict[str, jax.Array]:
        """Return the batch at a position. Any position but the next restarts the reading."""
        if position != self._next_position:
            self.close()
            data = self.loader.data
            options = grain.ReadOptions(num_threads=data.threads, prefetch_buffer_size=PREFETCH)
            source = grain.MapDataset.source(_BatchSource(self.loader, position))
            self._iterator = iter(source.to_iter_dataset(options))
        batch: dict[str, jax.Array] = next(self._iterator)
        self._next_position = position + self.loader.data.batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        if self._iterator is not None:
            self._iterator.close()


@dataclass(frozen=True)
class _BatchSource:
    """The data source of grain. Element i is the batch i batches after the first position."""

    loader: BatchLoader
    first_position: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> dict[str, jax.Array]:
        return self.loader.load_training(self.first_position + int(index) * self.loader.data.batch)


def iterate_once(loader: BatchLoader) -> Iterator[tuple[dict[str, jax.Array], int]]:
    """Yield all records once, in order, as batches with the number of rows that count.

    The last batch is padded with the first record. It is followed by a batch of only this record,
    with minus the number of padding rows. All batches have the same shape, and a sum of means over
    rows, weighted by these numbers, is exact.
    """
    count, size = len(loader.data.records), loader.data.batch

    def record_indices(position: int, rows: np.ndarray) -> np.ndarray:
        in_order = position + rows
        return np.where(in_order < count, in_order, 0)

    padded_count = -(-count // size) * size
    for position in range(0, padded_count, size):
        yield loader.load(position, record_indices), size
    padding = padded_count - count
    if padding:
        yield loader.load(padded_count, record_indices), -padding


def _row_axes(spec: PartitionSpec) -> tuple[str, ...]:
    first = spec[0] if len(spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def _sorted(ranges: set[range]) -> np.ndarray:
    return np.unique(np.concatenate([np.array(rows) for rows in ranges]))
