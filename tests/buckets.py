"""Buckets to test with: the storage server of the emulator, alone, for the real clients."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_numbers = itertools.count(1)


@dataclass(frozen=True)
class StorageServer:
    """A running server, and the folder with its buckets."""

    url: str
    folder: Path


@contextmanager
def serve_buckets(folder: Path) -> Iterator[StorageServer]:
    """Serve a folder from a process of its own."""
    command = [sys.executable, "-m", "drumline.cloud.emulator.api.storage", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield StorageServer(process.stdout.readline().strip(), folder)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def storage_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageServer]:
    """One server for all tests of a process, because TensorStore reads its address only once."""
    with serve_buckets(tmp_path_factory.mktemp("buckets")) as server:
        yield server


@pytest.fixture
def bucket_folder(storage_server: StorageServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a new bucket, to which the clients in this process and its children go."""
    import fsspec  # type: ignore[import-untyped]

    from drumline.cloud.emulator.api.storage import client_environment

    for name, value in client_environment(storage_server.url).items():
        monkeypatch.setenv(name, value)
    # gcsfs has read the environment if it was imported before.
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
    folder = storage_server.folder / f"runs-{next(_numbers)}"
    folder.mkdir()
    return folder


@pytest.fixture
def bucket(bucket_folder: Path) -> str:
    """A new bucket, `gs://runs-1`."""
    return f"gs://{bucket_folder.name}"
