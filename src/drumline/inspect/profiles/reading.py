"""What an event of a trace is: a collective, a computation, a copy to the host, or a loop.

A TPU names an event by the instruction's text (`%all-gather-start.3 = (…) all-gather-start(…)`), a
CPU by the instruction's name, which JAX takes from its primitive (`all_gather.3`, `psum.7`), and a
GPU by the kernel (`ncclDevKernel_AllGather_RING_LL(…)`), with the instruction beside it.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from drumline.errors import UserError
from drumline.inspect.profiles.intervals import ROUNDING, Stretches
from drumline.inspect.profiles.metadata import (
    CompiledProgram,
    EventFacts,
    TraceMetadata,
    read_metadata,
)


class Role(Enum):
    """What an operation does with the device's time."""

    COMPUTATION = "computation"
    COMMUNICATION = "communication"
    TRANSFER = "transfer"
    """To or from the host: the device is busy, and computes nothing."""
    ENCLOSING = "enclosing"
    """A loop or a branch, which takes as long as what runs inside of it."""


COLLECTIVES = (
    # The longer names first: all-reduce-scatter is what a TPU calls a fused reduce-scatter.
    ("reduce-scatter", ("all-reduce-scatter", "reduce-scatter", "reducescatter", "psum-scatter")),
    ("all-gather", ("all-gather", "allgather", "pgather")),
    ("all-to-all", ("ragged-all-to-all", "all-to-all", "alltoall")),
    ("collective-permute", ("collective-permute", "ppermute", "pshuffle")),
    ("collective-broadcast", ("collective-broadcast", "pbroadcast")),
    ("all-reduce", ("all-reduce", "allreduce", "psum", "pmax", "pmin", "pmean")),
    ("send-recv", ("sendrecv", "send", "recv")),
)
"""Each kind as a report names it, and the beginnings by which traces name it."""
LOOPS = ("while", "conditional", "call")
TRANSFERS = ("MemcpyH2D", "MemcpyD2H")
WRAPPERS = ("async-start", "async-update", "async-done", "custom-call", "")
"""Opcodes that do not tell what is inside; the name may."""
TPU_WRAPPERS = (*WRAPPERS, "fusion")
"""Only a TPU fuses collectives."""


@dataclass(frozen=True)
class TraceOperation:
    """An operation of the traced program."""

    name: str
    kind: str
    """The collective's kind, or else the category or opcode that the trace gives."""
    role: Role
    source: str
    module: str
    in_entry: bool = False
    starts: str = ""
    """Of the end of an asynchronous operation: the name of its start."""

    @property
    def is_end(self) -> bool:
        """Whether it waits for what another operation began."""
        return bool(self.starts)


def collective_kind(name: str) -> str | None:
    """The kind of collective that an opcode, an instruction or a kernel is, if it is one."""
    plain = name.lower().replace("_", "-")
    plain, nccl = re.subn(r"^nccl[a-z]*kernel-", "", plain)
    if nccl and plain.startswith("broadcast"):
        return "collective-broadcast"
    for kind, beginnings in COLLECTIVES:
        for beginning in beginnings:
            if plain.startswith(beginning) and not plain[len(beginning) :][:1].isalpha():
                return kind
    return None


def base_name(name: str) -> str:
    """An instruction's name without its number: `fusion` for `fusion.12`."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def tpu_operation(
    text: str, facts: EventFacts | None, program: CompiledProgram | None
) -> TraceOperation:
    """What an event on a TPU is, by the instruction's text and what else the trace says."""
    name, _, definition = text.partition(" = ")
    name = name.strip().lstrip("%")
    opcode = found.group(1) if (found := re.search(r"\s([a-z][a-z0-9-]*)\(", definition)) else ""
    known = program.find(name) if program else None
    if known and not opcode:
        opcode = known.opcode
    category = facts.category if facts else ""
    collective = collective_kind(opcode) or collective_kind(category)
    if collective is None and opcode in TPU_WRAPPERS:
        collective = collective_kind(name)
    begun = ""
    if (opcode or name).partition(".")[0].endswith("-done"):
        named = re.search(r"%([\w.-]*start[\w.-]*)", definition)
        begun = named.group(1) if named else name.replace("-done", "-start", 1)
    return TraceOperation(
        name=name,
        kind=collective or category or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=(facts.source if facts else "") or (known.source if known else ""),
        module=program.name if program else "",
        in_entry=known.in_entry if known else False,
        starts=begun,
    )


def named_operation(
    event: str, instruction: str, module: str, program: CompiledProgram | None
) -> TraceOperation:
    """What an event on a CPU or a GPU is, by its name and the instruction that it belongs to.

    A GPU runs several instructions as one command buffer, whose kernels bear their own names.
    """
    known = program.find(instruction, event) if program else None
    opcode = known.opcode if known else ""
    collective = collective_kind(opcode)
    if collective is None and opcode in WRAPPERS:
        collective = collective_kind(instruction) or collective_kind(event)
    source = known.source if known else ""
    if collective and not source and program:
        source = _only_source(collective, program)
    whole = instruction.startswith("command_buffer") or not instruction
    name = event if whole else instruction
    transfer = event.startswith(TRANSFERS)
    if transfer and collective is None:
        return TraceOperation(name, event, Role.TRANSFER, source, module)
    return TraceOperation(
        name=name,
        kind=collective or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=source,
        module=module,
        in_entry=known.in_entry if known else False,
    )


def _role(collective: str | None, opcode: str) -> Role:
    if collective:
        return Role.COMMUNICATION
    return Role.ENCLOSING if opcode in LOOPS else Role.COMPUTATION


def _only_source(kind: str, program: CompiledProgram) -> str:
    """The line of the program's collectives of a kind, where they all stand on the same one."""
    lines = {
        known.source
        for known in program.instructions.values()
        if known.source and collective_kind(known.opcode) == kind
    }
    return lines.pop() if len(lines) == 1 else ""


SUFFIX = ".xplane.pb"
# Most events of a host are these, and looking at what they carry would take most of the time.
UNINTERESTING = ("$", "ThreadpoolListener", "Wait", "Rendezvous", "InvokeRendezvous")


@dataclass
class DeviceTrace:
    """The events of one device."""

    platform: str
    ordinal: int
    host: str
    tracks: list[Stretches] = field(default_factory=list)
    """A line of a TPU, a stream of a GPU, a thread of a CPU: events there may enclose others."""
    handed_on: Stretches = field(default_factory=lambda: Stretches.of([]))
    """Operations that other threads ran beside the tracks; they enclose nothing."""
    flights: Stretches = field(default_factory=lambda: Stretches.of([]))
    """From the start of an asynchronous collective to its end, where two operations tell it."""
    steps: int = 0
    """Steps that the device itself marked."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each program ran, where the trace says it."""
    module_times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """How long each program ran, where the trace says it."""

    def events(self) -> list[Stretches]:
        """Everything that ran."""
        return [*self.tracks, self.handed_on]


@dataclass
class Trace:
    """The events of one run of the profiler."""

    path: Path
    operations: list[TraceOperation] = field(default_factory=list)
    devices: list[DeviceTrace] = field(default_factory=list)
    annotated: int = 0
    """Steps that the program marked by `StepTraceAnnotation`."""

    def add(self, operation: TraceOperation) -> int:
        """Number a new operation."""
        self.operations.append(operation)
        return len(self.operations) - 1


def trace_files(path: Path) -> list[Path]:
    """The files of the newest run under a folder, one for each host; or the file itself."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder that jax.profiler.trace wrote to")
    runs: dict[Path, list[Path]] = defaultdict(list)
    for file in path.rglob(f"*{SUFFIX}"):
        runs[file.parent].append(file)
    if not runs:
        raise UserError(
            f"{path} holds no trace, which would be a file *{SUFFIX} under plugins/profile; "
            "make one with jax.profiler.trace(folder) around a few steps"
        )
    # The profiler names a run by the time; a name of one's own says nothing about the order.
    dated = all(re.fullmatch(r"[\d_]+", folder.name) for folder in runs)

    def age(folder: Path) -> tuple[float, str]:
        changed = max(file.stat().st_mtime for file in runs[folder])
        return (0.0 if dated else changed, folder.name)

    return sorted(runs[max(runs, key=age)])


def read_trace(path: Path) -> Trace:
    """The newest trace under a folder, or the trace in a file."""
    files = trace_files(path)
    trace = Trace(files[0] if len(files) == 1 else files[0].parent)
    for file in files:
        _read_file(trace, file, file.name.removesuffix(SUFFIX) if len(files) > 1 else "")
    if not any(len(track.starts) for device in trace.devices for track in device.events()):
        raise UserError(
            f"{trace.path} has no operation of any device: trace a few steps that jax.jit "
            "compiled, and block_until_ready before the trace ends"
        )
    trace.devices.sort(key=lambda device: (device.host, device.ordinal))
    return trace


def _read_file(trace: Trace, file: Path, host: str) -> None:
    try:
        data = file.read_bytes()
    except OSError as problem:
        raise UserError(
            f"{file} cannot be read ({problem.strerror}); see to it that you may read it"
        ) from None
    # From Python 3.12 on, the first look at jaxlib's types warns that they name no module; where
    # warnings are errors, that would end the process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        trace.devices += _devices(trace, data, file, host)


def _devices(trace: Trace, data: bytes, file: Path, host: str) -> list[DeviceTrace]:
    from jax.profiler import ProfileData

    try:
        read = ProfileData.from_serialized_xspace(data)
        metadata = read_metadata(memoryview(data))
    except (RuntimeError, ValueError, IndexError):
        raise UserError(
            f"{file} is no whole trace: it may be cut short; copy it again, or make it anew and "
            "let the program end the trace before it exits"
        ) from None
    found = []
    planes = list(read.planes)
    for plane in planes:
        if named := re.fullmatch(r"/device:(TPU|GPU):(\d+)", plane.name):
            device = DeviceTrace(named[1], int(named[2]), host)
            (_read_tpu if named[1] == "TPU" else _read_gpu)(trace, device, plane, metadata)
            if device.tracks:
                found.append(device)
    for plane in planes:
        if plane.name == "/host:CPU":
            found += _read_host(trace, plane, metadata, host, devices=not found)
    return found


def _read_tpu(trace: Trace, device: DeviceTrace, plane: Any, metadata: TraceMetadata) -> None:
    facts = metadata.facts.get(plane.name, {})
    rows: list[tuple[float, float, int]] = []
    flights: list[tuple[float, float, int]] = []
    numbers: dict[str, int] = {}
    first = len(trace.operations)
    for line in plane.lines:
        if line.name == "Steps":
            device.steps = sum(1 for _ in line.events)
        elif line.name == "XLA Modules":
            for event in line.events:
                module = re.sub(r"\(\d+\)$", "", event.name)
                device.runs[module] += 1
                device.module_times[module] += event.duration_ns
        elif line.name in ("XLA Ops", "Async XLA Ops"):
            into = rows if line.name == "XLA Ops" else flights
            for event in line.events:
                text, start = event.name, event.start_ns
                number = numbers.get(text)
                if number is None:
                    fact = facts.get(text)
                    program = metadata.program(fact.program) if fact else None
                    number = numbers[text] = trace.add(tpu_operation(text, fact, program))
                into.append((start, start + event.duration_ns, number))
    if not rows:
        return
    _name_ends_after_starts(trace, first)
    device.tracks = [Stretches.of(rows)]
    flights += _spans(trace, rows)
    collectives = [operation.role is Role.COMMUNICATION for operation in trace.operations]
    device.flights = Stretches.of([row for row in flights if collectives[row[2]]])


def _name_ends_after_starts(trace: Trace, first: int) -> None:
    """Give the end of an asynchronous operation the kind and the line of its start.

    Of the operations from the `first` on, which are those of one device. Two programs may use the
    same name.
    """
    ours = trace.operations[first:]
    starts = {(each.module, each.name): each for each in ours if not each.is_end}
    for number, operation in enumerate(ours, first):
        start = starts.get((operation.module, operation.starts)) if operation.is_end else None
        if start is None:
            continue
        collective = start.role is Role.COMMUNICATION
        trace.operations[number] = TraceOperation(
            operation.name,
            start.kind if collective else operation.kind,
            start.role if collective else operation.role,
            operation.source or start.source,
            operation.module,
            operation.in_entry,
            operation.starts,
        )


def _spans(
    trace: Trace, rows: list[tuple[float, float, int]]
) -> Iterable[tuple[float, float, int]]:
    begun: dict[tuple[str, str], tuple[float, int]] = {}
    for start, end, number in sorted(rows):
        operation = trace.operations[number]
        key = (operation.module, operation.starts or operation.name)
        if not operation.is_end:
            begun[key] = (start, number)
        elif key in begun:
            since, begin = begun.pop(key)
            yield since, end, begin


def _read_gpu(trace: Trace, device: DeviceTrace, plane: Any, metadata: TraceMetadata) -> None:
    names = _Names(trace, metadata)
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        rows = []
        for event in line.events:
            start = event.start_ns
            number = names.number(event.name, dict(event.stats))
            rows.append((start, start + event.duration_ns, number))
        if rows:
            device.tracks.append(Stretches.of(rows))


class _Names:
    """Numbers the operations of a plane whose events name their instructions."""

    def __init__(self, trace: Trace, metadata: TraceMetadata) -> None:
        self._trace = trace
        self._metadata = metadata
        self._numbers: dict[object, int] = {}

    def number(self, name: str, stats: dict[Any, Any]) -> int:
        instruction, module = stats.get("hlo_op", ""), stats.get("hlo_module", "")
        program = stats.get("program_id")
        key = (name, instruction, module, program)
        number = self._numbers.get(key)
        if number is None:
            compiled = self._metadata.program(program, str(module))
            operation = named_operation(name, str(instruction), str(module), compiled)
            number = self._numbers[key] = self._trace.add(operation)
        return number


def _read_host(
    trace: Trace, plane: Any, metadata: TraceMetadata, host: str, *, devices: bool
) -> list[DeviceTrace]:
    """Count the annotated steps, and read the host's own devices where there are no others."""
    found = _HostDevices(_Names(trace, metadata))
    steps: dict[str, set[object]] = defaultdict(set)
    for line in plane.lines:
        found.begin_line()
        for event in line.events:
            name = event.name
            if name.startswith(UNINTERESTING):
                continue
            stats = dict(event.stats)
            if "step_num" in stats:
                steps[name].add(stats["step_num"])
            if devices and "hlo_op" in stats:
                found.add(event, name, stats)
            elif devices and name.startswith("end: "):
                found.ends[stats.get("_c")] = event.end_ns
    trace.annotated = max(trace.annotated, *map(len, steps.values()), 0)
    return found.devices(trace, host)


class _HostDevices:
    """The devices that a host emulates: their events lie on its threads.

    An operation may be handed to other threads; its event then ends at once, and another event,
    `end: …`, tells by the same number when the operation did.
    """

    def __init__(self, names: _Names) -> None:
        self.ends: dict[object, float] = {}
        self._names = names
        self._lines: list[dict[int, list[tuple[float, float, int, object]]]] = []
        self._runs: dict[int, dict[str, set[object]]] = defaultdict(lambda: defaultdict(set))

    def begin_line(self) -> None:
        self._lines.append(defaultdict(list))

    def add(self, event: Any, name: str, stats: dict[Any, Any]) -> None:
        ordinal, start = int(stats.get("device_ordinal", 0)), event.start_ns
        number = self._names.number(name, stats)
        row = (start, start + event.duration_ns, number, stats.get("_p"))
        self._lines[-1][ordinal].append(row)
        self._runs[ordinal][str(stats.get("hlo_module", ""))].add(stats.get("run_id"))

    def devices(self, trace: Trace, host: str) -> list[DeviceTrace]:
        found: dict[int, DeviceTrace] = {}
        handed_on: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        for line in self._lines:
            for ordinal, events in line.items():
                device = found.setdefault(ordinal, DeviceTrace("CPU", ordinal, host))
                here = []
                for start, end, number, mark in events:
                    ended = self.ends.get(mark, end)
                    if ended <= end + ROUNDING:
                        here.append((start, end, number))
                    elif trace.operations[number].role is not Role.ENCLOSING:
                        handed_on[ordinal].append((start, ended, number))
                device.tracks.append(Stretches.of(here))
        for ordinal, device in found.items():
            device.handed_on = Stretches.of(handed_on[ordinal])
            counted = {name: len(runs) for name, runs in self._runs[ordinal].items()}
            device.runs = Counter(counted)
        return list(found.values())


def count_runs(trace: Trace, device: DeviceTrace, module: str) -> int:
    """How often a program ran on a device: as the trace says, or as often as what it runs once."""
    if device.runs[module]:
        return device.runs[module]
    size = len(trace.operations)
    counts = sum((np.bincount(each.operations, minlength=size) for each in device.events()), 0)
    once = Counter(
        int(count)
        for operation, count in zip(trace.operations, np.asarray(counts), strict=True)
        if count and operation.module == module and operation.in_entry
    )
    return once.most_common(1)[0][0] if once else 1
