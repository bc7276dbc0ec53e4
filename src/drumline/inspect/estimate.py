"""`estimate`: the duration, bounds, exposed communication and memory of a program on a slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.deprecated import renamed_attribute, renamed_keywords
from drumline.inspect.collectives import COLLECTIVE_KINDS
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram, compile_for
from drumline.inspect.cost.coverage import MEASURED
from drumline.inspect.cost.machines import Machine, match_devices, parse_machine
from drumline.inspect.cost.memory import Memory, compiler_memory, estimate_memory
from drumline.inspect.cost.network import TorusDims, map_mesh
from drumline.inspect.cost.timeline import (
    DEVICE,
    Timeline,
    TimelineEvent,
    TimelineSimulator,
)
from drumline.inspect.formatting import format_bytes, format_count, format_seconds, format_share

BOUNDS = ("compute", "memory", "network", "overhead")


@dataclass(frozen=True, kw_only=True)
class EstimatedCollective:
    """The collectives of a kind and source line, summed over a call."""

    kind: str
    axes: tuple[str, ...]
    source: str
    scope: str
    count: int
    seconds: float
    """The time for which they run."""
    exposed: float
    """The time for which the device waits for them."""
    bytes: float
    """The size of their operands per device."""

    taken = renamed_attribute("taken", "bytes")


@dataclass(frozen=True, kw_only=True)
class EstimatedOperation:
    """The computations of a kind and source line, summed over a call."""

    kind: str
    source: str
    scope: str
    count: int
    seconds: float
    flops: float
    bytes: float
    bound: str
    peak_seconds: float = 0.0
    """The duration of its matmuls at the peak of their types."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a call of a program on a machine. Prints as a summary of eleven lines."""

    name: str
    on: str
    mesh: MeshAxes
    compiled_by: str
    seconds: float
    bounds: Mapping[str, float]
    """Seconds bound by compute, by memory, by the network and by start-up overhead."""
    busy: Mapping[str, float]
    """Busy seconds of the device and the links."""
    flops: float
    """FLOPs of the matmuls on a device, including recomputation."""
    model_flops: float
    """FLOPs without recomputation for the backward pass."""
    mfu: float
    """Model FLOPs over the peak of the device for their dtypes."""
    memory: Memory
    memory_limit: float
    communication: tuple[EstimatedCollective, ...]
    operations: tuple[EstimatedOperation, ...]
    unmeasured: Mapping[str, float] = field(default_factory=dict)
    """Seconds in kinds of operation that were never measured on this chip, longest first."""
    axis_links: Mapping[str, str]
    """The links of each mesh axis, as text."""
    at_least: bool = False
    """True if a loop has an unknown trip count, which counts as 1."""
    timeline: Timeline = field(repr=False)
    machine: Machine = field(repr=False)

    laid = renamed_attribute("laid", "axis_links")

    @property
    def bound(self) -> str:
        """The bound with the most time."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def exposed(self) -> float:
        """Seconds for which the device waits for the network."""
        return sum(collective.exposed for collective in self.communication)

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with computation."""
        return sum(collective.seconds - collective.exposed for collective in self.communication)

    @property
    def unmeasured_share(self) -> float:
        """The share of the time in kinds of operation that were never measured on this chip."""
        return min(1.0, sum(self.unmeasured.values()) / self.seconds) if self.seconds else 0.0

    @property
    def fits(self) -> bool:
        """True if the memory of a device is sufficient."""
        return self.memory.total <= self.memory_limit

    def to_dict(self) -> dict[str, Any]:
        """Return the fields except the timeline as JSON values."""
        return {
            "name": self.name,
            "on": self.on,
            "mesh": dict(self.mesh),
            "laid": dict(self.axis_links),
            "compiled_by": self.compiled_by,
            "seconds": self.seconds,
            "at_least": self.at_least,
            "compute_seconds": self.busy.get(DEVICE, 0.0),
            "exposed_seconds": self.exposed,
            "hidden_seconds": self.hidden,
            "bound": self.bound,
            "bounds": dict(self.bounds),
            "busy": dict(self.busy),
            "unmeasured": {"share": self.unmeasured_share, "seconds": dict(self.unmeasured)},
            "flops": self.flops,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "memory": {
                "total": self.memory.total,
                "limit": self.memory_limit,
                "fits": self.fits,
                "arguments": self.memory.arguments,
                "outputs": self.memory.outputs,
                "temporaries": self.memory.temporaries,
                "largest": [
                    {"what": buffer.name, "bytes": buffer.bytes} for buffer in self.memory.largest
                ],
            },
            "communication": [
                {
                    "kind": collective.kind,
                    "axes": list(collective.axes),
                    "source": collective.source,
                    "scope": collective.scope,
                    "count": collective.count,
                    "seconds": collective.seconds,
                    "exposed_seconds": collective.exposed,
                    "bytes": collective.bytes,
                }
                for collective in self.communication
            ],
            "operations": [
                {
                    "name": op.scope or op.kind,
                    "kind": op.kind,
                    "source": op.source,
                    "count": op.count,
                    "seconds": op.seconds,
                    "flops": op.flops,
                    "bytes": op.bytes,
                    "bound": op.bound,
                }
                for op in self.operations
            ],
        }

    def __str__(self) -> str:
        """Return the summary."""
        return "\n".join(summarize(self))

    def save_png(self, path: str | Path) -> None:
        """Draw the timeline as a PNG file."""
        from drumline.inspect.picture import draw

        draw(self, Path(path))

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace file for Perfetto."""
        from drumline.inspect.trace import write_trace

        write_trace(self, Path(path))


@renamed_keywords(laid="torus_dims")
def estimate(
    fn: Any,
    *args: Any,
    on: str,
    mesh: MeshLike | None = None,
    torus_dims: TorusDims | None = None,
    compiler: Compiler = "auto",
) -> Estimate:
    """Estimate a call of a function on a slice.

    Args:
        fn: a function, jitted or not, a `jax.stages.Lowered` or a `jax.stages.Compiled`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        on: the machine, such as `"v5litepod-8"`, `"2xv6e-256"` or `"H200"`.
        mesh: the mesh to trace under, a JAX mesh or a text such as `"X=2,Y=4"`.
        torus_dims: the indices of the torus dimensions that a mesh axis uses, by its name. Other
            axes are mapped by size. `"rings"` maps all axes as `drumline.train.make_mesh` does.
        compiler: the compiler to use. The default is the TPU's if it is installed.

    Raises:
        UserError: the function does not trace, or does not fit the mesh or the slice.
        UnknownName: there is no such slice.
    """
    machine = parse_machine(on)
    program = compile_for(machine, fn, args, mesh=mesh, compiler=compiler)
    return estimate_program(program, machine, torus_dims)


def estimate_program(
    program: InspectedProgram, machine: Machine, torus_dims: TorusDims | None = None
) -> Estimate:
    """Estimate a call of a compiled program on a machine."""
    machine = match_devices(machine, program.mesh, program.devices)
    network = map_mesh(program.mesh, machine, torus_dims)
    numbering_mesh = program.numbering_mesh or program.mesh
    scheduled = program.compiler != "cpu"
    timeline = TimelineSimulator(program.module, network, numbering_mesh, scheduled).simulate()
    totals = _Totals(timeline)
    memory = (
        compiler_memory(program.module, program.memory)
        if program.memory
        else estimate_memory(program.module)
    )
    return Estimate(
        name=program.name,
        on=machine.name,
        mesh=program.mesh,
        compiled_by=program.compiled_by,
        seconds=timeline.seconds,
        bounds=totals.bounds,
        busy=totals.busy,
        flops=totals.flops,
        model_flops=totals.model_flops,
        mfu=totals.model_peak_seconds / timeline.seconds if timeline.seconds else 0.0,
        memory=memory,
        memory_limit=machine.memory_bytes,
        communication=totals.communication(),
        operations=totals.operations(),
        unmeasured=_unmeasured(timeline, machine),
        axis_links={name: str(links) for name, links in network.axes.items()},
        at_least=timeline.unknown_trip_count,
        timeline=timeline,
        machine=machine,
    )


def _unmeasured(timeline: Timeline, machine: Machine) -> dict[str, float]:
    """Return the seconds by kind in kinds that were never measured on this chip."""
    measured = MEASURED.get(machine.chip.name, frozenset())
    seconds = timeline.seconds_by_operation()
    kinds = [kind for kind in seconds if seconds[kind] > 0 and kind not in measured]
    return {kind: seconds[kind] for kind in sorted(kinds, key=lambda kind: -seconds[kind])}


class _Totals:
    """Sums over the events of a timeline and their executions."""

    def __init__(self, timeline: Timeline) -> None:
        self.bounds = dict.fromkeys(BOUNDS, 0.0)
        self.busy: dict[str, float] = {}
        self.flops = 0.0
        self.peak_seconds = 0.0
        self._recomputed_flops: dict[str, float] = {}
        self._forward_flops: dict[str, float] = {}
        self._groups: dict[tuple[Any, ...], list[tuple[TimelineEvent, int]]] = {}
        for event, executions in timeline.leaf_events():
            self._add(event, executions)

    def _add(self, event: TimelineEvent, executions: int) -> None:
        location, cost = event.location, event.cost
        for resource in event.resource.split("+"):
            self.busy[resource] = self.busy.get(resource, 0.0) + event.seconds * executions
        axes: tuple[str, ...] | None = None
        if event.kind in COLLECTIVE_KINDS.values():
            axes = event.axes
            self.bounds["network"] += event.device_seconds * executions
        else:
            self.bounds[cost.bound or "overhead"] += event.device_seconds * executions
            flops = cost.flops * executions
            self.flops += flops
            self.peak_seconds += cost.peak_seconds * executions
            if cost.recomputed or "transpose(" not in location.op_name:
                by_source = self._recomputed_flops if cost.recomputed else self._forward_flops
                by_source[location.source] = by_source.get(location.source, 0.0) + flops
        key = (event.kind, axes, location.source, location.scope)
        self._groups.setdefault(key, []).append((event, executions))

    @property
    def model_flops(self) -> float:
        """FLOPs without recomputed operations of the forward pass."""
        recomputed = sum(
            min(flops, self._forward_flops.get(source, 0.0))
            for source, flops in self._recomputed_flops.items()
        )
        return self.flops - recomputed

    @property
    def model_peak_seconds(self) -> float:
        """The duration of the model's matmuls at the peak."""
        return self.peak_seconds * self.model_flops / self.flops if self.flops else 0.0

    def communication(self) -> tuple[EstimatedCollective, ...]:
        """Return the collectives by descending exposed time."""
        collectives = [
            EstimatedCollective(
                kind=kind,
                axes=axes,
                source=source,
                scope=scope,
                count=sum(executions for _, executions in events),
                seconds=sum(event.seconds * executions for event, executions in events),
                exposed=sum(event.exposed * executions for event, executions in events),
                bytes=sum(event.cost.bytes * executions for event, executions in events),
            )
            for (kind, axes, source, scope), events in self._groups.items()
            if axes is not None
        ]
        return tuple(sorted(collectives, key=lambda c: (-c.exposed, -c.seconds)))

    def operations(self) -> tuple[EstimatedOperation, ...]:
        """Return the computations by descending time."""
        operations = []
        for (kind, axes, source, scope), events in self._groups.items():
            if axes is not None:
                continue
            longest, _ = max(events, key=lambda item: item[0].seconds * item[1])
            operations.append(
                EstimatedOperation(
                    kind=kind,
                    source=source,
                    scope=scope,
                    count=sum(executions for _, executions in events),
                    seconds=sum(event.device_seconds * executions for event, executions in events),
                    flops=sum(event.cost.flops * executions for event, executions in events),
                    bytes=sum(event.cost.bytes * executions for event, executions in events),
                    bound=longest.cost.bound,
                    peak_seconds=sum(
                        event.cost.peak_seconds * executions for event, executions in events
                    ),
                )
            )
        return tuple(sorted(operations, key=lambda op: -op.seconds))


# Summary --------------------------------------------------------------------------------------

SUMMARY_LINES = 11
MIN_SHARE = 0.005
MAX_KINDS = 5


def summarize(estimate: Estimate) -> list[str]:
    """Summarize an estimate in at most eleven lines."""
    return list(_summary_lines(estimate))[:SUMMARY_LINES]


def _summary_lines(estimate: Estimate) -> Iterator[str]:
    seconds = estimate.seconds
    at_least = "at least " if estimate.at_least else ""
    mesh = f" on {format_mesh(estimate.mesh)}" if estimate.mesh else ""
    yield (
        f"{estimate.name}: {at_least}{format_seconds(seconds)} a call on {estimate.on}{mesh}, "
        f"MFU {100 * estimate.mfu:.1f} %, bound by {estimate.bound}"
    )
    shares = ", ".join(
        f"{name} {format_share(bound / seconds)}"
        for name, bound in sorted(estimate.bounds.items(), key=lambda item: -item[1])
        if seconds and bound / seconds >= MIN_SHARE
    )
    yield f"  time: {shares or 'none'}"
    yield f"  {_coverage_line(estimate)}"
    yield f"  {_communication_line(estimate)}"
    for collective in estimate.communication[:2]:
        if seconds and collective.exposed / seconds >= 0.01:
            yield f"  {_collective_line(estimate, collective)}"
    for op in estimate.operations[:2]:
        if op.seconds > 0:  # false for copies that overlap completely
            yield f"  {_operation_line(estimate, op)}"
    yield f"  {_memory_line(estimate)}"
    if estimate.axis_links:
        links = "; ".join(f"{axis} {links}" for axis, links in estimate.axis_links.items())
        yield f"  links: {links}"
    yield f"  compiled by {estimate.compiled_by}; times are modelled, not measured"


def _coverage_line(estimate: Estimate) -> str:
    chip = estimate.machine.chip.name
    if not estimate.unmeasured:
        return f"all of this time is in kinds of operation measured on {chip}"
    share = format_share(estimate.unmeasured_share)
    kinds = list(estimate.unmeasured)
    listed = ", ".join(kinds[:MAX_KINDS]) + (", …" if len(kinds) > MAX_KINDS else "")
    return f"{share} of this time is in kinds not measured on {chip}: {listed}"


def _communication_line(estimate: Estimate) -> str:
    if not estimate.communication:
        return "no communication"
    hidden, exposed = estimate.hidden, estimate.exposed
    count = format_count(sum(c.count for c in estimate.communication), "collective")
    if exposed <= 0.01 * estimate.seconds:
        return f"communication: {count}, {format_seconds(hidden)}, all hidden"
    return (
        f"communication: {count}, {format_seconds(hidden + exposed)}, of which the "
        f"device waits for {format_seconds(exposed)} "
        f"({format_share(exposed / estimate.seconds)} of the step)"
    )


def _collective_line(estimate: Estimate, collective: EstimatedCollective) -> str:
    axes = " and ".join(collective.axes) or "the devices"
    # A step takes at least the time of the busiest link, even if the communication is hidden.
    link_seconds = max((s for name, s in estimate.busy.items() if name != DEVICE), default=0.0)
    remaining = max(estimate.seconds - collective.exposed, link_seconds)
    saving = (estimate.seconds - remaining) / estimate.seconds
    advice = f"; overlapping it would save up to {format_share(saving)}" if saving >= 0.01 else ""
    share = format_share(collective.exposed / estimate.seconds)
    line = _source_line(collective)
    return f"{share} of the step waits for {collective.kind} over {axes} at {line}{advice}"


def _operation_line(estimate: Estimate, op: EstimatedOperation) -> str:
    share = format_share(op.seconds / estimate.seconds) if estimate.seconds else "0 %"
    rate = ""
    if op.flops:
        rate = f", {format_share(op.peak_seconds / op.seconds)} of peak"
    elif op.bytes:
        fraction = op.bytes / op.seconds / estimate.machine.memory_bandwidth
        rate = f", {format_share(fraction)} of the memory bandwidth"
    line = _source_line(op)
    return f"{share} is {op.kind} at {line}, bound by {op.bound}{rate}"


def _source_line(item: EstimatedCollective | EstimatedOperation) -> str:
    return item.source.rpartition("/")[2] or item.scope or "an unknown line"


def _memory_line(estimate: Estimate) -> str:
    memory = estimate.memory
    verdict = "fits" if estimate.fits else "does NOT fit"
    line = (
        f"memory: {format_bytes(memory.total)} of {format_bytes(estimate.memory_limit)} a device, "
        f"{verdict}: arguments {format_bytes(memory.arguments)}, "
        f"temporaries {format_bytes(memory.temporaries)}"
    )
    if memory.largest:
        buffer = memory.largest[0]
        line += f"; largest: {buffer.name} ({format_bytes(buffer.bytes)})"
    return line
