"""The bytes of one file between the check for secrets and the archive."""

import gzip
import hashlib
import tempfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import IO

LARGE_BYTES = 10**6
"""The size from which a file is stored and sent separately."""
SAMPLE_BYTES = 1 << 16
COMPRESSIBLE = 0.9
"""The compressed size of a sample, relative to its size, below which a file is compressed."""


class Content:
    """The bytes of one file: in memory, or compressed in a file of their own if they are many.

    Large files that hardly shrink, such as pictures and arrays, are stored without compression,
    which would take most of the time.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder of the file of large content."""
        self._folder = folder
        self._memory = BytesIO()
        self._digest = hashlib.sha256()
        self._raw: IO[bytes] | None = None
        self._zipped: gzip.GzipFile | None = None

    @property
    def is_large(self) -> bool:
        """True if the content has a file of its own."""
        return self._zipped is not None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        if self._zipped is None:
            self._memory.write(data)
            if self._memory.tell() < LARGE_BYTES:
                return
            data, self._memory = self._memory.getvalue(), BytesIO()
            sample = data[: SAMPLE_BYTES // 2] + data[-SAMPLE_BYTES // 2 :]
            level = 1 if len(zlib.compress(sample, 1)) < COMPRESSIBLE * len(sample) else 0
            self._raw = tempfile.NamedTemporaryFile(dir=self._folder, delete=False)  # noqa: SIM115
            self._zipped = gzip.GzipFile("", "wb", compresslevel=level, fileobj=self._raw, mtime=0)
        self._digest.update(data)
        self._zipped.write(data)

    def file(self) -> IO[bytes]:
        """Return the bytes of small content."""
        self._memory.seek(0)
        return self._memory

    def take(self) -> tuple[str, Path]:
        """Return the hash of large content, and its compressed file, which the caller owns."""
        assert self._raw is not None
        path = Path(self._raw.name)
        self._close_files()
        self._raw = None
        return self._digest.hexdigest(), path

    def discard(self) -> None:
        """Remove large content."""
        if self._raw is not None:
            self._close_files()
            Path(self._raw.name).unlink(missing_ok=True)

    def _close_files(self) -> None:
        assert self._zipped is not None
        assert self._raw is not None
        self._zipped.close()
        self._raw.close()
