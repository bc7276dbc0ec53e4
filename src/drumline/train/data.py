"""Data sources, and the order in which their records form global batches.

Records are read by index, so the position of a run in its data is one integer: the number of
records that it has consumed. The order of the records depends only on the seed. It does not depend
on the number of hosts or on the batch size. Every epoch has a different order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drumline.deprecated import renamed_keywords
from drumline.errors import UserError

Rows = dict[str, np.ndarray]
"""Arrays by name, with a row per record."""


class Records(Protocol):
    """A set of records that are read by index, many at a time."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def rows(self, indices: np.ndarray, /) -> Rows:
        """Return the records with these indices, in this order."""
        ...


@dataclass(frozen=True)
class Data:
    """Records and the way they form batches."""

    records: Records
    batch: int
    """The rows of a global batch, over all hosts."""
    shuffle: bool = True
    seed: int = 0
    threads: int = 2
    """The number of threads on each host that read ahead."""

    def __post_init__(self) -> None:
        """Reject an empty batch or an empty data set."""
        if self.batch < 1:
            raise UserError(f"data: a batch of {self.batch} rows is empty; use 1 or more")
        if len(self.records) < 1:
            raise UserError("data: there are no records")

    @renamed_keywords(taken="position")
    def numbers(self, position: int, rows: np.ndarray) -> np.ndarray:
        """Return the indices of the records in these rows of the batch at a position."""
        count = len(self.records)
        epochs, offsets = np.divmod(position + rows.astype(np.int64), count)
        if not self.shuffle:
            return offsets
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            indices[in_epoch] = shuffled(offsets[in_epoch], count, (self.seed, int(epoch)))
        return indices


def shuffled(offsets: np.ndarray, count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Map offsets to their values in a random permutation of `count` numbers.

    The permutation is computed and never stored. A Feistel network permutes the numbers below a
    power of four. A result of `count` or more passes through the network until it is smaller, so
    the numbers below `count` are permuted among themselves.
    """
    half = np.uint64(max(1, -(-max(count - 1, 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(6, np.uint64)
    values = offsets.astype(np.uint64)
    pending = np.arange(len(values))
    while pending.size:
        left, right = values[pending] >> half, values[pending] & mask
        for key in keys:
            left, right = right, left ^ (_hash(right + key) & mask)
        values[pending] = left << half | right
        pending = pending[values[pending] >= count]
    return values.astype(np.int64)


def _hash(words: np.ndarray) -> np.ndarray:
    """Hash 64-bit words with the finalizer of splitmix64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    hashed: np.ndarray = words ^ words >> np.uint64(31)
    return hashed


# Sources ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrays:
    """Records that are rows of arrays in memory."""

    columns: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        """Reject columns of different lengths."""
        if not self.columns:
            raise UserError("data: there are no arrays")
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise UserError(f"data: all arrays need the same number of rows, but {text}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())))

    def rows(self, indices: np.ndarray, /) -> Rows:
        """Return these rows."""
        return {name: column[indices] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Tokens:
    """Windows of a long sequence of token ids. The last id of a window starts the next window."""

    ids: np.ndarray
    length: int

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.ids) - 1) // self.length

    def rows(self, indices: np.ndarray, /) -> Rows:
        """Return these windows as `tokens`, with `length` inputs and a last id to predict."""
        offsets = indices[:, None] * self.length + np.arange(self.length + 1)
        return {"tokens": self.ids[offsets].astype(np.int32)}


@dataclass(frozen=True)
class IndexedRecords:
    """Records of any object that is indexed by integers, such as a `grain.MapDataset`."""

    source: Any
    parse: Callable[[Any], Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.source)

    def rows(self, indices: np.ndarray, /) -> Rows:
        """Return these records, stacked."""
        items = [self.source[int(index)] for index in indices]
        return _stack([self.parse(item) for item in items] if self.parse else items)


@dataclass(frozen=True)
class Synthetic:
    """Records that are generated on demand, each from its index."""

    make: Callable[[np.random.Generator], Mapping[str, Any]]
    count: int
    seed: int

    def __len__(self) -> int:
        """Return the number of records before they repeat."""
        return self.count

    def rows(self, indices: np.ndarray, /) -> Rows:
        """Return these records, stacked."""
        return _stack(
            [self.make(np.random.default_rng((self.seed, int(index)))) for index in indices]
        )


def _stack(records: Sequence[Mapping[str, Any]]) -> Rows:
    return {name: np.stack([record[name] for record in records]) for name in records[0]}


def arrays(
    columns: Mapping[str, np.ndarray], *, batch: int, shuffle: bool = True, seed: int = 0
) -> Data:
    """Read arrays in memory: `arrays({"image": images, "label": labels}, batch=64)`."""
    return Data(Arrays(columns), batch, shuffle, seed)


def tokens(
    path: str | Path,
    *,
    length: int,
    batch: int,
    dtype: str = "uint16",
    shuffle: bool = True,
    seed: int = 0,
) -> Data:
    """Read windows of a file of token ids, as `tokens[B, length + 1]`. The file stays on disk."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"data: the file {file} does not exist")
    if dtype not in ("uint16", "uint32"):
        raise UserError(
            f"data: token ids of type {dtype!r} are not supported; use uint16 or uint32"
        )
    size, item_size = file.stat().st_size, np.dtype(dtype).itemsize
    if size % item_size:
        raise UserError(f"data: the {size} bytes of {file} are not a whole number of {dtype} ids")
    if length < 1 or size // item_size < length + 1:
        raise UserError(
            f"data: {file} has {size // item_size} token ids, too few for a window of {length} and "
            "the id after it; use a shorter length"
        )
    return Data(Tokens(np.memmap(file, dtype=dtype, mode="r"), length), batch, shuffle, seed)


def records(source: Any, *, batch: int, shuffle: bool = True, seed: int = 0) -> Data:
    """Read any indexed object whose records are dicts of arrays, such as a `grain.MapDataset`."""
    return Data(IndexedRecords(source), batch, shuffle, seed, threads=8)


def array_records(
    paths: str | Sequence[str],
    parse: Callable[[bytes], Mapping[str, Any]],
    *,
    batch: int,
    shuffle: bool = True,
    seed: int = 0,
) -> Data:
    """Read ArrayRecord files. `parse` returns the arrays of a record by name from its bytes."""
    import grain.sources  # type: ignore[import-untyped]

    files = [paths] if isinstance(paths, str) else [str(path) for path in paths]
    for file in files:
        if "://" not in file and not Path(file).is_file():
            raise UserError(f"data: the file {file} does not exist")
    try:
        source = grain.sources.ArrayRecordDataSource(files)
        count = len(source)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"data: {', '.join(files)} cannot be read as ArrayRecord: {lines[0]}"
        ) from None
    if count == 0:
        raise UserError(f"data: there are no records in {', '.join(files)}")
    return Data(IndexedRecords(source, parse), batch, shuffle, seed, threads=8)


def synthetic(
    make: Callable[[np.random.Generator], Mapping[str, Any]],
    *,
    batch: int,
    count: int = 1 << 30,
    seed: int = 0,
) -> Data:
    """Generate records. `make` gets a random generator that is the same for the same record."""
    return Data(Synthetic(make, count, seed), batch, shuffle=False)
