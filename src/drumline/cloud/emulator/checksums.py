"""The checksums that Cloud Storage keeps for each object: MD5 and CRC32C.

CRC32C is computed by google-crc32c, which comes with Google's client. Without it there is a slow
implementation for the callers that compare the checksum of a resumable upload.
"""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

try:
    import google_crc32c as _google_crc32c  # type: ignore[import-untyped,unused-ignore]
except ImportError:
    _library: Any = None
else:
    _library = _google_crc32c

_CHUNK_BYTES = 1 << 20
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with the bits reversed."""


@dataclass(frozen=True)
class Checksums:
    """The checksums of one content, in base64 as in the API."""

    md5: str
    crc32c: str | None
    """None if nobody needs it and google-crc32c is not installed."""


def checksums(path: Path, *, need_crc32c: bool = False) -> Checksums:
    """Compute the checksums of a file."""
    md5 = hashlib.md5(usedforsecurity=False)
    crc32c = 0
    for data in _chunks(path):
        md5.update(data)
        if _library is not None:
            crc32c = _library.extend(crc32c, data)
        elif need_crc32c:
            crc32c = extend_crc32c(crc32c, data)
    include_crc32c = need_crc32c or _library is not None
    return Checksums(
        _base64(md5.digest()), _base64(crc32c.to_bytes(4, "big")) if include_crc32c else None
    )


def extend_crc32c(crc: int, data: bytes) -> int:
    """Return the CRC32C of earlier data and this data, in plain Python."""
    table = _table()
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = (entry >> 1) ^ (_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield data


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
