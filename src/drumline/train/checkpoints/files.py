"""Files in a checkpoint folder, on a disk or in Cloud Storage. A reader never sees a partial write.

A local file grows by complete writes. An object in a bucket cannot grow, so it is replaced at
intervals and at the end.
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

from drumline.errors import CheckpointError, UserError

REWRITE_SECONDS = 30.0
"""The interval at which an object is replaced. Cloud Storage allows one per second."""

BUCKET = "gs://"
COMMITTED = "commit_success.txt"
"""Orbax writes this file last, into the folder of a checkpoint."""


def in_bucket(path: str) -> bool:
    """Return True for the URL of an object, False for a path on a disk."""
    return "://" in path


def absolute_folder(folder: str | Path) -> str:
    """Return the URL of a folder in a bucket, or the absolute path of a folder on a disk.

    Orbax and TensorStore reject relative paths, but only at the first save.
    """
    path = str(folder)
    if not path:
        raise UserError("checkpoint: the path is empty; name a folder, or omit the checkpoint")
    return path if in_bucket(path) else os.path.abspath(os.path.expanduser(path))


def open_folder(folder: str) -> None:
    """Create the folder. Raises UserError with the reason if that is not possible."""
    if in_bucket(folder) and not folder.startswith(BUCKET):
        raise UserError(f"checkpoint: {folder} is neither a folder nor {BUCKET}BUCKET/FOLDER")
    try:
        with raise_user_errors(folder):
            path = epath.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            is_checkpoint = path.name.isdigit() and (path / COMMITTED).exists()
    except (ImportError, RuntimeError):
        raise UserError(f"checkpoint: {folder} needs gcsfs: pip install 'drumline[gcs]'") from None
    if is_checkpoint:
        raise UserError(f"checkpoint: {folder} is one checkpoint of a run; name its parent folder")


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


def list_folder(folder: epath.Path) -> list[epath.Path]:
    """Return the contents of a folder. In a bucket an empty folder does not exist."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        if not in_bucket(str(folder)):
            raise
        return []


def remove_folder(folder: epath.Path) -> None:
    """Remove a folder with its contents. Of a link, remove only the link itself."""
    if os.path.islink(str(folder)):
        os.unlink(str(folder))
    else:
        folder.rmtree()


# Errors -------------------------------------------------------------------------------------------


@contextmanager
def raise_user_errors(folder: str) -> Iterator[None]:
    """Turn an error of the file system at the start of a run into a UserError."""
    try:
        yield
    except OSError as error:
        reason = file_system_error(error)
        raise UserError(f"checkpoint: {folder} cannot be used: {reason}") from None


@contextmanager
def raise_checkpoint_errors(folder: str) -> Iterator[None]:
    """During a run, turn an error of the file system into a CheckpointError, which ends the run."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = file_system_error(error)
        if not reason:
            raise
        raise CheckpointError(
            f"checkpoint: {folder} can no longer be written: {reason}; its checkpoints are intact: "
            "fix the problem and start again to resume from the newest"
        ) from error


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


def file_system_error(error: BaseException) -> str:
    """Return the system's message for an error of the file system; empty for any other error.

    TensorStore has no error types for this, but it quotes the system's message.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    messages = map(os.strerror, _DISK_ERRORS)
    return next((message for message in messages if message in str(error)), "")


# JSON files ---------------------------------------------------------------------------------------


def read_json(path: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or incomplete."""
    try:
        value = json.loads(epath.Path(path).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    text = json.dumps(value)
    if in_bucket(path):
        epath.Path(path).write_text(text)
        return
    draft = f"{path}.{os.getpid()}.draft"
    try:
        Path(draft).write_text(text)
        os.replace(draft, path)
    except OSError:
        # On a full disk, free the space of the draft.
        with suppress(OSError):
            os.unlink(draft)
        raise


# Files that grow ----------------------------------------------------------------------------------


class AppendFile(Protocol):
    """A file that only grows."""

    def add(self, data: bytes) -> None:
        """Append these bytes, all or none of them."""
        ...

    def close(self) -> None:
        """Write the rest and close the file."""
        ...


def open_append(
    path: str, lines: bool = False, check: Callable[[], None] = lambda: None
) -> AppendFile:
    """Open a file to append to it. In a file of lines, remove an incomplete last line.

    `check` is called before an object is replaced, and raises if a different program may have
    replaced it.
    """
    return _Object(path, lines, check) if in_bucket(path) else _LocalFile(path, lines)


class _LocalFile:
    def __init__(self, path: str, lines: bool) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if lines:
            os.ftruncate(self._file, _complete_lines_size(self._file))

    def add(self, data: bytes) -> None:
        # A disk that is nearly full writes a part, and the next call fails.
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
        self._written_at = time.monotonic()

    def add(self, data: bytes) -> None:
        self._data += data
        if time.monotonic() - self._written_at > REWRITE_SECONDS:
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._check()
        self._written_at = time.monotonic()
        self._path.write_bytes(self._data)


def _complete_lines_size(file: int) -> int:
    """Return the size of a file up to the end of its last complete line."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
