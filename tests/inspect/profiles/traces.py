"""Write small traces of TPUs and GPUs with known answers in the profiler's format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from jax.profiler import ProfileData

Stats = Mapping[str, str | int | bytes]


@dataclass(frozen=True)
class TraceEvent:
    """An event: its name, its start and end in microseconds, and its stats."""

    name: str
    start: float
    end: float
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class Plane:
    """A plane of a trace: lines of events, and metadata of the event names."""

    name: str
    lines: Mapping[str, Iterable[TraceEvent]]
    name_stats: Mapping[str, Stats] = field(default_factory=dict)


def text_proto(*planes: Plane) -> str:
    return "\n".join(_plane(number, plane) for number, plane in enumerate(planes))


def write(folder: Path, *planes: Plane, run: str = "2026_01_02_03_04_05", host: str = "vm") -> Path:
    """Write a trace at the profiler's path. The folder is the profiler's argument."""
    file = folder / "plugins" / "profile" / run / f"{host}.xplane.pb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text_proto(*planes)))
    return folder


def _plane(number: int, plane: Plane) -> str:
    keys: dict[str, int] = {}
    names: dict[str, int] = {}
    next_identifier = count(1)

    def key(table: dict[str, int], name: str) -> int:
        if name not in table:
            table[name] = next(next_identifier)
        return table[name]

    def stats(values: Stats) -> str:
        return " ".join(
            f"stats {{ metadata_id: {key(keys, name)} {_value(value)} }}"
            for name, value in values.items()
        )

    lines = []
    for index, (name, events) in enumerate(plane.lines.items()):
        event_text = "\n".join(
            f"events {{ metadata_id: {key(names, event.name)} offset_ps: {event.start * 1e6:.0f} "
            f"duration_ps: {(event.end - event.start) * 1e6:.0f} {stats(event.stats)} }}"
            for event in events
        )
        lines.append(
            f"lines {{ id: {index} name: {quoted(name)} timestamp_ns: 1000\n{event_text} }}"
        )
    metadata = "\n".join(
        f"event_metadata {{ key: {identifier} value {{ id: {identifier} name: {quoted(name)} "
        f"{stats(plane.name_stats.get(name, {}))} }} }}"
        for name, identifier in [(name, key(names, name)) for name in {**names, **plane.name_stats}]
    )
    stat_metadata = "\n".join(
        f"stat_metadata {{ key: {identifier} value {{ id: {identifier} name: {quoted(name)} }} }}"
        for name, identifier in keys.items()
    )
    body = "\n".join([*lines, metadata, stat_metadata])
    return f"planes {{ id: {number} name: {quoted(plane.name)}\n{body} }}"


def _value(value: str | int | bytes) -> str:
    if isinstance(value, bytes):
        return 'bytes_value: "' + "".join(f"\\x{byte:02x}" for byte in value) + '"'
    return f"int64_value: {value}" if isinstance(value, int) else f"str_value: {quoted(value)}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
