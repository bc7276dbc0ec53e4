"""Read the metadata of a trace: compiled programs, and categories and sources of operations.

`jax.profiler.ProfileData` provides the events of a trace but not this metadata. It is read here
from the same bytes, with a small parser of protocol buffers. The plane `/host:metadata` has the
compiled programs (`Hlo Proto`), with the opcode and line of each instruction. The plane of a TPU
has the category and the source of each operation. Field numbers are those of `xplane.proto` and
`hlo.proto`. They were checked with traces of JAX 0.10 on CPUs and of 0.11 on a GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class ProtoMessage:
    """A serialized message. Nested messages are parsed on demand."""

    def __init__(self, data: memoryview) -> None:
        """Index the fields."""
        self._fields: dict[int, list[int | memoryview]] = {}
        for key, value in _parse_fields(data):
            self._fields.setdefault(key, []).append(value)

    def messages(self, key: int) -> Iterator["ProtoMessage"]:
        """Yield the messages of a repeated field."""
        for value in self._fields.get(key, ()):
            if isinstance(value, memoryview):
                yield ProtoMessage(value)

    def message(self, key: int) -> "ProtoMessage | None":
        """Return the last message of a field, or None."""
        data = self.data(key)
        return None if data is None else ProtoMessage(data)

    def data(self, key: int) -> memoryview | None:
        """Return the bytes of a field, or None."""
        value = self._last(key)
        return value if isinstance(value, memoryview) else None

    def text(self, key: int) -> str:
        """Return the text of a field, or ""."""
        data = self.data(key)
        return "" if data is None else _decode(data)

    def texts(self, key: int) -> list[str]:
        """Return the texts of a repeated field."""
        return [_decode(value) for value in self._fields.get(key, ()) if not isinstance(value, int)]

    def integer(self, key: int) -> int:
        """Return the integer of a field. The default is 0, as in the format."""
        value = self._last(key)
        return value if isinstance(value, int) else 0

    def integers(self, key: int) -> list[int]:
        """Return the integers of a repeated field, packed or not."""
        integers: list[int] = []
        for value in self._fields.get(key, ()):
            if isinstance(value, int):
                integers.append(value)
            else:
                position = 0
                while position < len(value):
                    integer, position = _parse_varint(value, position)
                    integers.append(integer)
        return integers

    def _last(self, key: int) -> int | memoryview | None:
        values = self._fields.get(key)
        return values[-1] if values else None


def _decode(data: memoryview) -> str:
    return bytes(data).decode("utf-8", "replace")


def _parse_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _parse_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    position, end = 0, len(data)
    while position < end:
        tag, position = _parse_varint(data, position)
        wire_type = tag & 7
        if wire_type == VARINT:
            value, position = _parse_varint(data, position)
            yield tag >> 3, value
            continue
        if wire_type == BYTES:
            length, position = _parse_varint(data, position)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if position + length > end:
            raise ValueError("a field is truncated")
        if wire_type == BYTES:
            yield tag >> 3, data[position : position + length]
        position += length


# Programs and events ------------------------------------------------------------------------------

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
    """An instruction of a compiled program in a trace."""

    opcode: str
    source: str
    in_entry: bool
    """True if it is outside all loops and branches, so that it runs once per run of the program."""


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program in a trace."""

    name: str
    instructions: Mapping[str, CompiledInstruction]

    def find(self, *names: str) -> CompiledInstruction | None:
        """Return the first instruction that has one of the names, or a name as GPUs write it."""
        for name in names:
            instruction = self.instructions.get(name) or self.instructions.get(_kernel_name(name))
            if instruction is not None:
                return instruction
        return None


@dataclass(frozen=True)
class EventMetadata:
    """The metadata of an operation, which all its events share."""

    category: str
    source: str
    program: int | None


@dataclass
class TraceMetadata:
    """The compiled programs of a trace, parsed on demand, and the metadata of its operations."""

    events: dict[str, dict[str, EventMetadata]] = field(default_factory=dict)
    """The metadata of each operation, by plane and event name."""
    _messages: dict[int, ProtoMessage] = field(default_factory=dict)
    _ids_by_name: dict[str, int] = field(default_factory=dict)
    _programs: dict[int, CompiledProgram] = field(default_factory=dict)

    def program(self, program_id: int | None, name: str = "") -> CompiledProgram | None:
        """Return a program by its id, or else by its name."""
        # Traces write the same id as a signed and as an unsigned integer.
        program_id = None if program_id is None else program_id % 2**64
        if program_id is None or program_id not in self._messages:
            program_id = self._ids_by_name.get(name)
        if program_id is None:
            return None
        if program_id not in self._programs:
            self._programs[program_id] = _parse_program(self._messages[program_id])
        return self._programs[program_id]

    def add_program(self, program_id: int, message: ProtoMessage) -> None:
        """Add a program, to be parsed on demand."""
        program_id %= 2**64
        self._messages[program_id] = message
        self._ids_by_name[message.text(MODULE_NAME)] = program_id


def read_metadata(data: memoryview) -> TraceMetadata:
    """Read the metadata of a serialized trace."""
    metadata = TraceMetadata()
    for plane in ProtoMessage(data).messages(PLANES):
        plane_name = plane.text(PLANE_NAME)
        if plane_name != "/host:metadata" and not plane_name.startswith("/device:TPU:"):
            continue
        stat_names = {
            entry.integer(KEY): stat.text(NAME)
            for entry in plane.messages(PLANE_STATS)
            if (stat := entry.message(VALUE))
        }
        events = metadata.events.setdefault(plane_name, {})
        for entry in plane.messages(PLANE_EVENTS):
            event = entry.message(VALUE)
            if event is None:
                continue
            stats = _parse_stats(event, stat_names)
            program = stats.get("Hlo Proto")
            program_id = stats.get("program_id")
            program_id = program_id if isinstance(program_id, int) else None
            if isinstance(program, memoryview):
                module = ProtoMessage(program).message(MODULE)
                if module is not None:
                    metadata.add_program(program_id or 0, module)
            else:
                events[event.text(EVENT_NAME)] = EventMetadata(
                    str(stats.get("hlo_category", "")), str(stats.get("source", "")), program_id
                )
    return metadata


def _parse_stats(
    event: ProtoMessage, stat_names: Mapping[int, str]
) -> dict[str, str | int | memoryview]:
    stats: dict[str, str | int | memoryview] = {}
    for stat in event.messages(EVENT_STATS):
        name = stat_names.get(stat.integer(STAT_KEY), "")
        data = stat.data(STAT_BYTES)
        if data is not None:
            stats[name] = data
        elif stat.data(STAT_TEXT) is not None:
            stats[name] = stat.text(STAT_TEXT)
        elif reference := stat.integer(STAT_REFERENCE):
            stats[name] = stat_names.get(reference, "")
        else:
            stats[name] = stat.integer(STAT_UNSIGNED) or stat.integer(STAT_SIGNED)
    return stats


def _parse_program(module: ProtoMessage) -> CompiledProgram:
    frames = _parse_frames(module.message(STACK_FRAMES))
    entry_id = module.integer(MODULE_ENTRY)
    instructions: dict[str, CompiledInstruction] = {}
    sources: dict[int, str] = {}
    # Callees come before their callers, so a fusion can use the lines of its instructions.
    for computation in module.messages(COMPUTATIONS):
        computation_id, last_source = computation.integer(COMPUTATION_ID), ""
        for message in computation.messages(INSTRUCTIONS):
            source = _parse_source(message.message(METADATA), frames)
            if not source:
                callee_sources = (sources.get(callee, "") for callee in message.integers(CALLED))
                source = next(filter(None, callee_sources), "")
            last_source = source or last_source
            name = message.text(INSTRUCTION_NAME)
            in_entry = computation_id == entry_id
            instruction = CompiledInstruction(message.text(OPCODE), source, in_entry)
            instructions[name] = instruction
            instructions.setdefault(_kernel_name(name), instruction)
        sources[computation_id] = last_source
    return CompiledProgram(module.text(MODULE_NAME), instructions)


def _kernel_name(name: str) -> str:
    """Return the form of a name in GPU kernels: `a_b_1` for `a-b.1`."""
    return name.replace(".", "_").replace("-", "_")


def _parse_frames(index: ProtoMessage | None) -> list[str]:
    """Return the source line of each stack frame. The first element is frame 1."""
    if index is None:
        return []
    files = index.texts(FILE_NAMES)
    lines = []
    for location in index.messages(FILE_LOCATIONS):
        file = location.integer(LOCATION_FILE)
        valid = 0 < file <= len(files)
        lines.append(f"{files[file - 1]}:{location.integer(LOCATION_LINE)}" if valid else "")
    frames = []
    for frame in index.messages(FRAMES):
        line = frame.integer(FRAME_LOCATION)
        frames.append(lines[line - 1] if 0 < line <= len(lines) else "")
    return frames


def _parse_source(metadata: ProtoMessage | None, frames: list[str]) -> str:
    if metadata is None:
        return ""
    frame = metadata.integer(STACK_FRAME)
    if 0 < frame <= len(frames):
        return frames[frame - 1]
    file = metadata.text(SOURCE_FILE)
    return f"{file}:{metadata.integer(SOURCE_LINE)}" if file else ""
