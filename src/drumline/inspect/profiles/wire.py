"""The fields of a serialized protocol buffer, by number.

`jax.profiler.ProfileData` hands out the events of a trace, but not what the trace says about an
operation once for all its events: its category and its source line, and the compiled programs. They
are read here from the same bytes, without the classes that a protobuf compiler would make.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireMessage:
    """One serialized message; what is skipped costs nothing."""

    def __init__(self, data: memoryview) -> None:
        """Find the fields, and read none of them."""
        self._fields: dict[int, list[int | memoryview]] = {}
        for number, value in _fields(data):
            self._fields.setdefault(number, []).append(value)

    def messages(self, number: int) -> Iterator["WireMessage"]:
        """Every message of a repeated field."""
        for value in self._fields.get(number, ()):
            if isinstance(value, memoryview):
                yield WireMessage(value)

    def message(self, number: int) -> "WireMessage | None":
        """The last message of a field, or nothing."""
        value = self._last(number)
        return WireMessage(value) if isinstance(value, memoryview) else None

    def data(self, number: int) -> memoryview | None:
        """The bytes of a field, or nothing."""
        value = self._last(number)
        return value if isinstance(value, memoryview) else None

    def text(self, number: int) -> str:
        """A field of text; empty where there is none."""
        value = self._last(number)
        return _text(value) if isinstance(value, memoryview) else ""

    def texts(self, number: int) -> list[str]:
        """A repeated field of text."""
        return [_text(each) for each in self._fields.get(number, ()) if not isinstance(each, int)]

    def number(self, number: int) -> int:
        """A field of a whole number; zero where there is none, as the format has it."""
        value = self._last(number)
        return value if isinstance(value, int) else 0

    def numbers(self, number: int) -> list[int]:
        """A repeated field of whole numbers, packed or one by one."""
        found: list[int] = []
        for value in self._fields.get(number, ()):
            if isinstance(value, int):
                found.append(value)
            else:
                at = 0
                while at < len(value):
                    each, at = _varint(value, at)
                    found.append(each)
        return found

    def _last(self, number: int) -> int | memoryview | None:
        values = self._fields.get(number)
        return values[-1] if values else None


def _text(data: memoryview) -> str:
    return bytes(data).decode("utf-8", "replace")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > end:
            raise ValueError("a field is cut short")
        if kind == BYTES:
            yield tag >> 3, data[at : at + length]
        at += length
