"""`estimate`: seconds, bound, exposed communication and memory of a program on a named slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.inspect.collectives import KINDS
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram, compiled_for
from drumline.inspect.cost.machines import Machine, check_fits, machine
from drumline.inspect.cost.memory import Memory, as_told, needed
from drumline.inspect.cost.network import LaidAs, Network, lay
from drumline.inspect.cost.timeline import COPIES, DEVICE, Player, Timeline, TimelineEvent
from drumline.inspect.formatting import duration, plural, share, size

BOUNDS = ("compute", "memory", "network", "overhead")


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One place's collectives of one kind, over one call."""

    kind: str
    axes: tuple[str, ...]
    source: str
    scope: str
    count: int
    seconds: float
    """How long they run."""
    exposed: float
    """How long the device waits for them."""
    taken: float
    """Bytes that each device enters them with."""


@dataclass(frozen=True, kw_only=True)
class EstimatedOperation:
    """One place's computing of one kind, over one call."""

    kind: str
    source: str
    scope: str
    count: int
    seconds: float
    flops: float
    bytes: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one call of a program takes on a machine. Prints as a summary of ten lines."""

    name: str
    on: str
    mesh: Axes
    compiled_by: str
    seconds: float
    bounds: Mapping[str, float]
    """Seconds bound by computing, by memory, by waiting for the network, by starting operations."""
    busy: Mapping[str, float]
    """Seconds that the device and each link are busy."""
    flops: float
    """Of one device's products, with what is computed again."""
    model_flops: float
    """The same without what is computed again for the backward pass."""
    mfu: float
    """Model FLOPs over what the device could do in the time, each type at its own peak."""
    memory: Memory
    memory_limit: float
    communication: tuple[Waiting, ...]
    operations: tuple[EstimatedOperation, ...]
    laid: Mapping[str, str]
    """Where each mesh axis lies, in words."""
    at_least: bool = False
    """Whether a loop runs an unknown number of times, counted once."""
    timeline: Timeline = field(repr=False)
    machine: Machine = field(repr=False)

    @property
    def bound(self) -> str:
        """What most of the time is bound by."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def exposed(self) -> float:
        """Seconds that the device waits for the network."""
        return sum(one.exposed for one in self.communication)

    @property
    def hidden(self) -> float:
        """Seconds of communication behind which the device computes."""
        return sum(one.seconds - one.exposed for one in self.communication)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory.total <= self.memory_limit

    def to_dict(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON has it."""
        return {
            "name": self.name,
            "on": self.on,
            "mesh": dict(self.mesh),
            "laid": dict(self.laid),
            "compiled_by": self.compiled_by,
            "seconds": self.seconds,
            "at_least": self.at_least,
            "compute_seconds": self.busy.get(DEVICE, 0.0),
            "exposed_seconds": self.exposed,
            "hidden_seconds": self.hidden,
            "bound": self.bound,
            "bounds": dict(self.bounds),
            "busy": dict(self.busy),
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
                "largest": [{"what": h.what, "bytes": h.bytes} for h in self.memory.largest],
            },
            "communication": [
                {
                    "kind": one.kind,
                    "axes": list(one.axes),
                    "source": one.source,
                    "scope": one.scope,
                    "count": one.count,
                    "seconds": one.seconds,
                    "exposed_seconds": one.exposed,
                    "bytes": one.taken,
                }
                for one in self.communication
            ],
            "operations": [
                {
                    "name": one.scope or one.kind,
                    "kind": one.kind,
                    "source": one.source,
                    "count": one.count,
                    "seconds": one.seconds,
                    "flops": one.flops,
                    "bytes": one.bytes,
                    "bound": one.bound,
                }
                for one in self.operations
            ],
        }

    def __str__(self) -> str:
        """The summary."""

        return "\n".join(summary(self))

    def save_png(self, path: str | Path) -> None:
        """Draw the timeline."""
        from drumline.inspect.picture import draw

        draw(self, Path(path))

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace file that Perfetto opens."""
        from drumline.inspect.trace import write_trace

        write_trace(self, Path(path))


def estimate(
    fn: Any,
    *args: Any,
    on: str,
    mesh: MeshLike | None = None,
    laid: LaidAs | None = None,
    compiler: Compiler = "auto",
) -> Estimate:
    """What one call of a function takes on a slice.

    Args:
        fn: a function, jitted or not; a `jax.stages.Lowered`; or a `jax.stages.Compiled`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        on: the machine: `"v5litepod-8"`, `"2xv6e-256"`, `"H200"`.
        mesh: the mesh to trace under, as JAX has it or as `"X=2,Y=4"`.
        laid: the dimensions of the torus that a mesh axis is to take, by name; the others, and all
            without it, are laid by size. `"tours"` lays them as `drumline.train.make_mesh` does.
        compiler: whose compiler to ask; by itself the TPU's where it is installed.

    Raises:
        UserError: the function does not trace, or does not fit the mesh or the slice.
        UnknownName: there is no such slice.
    """
    target = machine(on)
    program = compiled_for(target, fn, args, mesh=mesh, compiler=compiler)
    return estimate_program(program, target, laid)


def estimate_program(
    program: InspectedProgram, target: Machine, laid: LaidAs | None = None
) -> Estimate:
    """What one call of a compiled program takes on a machine."""
    target = check_fits(target, program.mesh, program.devices)
    network = lay(program.mesh, target, laid)
    scheduled = program.compiler != "cpu"
    timeline = Player(program.module, network, program.groups or program.mesh, scheduled).play()
    totals = _Totals(timeline)
    return Estimate(
        name=program.name,
        on=target.name,
        mesh=program.mesh,
        compiled_by=program.compiled_by,
        seconds=timeline.seconds,
        bounds=totals.bounds,
        busy=totals.busy,
        flops=totals.flops,
        model_flops=totals.model_flops,
        mfu=totals.model_at_peak / timeline.seconds if timeline.seconds else 0.0,
        memory=as_told(program.module, program.memory)
        if program.memory
        else needed(program.module),
        memory_limit=target.memory,
        communication=totals.communication(),
        operations=totals.operations(),
        laid=_where(network),
        at_least=timeline.unknown_turns,
        timeline=timeline,
        machine=target,
    )


def _where(network: Network) -> dict[str, str]:
    return {name: str(where) for name, where in network.axes.items()}


class _Totals:
    """Sums over all turns of all loops."""

    def __init__(self, timeline: Timeline) -> None:
        self.bounds = dict.fromkeys(BOUNDS, 0.0)
        self.busy: dict[str, float] = {}
        self.flops = 0.0
        self.at_peak = 0.0
        self._again: dict[str, float] = {}
        self._once: dict[str, float] = {}
        self._places: dict[tuple[Any, ...], list[tuple[TimelineEvent, int]]] = {}
        for event, times in timeline.flat():
            self._add(event, times)

    def _add(self, event: TimelineEvent, times: int) -> None:
        for resource in event.resource.split("+"):
            self.busy[resource] = self.busy.get(resource, 0.0) + event.seconds * times
        if event.kind in KINDS.values():
            self.bounds["network"] += event.exposed * times
            key: tuple[Any, ...] = (event.kind, event.axes, event.place.source, event.place.scope)
        else:
            # What is copied between memories counts where the device waits for it.
            took = event.exposed if event.resource == COPIES else event.seconds
            self.bounds[event.cost.bound or "overhead"] += took * times
            key = (event.kind, None, event.place.source, event.place.scope)
            self.flops += event.cost.flops * times
            self.at_peak += event.cost.at_peak * times
            if event.cost.recomputed or "transpose(" not in event.place.op_name:
                of = self._again if event.cost.recomputed else self._once
                of[event.place.source] = of.get(event.place.source, 0.0) + event.cost.flops * times
        self._places.setdefault(key, []).append((event, times))

    @property
    def model_flops(self) -> float:
        """Without what is computed again: marked so, and found in the forward pass too."""
        again = sum(min(flops, self._once.get(line, 0.0)) for line, flops in self._again.items())
        return self.flops - again

    @property
    def model_at_peak(self) -> float:
        """Seconds of the model's own products at the peak."""
        return self.at_peak * self.model_flops / self.flops if self.flops else 0.0

    def communication(self) -> tuple[Waiting, ...]:
        found = [
            Waiting(
                kind=kind,
                axes=axes,
                source=source,
                scope=scope,
                count=sum(times for _, times in events),
                seconds=sum(event.seconds * times for event, times in events),
                exposed=sum(event.exposed * times for event, times in events),
                taken=sum(event.cost.bytes * times for event, times in events),
            )
            for (kind, axes, source, scope), events in self._places.items()
            if axes is not None
        ]
        return tuple(sorted(found, key=lambda one: (-one.exposed, -one.seconds)))

    def operations(self) -> tuple[EstimatedOperation, ...]:
        found = []
        for (kind, axes, source, scope), events in self._places.items():
            if axes is not None:
                continue
            longest = max(events, key=lambda item: item[0].seconds * item[1])[0]
            found.append(
                EstimatedOperation(
                    kind=kind,
                    source=source,
                    scope=scope,
                    count=sum(times for _, times in events),
                    seconds=sum(
                        (event.exposed if event.resource == COPIES else event.seconds) * times
                        for event, times in events
                    ),
                    flops=sum(event.cost.flops * times for event, times in events),
                    bytes=sum(event.cost.bytes * times for event, times in events),
                    bound=longest.cost.bound,
                )
            )
        return tuple(sorted(found, key=lambda one: -one.seconds))


def summary(told: Estimate) -> list[str]:
    """At most ten lines."""
    return list(_lines(told))[:10]


def _lines(told: Estimate) -> Iterator[str]:
    least = "at least " if told.at_least else ""
    mesh = f" on {shown(told.mesh)}" if told.mesh else ""
    yield (
        f"{told.name}: {least}{duration(told.seconds)} a call on {told.on}{mesh}, "
        f"MFU {100 * told.mfu:.1f} %, bound by {told.bound}"
    )
    parts = ", ".join(
        f"{name} {share(seconds / told.seconds)}"
        for name, seconds in sorted(told.bounds.items(), key=lambda item: -item[1])
        if told.seconds and seconds / told.seconds >= 0.005
    )
    yield f"  time: {parts}" if parts else "  time: none"
    yield f"  {_communication(told)}"
    for one in told.communication[:2]:
        if told.seconds and one.exposed / told.seconds >= 0.01:
            yield f"  {_waits(told, one)}"
    for operation in told.operations[:2]:
        if operation.seconds > 0:  # a copy that is hidden keeps nothing waiting
            yield f"  {_operation(told, operation)}"
    yield f"  {_memory(told)}"
    if told.laid:
        laid = "; ".join(f"{axis} {where}" for axis, where in told.laid.items())
        yield f"  links: {laid}"
    yield f"  compiled by {told.compiled_by}; times are the model's, not measured"


def _communication(told: Estimate) -> str:
    if not told.communication:
        return "no communication"
    hidden, exposed = told.hidden, told.exposed
    count = sum(one.count for one in told.communication)
    if exposed <= 0.01 * told.seconds:
        return f"communication: {plural(count, 'collective')}, {duration(hidden)}, all hidden"
    return (
        f"communication: {plural(count, 'collective')}, {duration(hidden + exposed)}, of which the "
        f"device waits for {duration(exposed)} ({share(exposed / told.seconds)} of the step)"
    )


def _waits(told: Estimate, one: Waiting) -> str:
    where = one.source.rpartition("/")[2] or one.scope or "an unknown line"
    axes = " and ".join(one.axes) or "the devices"
    # Hidden, it still has to be sent: the links' own time is the least that is left.
    links = max((s for r, s in told.busy.items() if r != "device"), default=0.0)
    left = max(told.seconds - one.exposed, links)
    saved = (told.seconds - left) / told.seconds
    gain = f"; overlapping it would save up to {share(saved)}" if saved >= 0.01 else ""
    part = share(one.exposed / told.seconds)
    return f"{part} of the step waits for {one.kind} over {axes} at {where}{gain}"


def _operation(told: Estimate, one: EstimatedOperation) -> str:
    where = one.source.rpartition("/")[2] or one.scope or "an unknown line"
    part = share(one.seconds / told.seconds) if told.seconds else "0 %"
    rate = ""
    if one.flops:
        used = one.flops / one.seconds / told.machine.peak_flops
        rate = f", {share(used)} of peak"
    elif one.bytes:
        used = one.bytes / one.seconds / told.machine.memory_bandwidth
        rate = f", {share(used)} of the memory's bandwidth"
    return f"{part} is {one.kind} at {where}, bound by {one.bound}{rate}"


def _memory(told: Estimate) -> str:
    memory = told.memory
    verdict = "fits" if told.fits else "does NOT fit"
    text = (
        f"memory: {size(memory.total)} of {size(told.memory_limit)} a device, {verdict}: "
        f"arguments {size(memory.arguments)}, temporaries {size(memory.temporaries)}"
    )
    if memory.largest:
        first = memory.largest[0]
        text += f"; largest: {first.what} ({size(first.bytes)})"
    return text
