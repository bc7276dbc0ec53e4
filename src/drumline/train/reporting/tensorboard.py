"""TensorBoard's event files, written without TensorBoard.

A file is a row of records (length, its checksum, bytes, their checksum); each record is an `Event`
in protobuf's wire format, of which a scalar needs five fields. The numbers of the fields are those
of `event.proto` and `summary.proto`.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping

from drumline.train.checkpoints.files import grow

_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS = 1, 1, 2, 1
_SESSION_START = 1


class EventFile:
    """The scalars of one attempt."""

    def __init__(
        self, folder: str, attempt: int, step: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Begin a file whose first word is that steps after this one, if any, were given up."""
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = grow(f"{folder}/{name}.{attempt}", check=check)
        self._add(_bytes(_FILE_VERSION, b"brain.Event:2"))
        self._add(_number(_STEP, step) + _bytes(_SESSION, _number(_STATUS, _SESSION_START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event with all values of a step."""
        summary = b"".join(
            _bytes(_VALUE, _bytes(_TAG, name.encode()) + _float(_SIMPLE_VALUE, value))
            for name, value in values.items()
        )
        self._add(_number(_STEP, step) + _bytes(_SUMMARY, summary))

    def close(self) -> None:
        """See to it that everything is there."""
        self._file.close()

    def _add(self, event: bytes) -> None:
        data = _double(_WALL_TIME, time.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.add(length + _checksum(length) + data + _checksum(data))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _table() -> tuple[int, ...]:
    def entry(number: int) -> int:
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        return number

    return tuple(map(entry, range(256)))


_CRC32C = _table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as the format wants it, so that zeros do not look right."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
