"""Read the events of a trace of `jax.profiler`, and classify the operations.

A trace has a plane for each device. The names on CPUs (`/host:CPU` with the stats `hlo_op`,
`device_ordinal` and `run_id`) and on GPUs (`/device:GPU:0`, `Stream #…`, `hlo_op`, `hlo_module`,
command buffers) come from traces of JAX 0.10 and 0.11, except for the kernels of NCCL, which one
GPU does not run. The names on TPUs (`/device:TPU:0` with `Steps`, `XLA Modules`, `XLA Ops` and
`Async XLA Ops`, event names with the text of the instruction, `hlo_category`, `source` and
`program_id`) come from XLA's `xplane_schema.cc` and from parts of a v6e trace that XProf publishes.
No complete TPU trace was available. Operations on SparseCores are not read. The TensorCore's line
has their starts and ends.

A TPU names an event by the instruction's text (`%all-gather-start.3 = (…) all-gather-start(…)`), a
CPU by the instruction's name, which JAX derives from its primitive (`all_gather.3`, `psum.7`), and
a GPU by the kernel (`ncclDevKernel_AllGather_RING_LL(…)`), with the instruction in a stat.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from drumline.errors import UserError
from drumline.inspect.profiles.intervals import ROUNDING, Intervals
from drumline.inspect.profiles.metadata import (
    CompiledProgram,
    EventMetadata,
    TraceMetadata,
    read_metadata,
)

# Operations ---------------------------------------------------------------------------------------


class Role(Enum):
    """The use that an operation makes of device time."""

    COMPUTATION = "computation"
    COMMUNICATION = "communication"
    TRANSFER = "transfer"
    """A copy to or from the host, which keeps the device busy without computing."""
    CONTAINER = "enclosing"
    """A loop or a branch, which lasts as long as the operations inside it."""


COLLECTIVES = (
    # `all-reduce-scatter` is a TPU's name of a fused reduce-scatter.
    ("reduce-scatter", ("all-reduce-scatter", "reduce-scatter", "reducescatter", "psum-scatter")),
    ("all-gather", ("all-gather", "allgather", "pgather")),
    ("all-to-all", ("ragged-all-to-all", "all-to-all", "alltoall")),
    ("collective-permute", ("collective-permute", "ppermute", "pshuffle")),
    ("collective-broadcast", ("collective-broadcast", "pbroadcast")),
    ("all-reduce", ("all-reduce", "allreduce", "psum", "pmax", "pmin", "pmean")),
    ("send-recv", ("sendrecv", "send", "recv")),
)
"""Each kind in reports, and the prefixes of its names in traces. Longer prefixes come first."""
LOOPS = ("while", "conditional", "call")
TRANSFERS = ("MemcpyH2D", "MemcpyD2H")
WRAPPERS = ("async-start", "async-update", "async-done", "custom-call", "")
"""Opcodes that may wrap a collective. The instruction's name tells."""
TPU_WRAPPERS = (*WRAPPERS, "fusion")
"""Only TPUs fuse collectives."""


@dataclass(frozen=True)
class TraceOperation:
    """An operation of the traced program."""

    name: str
    kind: str
    """The kind of collective, or else the category or opcode in the trace."""
    role: Role
    source: str
    module: str
    in_entry: bool = False
    start_name: str = ""
    """The name of the start, if this is the end of an asynchronous operation."""

    @property
    def is_end(self) -> bool:
        """True if it waits for an operation that another one started."""
        return bool(self.start_name)


def collective_kind(name: str) -> str | None:
    """Return the kind of collective of an opcode, instruction or kernel, or None."""
    plain = name.lower().replace("_", "-")
    plain, nccl_count = re.subn(r"^nccl[a-z]*kernel-", "", plain)
    if nccl_count and plain.startswith("broadcast"):
        return "collective-broadcast"
    for kind, prefixes in COLLECTIVES:
        for prefix in prefixes:
            if plain.startswith(prefix) and not plain[len(prefix) :][:1].isalpha():
                return kind
    return None


def base_name(name: str) -> str:
    """Remove the numeric suffix of an instruction: `fusion` for `fusion.12`."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def tpu_operation(
    text: str, metadata: EventMetadata | None, program: CompiledProgram | None
) -> TraceOperation:
    """Describe the operation of a TPU's event by the text of its instruction."""
    name, _, definition = text.partition(" = ")
    name = name.strip().lstrip("%")
    opcode_match = re.search(r"\s([a-z][a-z0-9-]*)\(", definition)
    opcode = opcode_match.group(1) if opcode_match else ""
    instruction = program.find(name) if program else None
    if instruction and not opcode:
        opcode = instruction.opcode
    category = metadata.category if metadata else ""
    collective = collective_kind(opcode) or collective_kind(category)
    if collective is None and opcode in TPU_WRAPPERS:
        collective = collective_kind(name)
    start_name = ""
    if (opcode or name).partition(".")[0].endswith("-done"):
        operand = re.search(r"%([\w.-]*start[\w.-]*)", definition)
        start_name = operand.group(1) if operand else name.replace("-done", "-start", 1)
    source = metadata.source if metadata else ""
    return TraceOperation(
        name=name,
        kind=collective or category or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=source or (instruction.source if instruction else ""),
        module=program.name if program else "",
        in_entry=instruction.in_entry if instruction else False,
        start_name=start_name,
    )


def named_operation(
    event: str, instruction_name: str, module: str, program: CompiledProgram | None
) -> TraceOperation:
    """Describe the operation of a CPU's or GPU's event by its name and instruction.

    A GPU runs several instructions as one command buffer, whose kernels have names of their own.
    """
    instruction = program.find(instruction_name, event) if program else None
    opcode = instruction.opcode if instruction else ""
    collective = collective_kind(opcode)
    if collective is None and opcode in WRAPPERS:
        collective = collective_kind(instruction_name) or collective_kind(event)
    source = instruction.source if instruction else ""
    if collective and not source and program:
        source = _only_source(collective, program)
    in_command_buffer = instruction_name.startswith("command_buffer")
    name = event if in_command_buffer or not instruction_name else instruction_name
    if event.startswith(TRANSFERS) and collective is None:
        return TraceOperation(name, event, Role.TRANSFER, source, module)
    return TraceOperation(
        name=name,
        kind=collective or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=source,
        module=module,
        in_entry=instruction.in_entry if instruction else False,
    )


def _role(collective: str | None, opcode: str) -> Role:
    if collective:
        return Role.COMMUNICATION
    return Role.CONTAINER if opcode in LOOPS else Role.COMPUTATION


def _only_source(kind: str, program: CompiledProgram) -> str:
    """Return the line of the program's collectives of a kind if they all have the same."""
    sources = {
        instruction.source
        for instruction in program.instructions.values()
        if instruction.source and collective_kind(instruction.opcode) == kind
    }
    return sources.pop() if len(sources) == 1 else ""


# Traces -------------------------------------------------------------------------------------------

SUFFIX = ".xplane.pb"
IGNORED = ("$", "ThreadpoolListener", "Wait", "Rendezvous", "InvokeRendezvous")
"""Prefixes of most host events. Reading their stats would take most of the time."""

Row = tuple[float, float, int]
"""Start and end of an event, and the index of its operation."""


@dataclass
class DeviceTrace:
    """The events of a device."""

    platform: str
    ordinal: int
    host: str
    tracks: list[Intervals] = field(default_factory=list)
    """Lines of a TPU, streams of a GPU, threads of a CPU. Events of a track may be nested."""
    offloaded: Intervals = field(default_factory=lambda: Intervals.from_rows([]))
    """Operations that ran on other threads. They are not nested."""
    async_spans: Intervals = field(default_factory=lambda: Intervals.from_rows([]))
    """Asynchronous collectives from their start to their end."""
    steps: int = 0
    """The number of steps on the device's own line of steps."""
    runs: Counter[str] = field(default_factory=Counter)
    """The number of runs of each program, if the trace has it."""
    module_times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The total time of each program, if the trace has it."""

    def events(self) -> list[Intervals]:
        """Return the intervals of everything that ran."""
        return [*self.tracks, self.offloaded]


@dataclass
class Trace:
    """The events of one profiler run."""

    path: Path
    operations: list[TraceOperation] = field(default_factory=list)
    devices: list[DeviceTrace] = field(default_factory=list)
    annotated_steps: int = 0
    """The number of steps that the program marked with `StepTraceAnnotation`."""

    def add(self, op: TraceOperation) -> int:
        """Add an operation and return its index."""
        self.operations.append(op)
        return len(self.operations) - 1


def trace_files(path: Path) -> list[Path]:
    """Return the files of the newest run below a folder, one per host, or the file itself.

    Raises:
        UserError: there is no trace.
    """
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
    # The profiler names runs by date. Other names do not show the order.
    dated = all(re.fullmatch(r"[\d_]+", folder.name) for folder in runs)

    def sort_key(folder: Path) -> tuple[float, str]:
        modified_at = max(file.stat().st_mtime for file in runs[folder])
        return (0.0 if dated else modified_at, folder.name)

    return sorted(runs[max(runs, key=sort_key)])


def read_trace(path: Path) -> Trace:
    """Read the newest trace below a folder, or the trace in a file.

    Raises:
        UserError: there is no trace, or it is unreadable or empty.
    """
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
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); check its permissions"
        ) from None
    # Since Python 3.12, the first use of jaxlib's types warns that they have no module. Where
    # warnings are errors, that would end the process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        trace.devices += _read_devices(trace, data, file, host)


def _read_devices(trace: Trace, data: bytes, file: Path, host: str) -> list[DeviceTrace]:
    from jax.profiler import ProfileData

    try:
        profile_data = ProfileData.from_serialized_xspace(data)
        metadata = read_metadata(memoryview(data))
    except (RuntimeError, ValueError, IndexError):
        raise UserError(
            f"{file} is not a complete trace and may be truncated; copy it again, or trace again "
            "and let the program end the trace before it exits"
        ) from None
    devices = []
    planes = list(profile_data.planes)
    for plane in planes:
        if match := re.fullmatch(r"/device:(TPU|GPU):(\d+)", plane.name):
            device = DeviceTrace(match[1], int(match[2]), host)
            (_read_tpu if match[1] == "TPU" else _read_gpu)(trace, device, plane, metadata)
            if device.tracks:
                devices.append(device)
    for plane in planes:
        if plane.name == "/host:CPU":
            devices += _read_host(trace, plane, metadata, host, emulated=not devices)
    return devices


def _read_tpu(trace: Trace, device: DeviceTrace, plane: Any, metadata: TraceMetadata) -> None:
    event_metadata = metadata.events.get(plane.name, {})
    rows: list[Row] = []
    async_rows: list[Row] = []
    indices: dict[str, int] = {}
    first_index = len(trace.operations)
    for line in plane.lines:
        if line.name == "Steps":
            device.steps = sum(1 for _ in line.events)
        elif line.name == "XLA Modules":
            for event in line.events:
                module = re.sub(r"\(\d+\)$", "", event.name)
                device.runs[module] += 1
                device.module_times[module] += event.duration_ns
        elif line.name in ("XLA Ops", "Async XLA Ops"):
            line_rows = rows if line.name == "XLA Ops" else async_rows
            for event in line.events:
                text, start = event.name, event.start_ns
                index = indices.get(text)
                if index is None:
                    item = event_metadata.get(text)
                    program = metadata.program(item.program) if item else None
                    index = indices[text] = trace.add(tpu_operation(text, item, program))
                line_rows.append((start, start + event.duration_ns, index))
    if not rows:
        return
    _describe_ends_by_starts(trace, first_index)
    device.tracks = [Intervals.from_rows(rows)]
    async_rows += _pair_starts_and_ends(trace, rows)
    is_collective = [op.role is Role.COMMUNICATION for op in trace.operations]
    device.async_spans = Intervals.from_rows([row for row in async_rows if is_collective[row[2]]])


def _describe_ends_by_starts(trace: Trace, first_index: int) -> None:
    """Give the end of each asynchronous operation the kind and the line of its start.

    This covers the operations from `first_index` on, which are those of a device. Two programs
    may use the same names.
    """
    operations = trace.operations[first_index:]
    starts = {(op.module, op.name): op for op in operations if not op.is_end}
    for index, op in enumerate(operations, first_index):
        if not op.is_end:
            continue
        start = starts.get((op.module, op.start_name))
        if start is None:
            continue
        described = replace(op, source=op.source or start.source)
        if start.role is Role.COMMUNICATION:
            described = replace(described, kind=start.kind, role=start.role)
        trace.operations[index] = described


def _pair_starts_and_ends(trace: Trace, rows: list[Row]) -> Iterable[Row]:
    """Yield a row from the start to the end of each asynchronous operation."""
    open_starts: dict[tuple[str, str], tuple[float, int]] = {}
    for start, end, index in sorted(rows):
        op = trace.operations[index]
        key = (op.module, op.start_name or op.name)
        if not op.is_end:
            open_starts[key] = (start, index)
        elif key in open_starts:
            started_at, start_index = open_starts.pop(key)
            yield started_at, end, start_index


def _read_gpu(trace: Trace, device: DeviceTrace, plane: Any, metadata: TraceMetadata) -> None:
    operations = _OperationIndex(trace, metadata)
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        rows = []
        for event in line.events:
            start = event.start_ns
            index = operations.index(event.name, dict(event.stats))
            rows.append((start, start + event.duration_ns, index))
        if rows:
            device.tracks.append(Intervals.from_rows(rows))


class _OperationIndex:
    """The operations of a plane whose events have the stats of their instructions."""

    def __init__(self, trace: Trace, metadata: TraceMetadata) -> None:
        self._trace = trace
        self._metadata = metadata
        self._indices: dict[object, int] = {}

    def index(self, event_name: str, stats: dict[Any, Any]) -> int:
        instruction, module = stats.get("hlo_op", ""), stats.get("hlo_module", "")
        program_id = stats.get("program_id")
        key = (event_name, instruction, module, program_id)
        index = self._indices.get(key)
        if index is None:
            program = self._metadata.program(program_id, str(module))
            op = named_operation(event_name, str(instruction), str(module), program)
            index = self._indices[key] = self._trace.add(op)
        return index


def _read_host(
    trace: Trace, plane: Any, metadata: TraceMetadata, host: str, *, emulated: bool
) -> list[DeviceTrace]:
    """Count the annotated steps, and read the emulated devices of the host if it has any."""
    devices = _HostDevices(_OperationIndex(trace, metadata))
    steps: dict[str, set[object]] = defaultdict(set)
    for line in plane.lines:
        devices.start_line()
        for event in line.events:
            name = event.name
            if name.startswith(IGNORED):
                continue
            stats = dict(event.stats)
            if "step_num" in stats:
                steps[name].add(stats["step_num"])
            if emulated and "hlo_op" in stats:
                devices.add(event, name, stats)
            elif emulated and name.startswith("end: "):
                devices.ends[stats.get("_c")] = event.end_ns
    trace.annotated_steps = max(trace.annotated_steps, *map(len, steps.values()), 0)
    return devices.build(trace, host)


class _HostDevices:
    """The devices that a host emulates, with events on the host's threads.

    An operation may continue on other threads. Its event then ends at once, and an event `end: …`
    with the same id has the real end.
    """

    def __init__(self, operations: _OperationIndex) -> None:
        self.ends: dict[object, float] = {}
        self._operations = operations
        self._lines: list[dict[int, list[tuple[float, float, int, object]]]] = []
        self._run_ids: dict[int, dict[str, set[object]]] = defaultdict(lambda: defaultdict(set))

    def start_line(self) -> None:
        self._lines.append(defaultdict(list))

    def add(self, event: Any, name: str, stats: dict[Any, Any]) -> None:
        ordinal, start = int(stats.get("device_ordinal", 0)), event.start_ns
        index = self._operations.index(name, stats)
        row = (start, start + event.duration_ns, index, stats.get("_p"))
        self._lines[-1][ordinal].append(row)
        self._run_ids[ordinal][str(stats.get("hlo_module", ""))].add(stats.get("run_id"))

    def build(self, trace: Trace, host: str) -> list[DeviceTrace]:
        devices: dict[int, DeviceTrace] = {}
        offloaded: dict[int, list[Row]] = defaultdict(list)
        for line in self._lines:
            for ordinal, events in line.items():
                device = devices.setdefault(ordinal, DeviceTrace("CPU", ordinal, host))
                rows = []
                for start, end, index, end_id in events:
                    real_end = self.ends.get(end_id, end)
                    if real_end <= end + ROUNDING:
                        rows.append((start, end, index))
                    elif trace.operations[index].role is not Role.CONTAINER:
                        offloaded[ordinal].append((start, real_end, index))
                device.tracks.append(Intervals.from_rows(rows))
        for ordinal, device in devices.items():
            device.offloaded = Intervals.from_rows(offloaded[ordinal])
            run_ids = self._run_ids[ordinal]
            device.runs = Counter({module: len(ids) for module, ids in run_ids.items()})
        return list(devices.values())


def count_runs(trace: Trace, device: DeviceTrace, module: str) -> int:
    """Return the number of runs of a program on a device.

    If the trace does not have it, use the executions of the instructions that run once per run.
    """
    if device.runs[module]:
        return device.runs[module]
    size = len(trace.operations)
    counts = sum((np.bincount(rows.operations, minlength=size) for rows in device.events()), 0)
    frequencies = Counter(
        int(count)
        for op, count in zip(trace.operations, np.asarray(counts), strict=True)
        if count and op.module == module and op.in_entry
    )
    return frequencies.most_common(1)[0][0] if frequencies else 1
