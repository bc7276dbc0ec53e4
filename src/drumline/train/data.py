"""Where rows come from, and which rows make up a global batch.

Records are found by number, so the position of a run in its data is one number: how many records
have been taken. Which records come next depends on the seed alone, never on how many hosts read
them or how many make up a batch. A new epoch is a new order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drumline.train.mistakes import Mistake

Rows = dict[str, np.ndarray]
"""Arrays by name, one row for each record."""


class Records(Protocol):
    """A set of records, read by number, many at a time."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def rows(self, numbers: np.ndarray) -> Rows:
        """These records, in this order."""
        ...


@dataclass(frozen=True)
class Data:
    """Records and how they are cut into batches."""

    records: Records
    batch: int
    """Rows of a global batch, over all hosts."""
    shuffle: bool = True
    seed: int = 0
    threads: int = 2
    """How many threads of each host read ahead."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.batch < 1:
            raise Mistake(f"data: a batch of {self.batch} rows is empty; use 1 or more")
        if len(self.records) < 1:
            raise Mistake("data: there are no records")

    def numbers(self, taken: int, rows: np.ndarray) -> np.ndarray:
        """Which records stand in these rows of the batch that comes after so many records."""
        count = len(self.records)
        epochs, offsets = np.divmod(taken + rows.astype(np.int64), count)
        if not self.shuffle:
            return offsets
        found = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = shuffled(offsets[here], count, (self.seed, int(epoch)))
        return found


def shuffled(offsets: np.ndarray, count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Where each offset goes in a random order of `count` things, without writing the order down.

    A Feistel network permutes the numbers below a power of four; one that lands beyond `count` is
    sent through again until it does not, which leaves a permutation of those below.
    """
    half = np.uint64(max(1, -(-max(count - 1, 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(6, np.uint64)
    found = offsets.astype(np.uint64)
    beyond = np.arange(len(found))
    while beyond.size:
        left, right = found[beyond] >> half, found[beyond] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        found[beyond] = left << half | right
        beyond = beyond[found[beyond] >= count]
    return found.astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Every bit of a word spread over all of it (the finalizer of splitmix64)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed


# Sources ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrays:
    """Records that are rows of arrays in memory."""

    columns: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        """Refuse columns that do not belong together."""
        if not self.columns:
            raise Mistake("data: there are no arrays")
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise Mistake(f"data: all arrays need the same number of rows, and {told}")

    def __len__(self) -> int:
        """How many rows."""
        return len(next(iter(self.columns.values())))

    def rows(self, numbers: np.ndarray) -> Rows:
        """These rows."""
        return {name: column[numbers] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Tokens:
    """Windows of a long text of token ids; the last of one is the first of the next."""

    ids: np.ndarray
    length: int

    def __len__(self) -> int:
        """How many windows."""
        return (len(self.ids) - 1) // self.length

    def rows(self, numbers: np.ndarray) -> Rows:
        """These windows as `tokens`, each one longer than `length`: all but the last predict."""
        places = numbers[:, None] * self.length + np.arange(self.length + 1)
        return {"tokens": self.ids[places].astype(np.int32)}


@dataclass(frozen=True)
class OneByOne:
    """Records of anything that is indexed by number, such as a `grain.MapDataset`."""

    source: Any
    parse: Callable[[Any], Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        """How many records."""
        return len(self.source)

    def rows(self, numbers: np.ndarray) -> Rows:
        """These records, stacked."""
        found = [self.source[int(number)] for number in numbers]
        parsed = [self.parse(one) for one in found] if self.parse else found
        return {name: np.stack([one[name] for one in parsed]) for name in parsed[0]}


@dataclass(frozen=True)
class Synthetic:
    """Records that are made up when they are asked for, each from its own number."""

    make: Callable[[np.random.Generator], Mapping[str, Any]]
    count: int
    seed: int

    def __len__(self) -> int:
        """How many there are before they repeat."""
        return self.count

    def rows(self, numbers: np.ndarray) -> Rows:
        """These records, stacked."""
        made = [self.make(np.random.default_rng((self.seed, int(n)))) for n in numbers]
        return {name: np.stack([one[name] for one in made]) for name in made[0]}


def arrays(
    columns: Mapping[str, np.ndarray], *, batch: int, shuffle: bool = True, seed: int = 0
) -> Data:
    """Batches of arrays in memory: `arrays({"image": images, "label": labels}, batch=64)`."""
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
    """Batches of windows of a file of token ids, which stays on disk: `tokens[B, length + 1]`."""
    file = Path(path)
    if not file.is_file():
        raise Mistake(f"data: there is no file {file}")
    if dtype not in ("uint16", "uint32"):
        raise Mistake(f"data: token ids of type {dtype!r} cannot be read; use uint16 or uint32")
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise Mistake(f"data: {file} has {size} bytes, which are no whole number of {dtype} ids")
    if length < 1 or size // width < length + 1:
        raise Mistake(
            f"data: {file} holds {size // width} token ids, too few for a window of {length} and "
            "the one that follows; use a shorter length"
        )
    return Data(Tokens(np.memmap(file, dtype=dtype, mode="r"), length), batch, shuffle, seed)


def records(source: Any, *, batch: int, shuffle: bool = True, seed: int = 0) -> Data:
    """Batches of anything indexed by number whose records are dicts: any `grain.MapDataset`."""
    return Data(OneByOne(source), batch, shuffle, seed, threads=8)


def array_records(
    paths: str | Sequence[str],
    parse: Callable[[bytes], Mapping[str, Any]],
    *,
    batch: int,
    shuffle: bool = True,
    seed: int = 0,
) -> Data:
    """Batches of ArrayRecord files; `parse` makes arrays by name of a record's bytes."""
    import grain.sources  # type: ignore[import-untyped]

    files = [paths] if isinstance(paths, str) else [str(path) for path in paths]
    for file in files:
        if "://" not in file and not Path(file).is_file():
            raise Mistake(f"data: there is no file {file}")
    try:
        source = grain.sources.ArrayRecordDataSource(files)
        count = len(source)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Mistake(
            f"data: {', '.join(files)} cannot be read as ArrayRecord: {said[0]}"
        ) from None
    if count == 0:
        raise Mistake(f"data: there are no records in {', '.join(files)}")
    return Data(OneByOne(source, parse), batch, shuffle, seed, threads=8)


def synthetic(
    make: Callable[[np.random.Generator], Mapping[str, Any]],
    *,
    batch: int,
    count: int = 1 << 30,
    seed: int = 0,
) -> Data:
    """Batches made up row by row: `make` gets a generator that is the same for the same record."""
    return Data(Synthetic(make, count, seed), batch, shuffle=False)
