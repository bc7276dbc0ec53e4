"""`estimate`: seconds, bound, exposed communication and memory of a program on a named slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.inspect.collectives import KINDS
from drumline.inspect.compiled import compiled_for
from drumline.inspect.compiling.axes import Axes
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram
from drumline.inspect.cost.machines import Machine, check_fits, machine
from drumline.inspect.cost.memory import Memory, as_told, needed
from drumline.inspect.cost.network import LaidAs, Network, lay
from drumline.inspect.cost.timeline import COPIES, DEVICE, Player, Timeline, TimelineEvent

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
        from drumline.inspect.views.summary import summary

        return "\n".join(summary(self))

    def save_png(self, path: str | Path) -> None:
        """Draw the timeline."""
        from drumline.inspect.views.picture import draw

        draw(self, Path(path))

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace file that Perfetto opens."""
        from drumline.inspect.views.trace import write_trace

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
        UserError: the function does not trace, or the mesh fits neither its arguments nor the slice.
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
