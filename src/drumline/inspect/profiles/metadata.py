"""The fields of a serialized protocol buffer, by number.

`jax.profiler.ProfileData` hands out the events of a trace, but not what the trace says about an
operation once for all its events: its category and its source line, and the compiled programs. They
are read here from the same bytes, without the classes that a protobuf compiler would make.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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


# XSpace, XPlane, XEventMetadata, XStat
PLANES = 1
PLANE_NAME, PLANE_EVENTS, PLANE_STATS = 2, 4, 5
EVENT_NAME, EVENT_STATS = 2, 5
STAT_KEY, STAT_UNSIGNED, STAT_SIGNED, STAT_TEXT, STAT_BYTES, STAT_REFERENCE = 1, 3, 4, 5, 6, 7
KEY, VALUE = 1, 2
NAME = 2
# HloProto, HloModuleProto, HloComputationProto, HloInstructionProto, OpMetadata
MODULE = 1
MODULE_NAME, COMPUTATIONS, MODULE_ENTRY, STACK_FRAMES = 1, 3, 6, 17
INSTRUCTIONS, COMPUTATION_ID = 2, 5
INSTRUCTION_NAME, OPCODE, METADATA, CALLED = 1, 2, 7, 38
SOURCE_FILE, SOURCE_LINE, STACK_FRAME = 3, 4, 15
FILE_NAMES, FILE_LOCATIONS, FRAMES = 1, 3, 4
LOCATION_FILE, LOCATION_LINE = 1, 3
FRAME_LOCATION = 1


@dataclass(frozen=True)
class CompiledInstruction:
    """What the compiled program says of one instruction."""

    opcode: str
    source: str
    in_entry: bool
    """Whether it stands in no loop and no branch, and runs once whenever the program runs."""


@dataclass(frozen=True)
class CompiledProgram:
    """One compiled program of the trace."""

    name: str
    instructions: Mapping[str, CompiledInstruction]

    def find(self, *names: str) -> CompiledInstruction | None:
        """The first of the names that is known, also as a GPU writes it: `a_b_1` for `a-b.1`."""
        for name in names:
            found = self.instructions.get(name) or self.instructions.get(_kernel_name(name))
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class EventFacts:
    """What a plane says of an operation, once for all its events."""

    category: str
    source: str
    program: int | None


@dataclass
class TraceMetadata:
    """The programs of a trace, read when they are asked for, and the facts of each plane."""

    facts: dict[str, dict[str, EventFacts]] = field(default_factory=dict)
    """By plane and by the event's name."""
    _programs: dict[int, WireMessage] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)
    _read: dict[int, CompiledProgram] = field(default_factory=dict)

    def program(self, number: int | None, name: str = "") -> CompiledProgram | None:
        """A program by its number, or else by its name."""
        # The same number is written with a sign in one place and without it in another.
        number = None if number is None else number % 2**64
        if number is None or number not in self._programs:
            number = self._names.get(name)
        if number is None:
            return None
        if number not in self._read:
            self._read[number] = _program(self._programs[number])
        return self._read[number]

    def add(self, number: int, program: WireMessage) -> None:
        """Keep a program, to be read on demand."""
        number %= 2**64
        self._programs[number] = program
        self._names[program.text(MODULE_NAME)] = number


def read_metadata(data: memoryview) -> TraceMetadata:
    """The programs and the facts of a serialized trace."""
    metadata = TraceMetadata()
    for plane in WireMessage(data).messages(PLANES):
        name = plane.text(PLANE_NAME)
        if name != "/host:metadata" and not name.startswith("/device:TPU:"):
            continue
        keys = {
            entry.number(KEY): stat.text(NAME)
            for entry in plane.messages(PLANE_STATS)
            if (stat := entry.message(VALUE))
        }
        facts = metadata.facts.setdefault(name, {})
        for event in _values(plane.messages(PLANE_EVENTS)):
            stats = _stats(event, keys)
            program = stats.get("Hlo Proto")
            if isinstance(program, memoryview):
                module = WireMessage(program).message(MODULE)
                if module is not None:
                    metadata.add(_number(stats.get("program_id")) or 0, module)
            else:
                facts[event.text(EVENT_NAME)] = EventFacts(
                    str(stats.get("hlo_category", "")),
                    str(stats.get("source", "")),
                    _number(stats.get("program_id")),
                )
    return metadata


def _values(entries: Iterator[WireMessage]) -> Iterator[WireMessage]:
    for entry in entries:
        value = entry.message(VALUE)
        if value is not None:
            yield value


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _stats(event: WireMessage, keys: Mapping[int, str]) -> dict[str, str | int | memoryview]:
    found: dict[str, str | int | memoryview] = {}
    for stat in event.messages(EVENT_STATS):
        key = keys.get(stat.number(STAT_KEY), "")
        data = stat.data(STAT_BYTES)
        if data is not None:
            found[key] = data
        elif stat.data(STAT_TEXT) is not None:
            found[key] = stat.text(STAT_TEXT)
        elif reference := stat.number(STAT_REFERENCE):
            found[key] = keys.get(reference, "")
        else:
            found[key] = stat.number(STAT_UNSIGNED) or stat.number(STAT_SIGNED)
    return found


def _program(module: WireMessage) -> CompiledProgram:
    places = _places(module.message(STACK_FRAMES))
    entry = module.number(MODULE_ENTRY)
    found: dict[str, CompiledInstruction] = {}
    lines: dict[int, str] = {}
    # Callees come before their callers, so that a fusion finds the lines of what it fused.
    for computation in module.messages(COMPUTATIONS):
        number, line = computation.number(COMPUTATION_ID), ""
        for instruction in computation.messages(INSTRUCTIONS):
            source = _source(instruction.message(METADATA), places)
            if not source:
                called = (lines.get(each, "") for each in instruction.numbers(CALLED))
                source = next((each for each in called if each), "")
            line = source or line
            name = instruction.text(INSTRUCTION_NAME)
            known = CompiledInstruction(instruction.text(OPCODE), source, number == entry)
            found[name] = known
            found.setdefault(_kernel_name(name), known)
        lines[number] = line
    return CompiledProgram(module.text(MODULE_NAME), found)


def _kernel_name(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _places(index: WireMessage | None) -> list[str]:
    """The line of each stack frame; frame 1 comes first."""
    if index is None:
        return []
    files = index.texts(FILE_NAMES)
    lines = []
    for location in index.messages(FILE_LOCATIONS):
        file = location.number(LOCATION_FILE)
        known = 0 < file <= len(files)
        lines.append(f"{files[file - 1]}:{location.number(LOCATION_LINE)}" if known else "")
    places = []
    for frame in index.messages(FRAMES):
        line = frame.number(FRAME_LOCATION)
        places.append(lines[line - 1] if 0 < line <= len(lines) else "")
    return places


def _source(metadata: WireMessage | None, places: list[str]) -> str:
    if metadata is None:
        return ""
    frame = metadata.number(STACK_FRAME)
    if 0 < frame <= len(places):
        return places[frame - 1]
    file = metadata.text(SOURCE_FILE)
    return f"{file}:{metadata.number(SOURCE_LINE)}" if file else ""
