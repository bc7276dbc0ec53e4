"""Small files beside the checkpoints, in a folder or in Cloud Storage, never left half-written.

A local file grows by whole writes. An object in a bucket cannot grow: it is written anew, now and
then and at the end.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from etils import epath  # type: ignore[import-untyped]
from etils.epath import backend  # type: ignore[import-untyped]

from drumline.train.mistakes import Mistake, Unwritable

REWRITE_EVERY = 30.0
"""Seconds. An object may be replaced once a second at most; nobody watches it that closely."""


BUCKET = "gs://"
COMMITTED = "commit_success.txt"
"""Orbax writes this file last, into the folder of a checkpoint."""


def open_folder(folder: str) -> None:
    """Create the folder. Raises Mistake with the reason if that is not possible."""
    if in_bucket(folder) and not folder.startswith(BUCKET):
        raise Mistake(f"checkpoint: {folder} is neither a folder nor {BUCKET}BUCKET/FOLDER")
    try:
        with usable(folder):
            path = epath.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            is_checkpoint = path.name.isdigit() and (path / COMMITTED).exists()
    except (ImportError, RuntimeError):
        raise Mistake(f"checkpoint: {folder} needs gcsfs: pip install 'drumline[gcs]'") from None
    if is_checkpoint:
        raise Mistake(f"checkpoint: {folder} is one checkpoint of a run; name the folder above it")


def disable_listing_cache(folder: str) -> None:
    """Make gcsfs look at a bucket again each time.

    It keeps the listings of a bucket for good, and does not notice what TensorStore and other hosts
    write: a checkpoint that exists would seem to be missing.
    """
    if in_bucket(folder):
        with suppress(ImportError, RuntimeError):  # `open_folder` reports that gcsfs is missing.
            cache = backend.fsspec_backend.fs(folder).dircache
            cache.use_listings_cache = False
            cache.clear()


def children(folder: epath.Path) -> list[epath.Path]:
    """Return what is in a folder. In a bucket, a folder with nothing in it does not exist."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        if not in_bucket(str(folder)):
            raise
        return []


@contextmanager
def usable(folder: str) -> Iterator[None]:
    """At the start of a run: what the disk refuses is told before anything is computed."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"checkpoint: {folder} cannot be used: {why_unwritable(error)}") from None


@contextmanager
def still_writable(folder: str) -> Iterator[None]:
    """In the middle of a run: a disk that is full or gone ends it, with a sentence."""
    try:
        yield
    except Unwritable:
        raise
    except Exception as error:
        why = why_unwritable(error)
        if not why:
            raise
        raise Unwritable(
            f"checkpoint: {folder} can no longer be written: {why}; the checkpoints in it are "
            "whole: mend that and start again, to go on from the newest"
        ) from error


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


def why_unwritable(error: BaseException) -> str:
    """What a disk refused, in the system's words; empty where it was something else.

    Tensorstore's errors are of no kind of their own, but they quote the system's.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    quoted = [os.strerror(number) for number in _OF_THE_DISK if os.strerror(number) in str(error)]
    return quoted[0] if quoted else ""


def exists(path: str) -> bool:
    """Whether there is such a file."""
    return bool(epath.Path(path).exists())


def read_json(path: str) -> dict[str, Any] | None:
    """The object in a file; None where there is none or it is not whole."""
    try:
        value = json.loads(epath.Path(path).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: dict[str, Any]) -> None:
    """Replace a file all at once."""
    text = json.dumps(value)
    if in_bucket(path):
        epath.Path(path).write_text(text)
        return
    draft = f"{path}.{os.getpid()}.draft"
    try:
        Path(draft).write_text(text)
        os.replace(draft, path)
    except OSError:
        # Where the disk is full, the room it takes is wanted.
        with suppress(OSError):
            os.unlink(draft)
        raise


class Growing(Protocol):
    """A file that only gets longer."""

    def add(self, data: bytes) -> None:
        """Put this at its end, all of it or nothing."""
        ...

    def close(self) -> None:
        """See to it that everything is there."""
        ...


def grow(path: str, lines: bool = False, check: Callable[[], None] = lambda: None) -> Growing:
    """Open a file to add to it. Of a file of lines, one that was cut short is dropped first.

    `check` is called before an object is replaced, and raises if another program may have done so.
    """
    return _Object(path, lines, check) if in_bucket(path) else _Local(path, lines)


class _Local:
    def __init__(self, path: str, lines: bool) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if lines:
            os.ftruncate(self._file, _whole_lines(self._file))

    def add(self, data: bytes) -> None:
        # A disk that is nearly full takes a part, and refuses the rest.
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


class _Object:
    def __init__(self, path: str, lines: bool, check: Callable[[], None]) -> None:
        self._path, self._check = epath.Path(path), check
        self._data = self._path.read_bytes() if self._path.exists() else b""
        if lines:
            self._data = self._data[: self._data.rfind(b"\n") + 1]
        self._written = time.monotonic()

    def add(self, data: bytes) -> None:
        self._data += data
        if time.monotonic() - self._written > REWRITE_EVERY:
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._check()
        self._written = time.monotonic()
        self._path.write_bytes(self._data)


def _whole_lines(file: int) -> int:
    """How much of a file is lines that ended."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536)
        cut = os.pread(file, end - start, start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0


def in_bucket(path: str) -> bool:
    """Whether it is the address of an object, and no path."""
    return "://" in path
