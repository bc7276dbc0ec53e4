"""Where the time of a traced step went: computing, waiting for communication, or nothing.

Exposed is the time in which a collective ran and the device computed nothing; hidden is the part of
a collective, from its start to its end, in which the device computed. On a TPU only what stands on
the line of operations counts as exposed: a synchronous collective, and the operations that begin an
asynchronous one and wait for it. On GPUs and CPUs a computation on any stream or thread of the same
device hides it. All figures are seconds of one step, and means over the devices where there are
several.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.errors import UserError
from drumline.inspect.profiles.intervals import Cover, Stretches, exposed, own_stretches
from drumline.inspect.profiles.reading import (
    DeviceTrace,
    Role,
    Trace,
    TraceOperation,
    count_runs,
    read_trace,
)

NANOSECOND = 1e-9


@dataclass(frozen=True)
class MeasuredDevice:
    """The time of one device, in seconds of one step."""

    name: str
    span: float
    """From the first operation to the last, shared among the steps."""
    busy: float
    computing: float
    exposed: float
    hidden: float

    @property
    def idle(self) -> float:
        """Time in which nothing ran."""
        return self.span - self.busy


@dataclass(frozen=True)
class MeasuredCollective:
    """The collectives of one kind on one line of the program."""

    kind: str
    source: str
    count: float
    exposed: float
    hidden: float

    @property
    def seconds(self) -> float:
        """The time in which it ran, exposed or hidden."""
        return self.exposed + self.hidden


@dataclass(frozen=True)
class MeasuredOperation:
    """The computations of one kind on one line of the program."""

    name: str
    """The instruction that took the most time of them."""
    kind: str
    source: str
    count: float
    seconds: float
    instructions: int
    role: Role = Role.COMPUTATION


@dataclass(frozen=True)
class Profile:
    """What a trace says about one step."""

    path: Path
    platform: str
    module: str
    """The program that took the most time."""
    steps: int
    steps_from: str
    """What the steps were counted by."""
    devices: tuple[MeasuredDevice, ...]
    communication: tuple[MeasuredCollective, ...]
    """The most exposed first."""
    operations: tuple[MeasuredOperation, ...]
    """The largest first; collectives are not among them."""

    @property
    def seconds(self) -> float:
        """A step's time."""
        return self._mean([device.span for device in self.devices])

    @property
    def computing(self) -> float:
        """The time in which a device computed."""
        return self._mean([device.computing for device in self.devices])

    @property
    def exposed(self) -> float:
        """The time in which a device waited for communication."""
        return self._mean([device.exposed for device in self.devices])

    @property
    def hidden(self) -> float:
        """The time in which a device computed while a collective ran."""
        return self._mean([device.hidden for device in self.devices])

    @property
    def idle(self) -> float:
        """The time in which a device ran nothing."""
        return self._mean([device.idle for device in self.devices])

    def saving(self, collective: MeasuredCollective) -> float:
        """The most that overlapping a collective could save.

        No more can be hidden than there is computation which hides nothing yet.
        """
        return max(0.0, min(collective.exposed, self.computing - self.hidden))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; times are seconds of one step."""
        return {
            "trace": str(self.path),
            "platform": self.platform,
            "module": self.module,
            "steps": self.steps,
            "steps_from": self.steps_from,
            "seconds": self.seconds,
            "compute_seconds": self.computing,
            "exposed_seconds": self.exposed,
            "hidden_seconds": self.hidden,
            "idle_seconds": self.idle,
            "devices": [
                {
                    "name": each.name,
                    "seconds": each.span,
                    "busy_seconds": each.busy,
                    "compute_seconds": each.computing,
                    "exposed_seconds": each.exposed,
                    "hidden_seconds": each.hidden,
                    "idle_seconds": each.idle,
                }
                for each in self.devices
            ],
            "communication": [
                {
                    "kind": each.kind,
                    "source": each.source,
                    "count": each.count,
                    "seconds": each.seconds,
                    "exposed_seconds": each.exposed,
                    "hidden_seconds": each.hidden,
                    "saving_seconds": self.saving(each),
                }
                for each in self.communication
            ],
            "operations": [
                {
                    "name": each.name,
                    "kind": each.kind,
                    "source": each.source,
                    "count": each.count,
                    "seconds": each.seconds,
                    "instructions": each.instructions,
                }
                for each in self.operations
            ],
        }

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)


def read_profile(path: Path, device: int | None = None) -> Profile:
    """Where the time went in the newest trace under a folder, on all devices or on one."""
    trace = read_trace(path)
    devices = [each for each in trace.devices if device in (None, each.ordinal)]
    if not devices:
        known = sorted({each.ordinal for each in trace.devices})
        raise UserError(
            f"--device {device}: the trace has {_ordinals(known)}; name one of them, or none"
        )
    return attribute(trace, devices)


def _ordinals(known: list[int]) -> str:
    if len(known) == 1:
        return f"device {known[0]} alone"
    if known == list(range(known[0], known[-1] + 1)):
        return f"devices {known[0]} to {known[-1]}"
    return "devices " + ", ".join(map(str, known))


def attribute(trace: Trace, devices: Sequence[DeviceTrace]) -> Profile:
    """Where the time went on some of the trace's devices."""
    measured = [_Measured(trace, device) for device in devices]
    module = _main_module(trace, measured)
    steps, steps_from = _steps(trace, devices, module)
    scale = NANOSECOND / steps
    several = len({device.host for device in trace.devices}) > 1
    return Profile(
        path=trace.path,
        platform=devices[0].platform,
        module=module,
        steps=steps,
        steps_from=steps_from,
        devices=tuple(each.device(scale, several) for each in measured),
        communication=_communication(trace, measured, steps),
        operations=_operations(trace, measured, steps),
    )


class _Measured:
    """The nanoseconds of one device, by operation."""

    def __init__(self, trace: Trace, device: DeviceTrace) -> None:
        self.trace = trace
        self.traced = device
        size = len(trace.operations)
        roles = [operation.role for operation in trace.operations]
        enclosing = {number for number, role in enumerate(roles) if role is Role.ENCLOSING}
        own = Stretches.together(
            [*(own_stretches(track, enclosing) for track in device.tracks), device.handed_on]
        )
        self.span = float(own.ends.max() - own.starts.min()) if len(own.ends) else 0.0
        self.busy = Cover(own.starts, own.ends).length
        computations = own.where(_are(roles, Role.COMPUTATION, Role.ENCLOSING))
        self.computing = Cover(computations.starts, computations.ends)
        running = own.where(_are(roles, Role.COMMUNICATION))
        alone = exposed(running, self.computing)
        self.exposed = np.bincount(running.operations, weights=alone, minlength=size)
        self.flying = Stretches.together([running, device.flights])
        self.times = own.lengths(size)
        self.counts = sum(
            (np.bincount(track.operations, minlength=size) for track in device.events()),
            np.zeros(size, np.int64),
        )
        # Of a collective that began before the trace did, there may be no more than its flight.
        self.seen = (self.counts + np.bincount(self.flying.operations, minlength=size)) > 0

    def device(self, scale: float, several: bool) -> MeasuredDevice:
        traced = self.traced
        where = f"{traced.host} " if several else ""
        return MeasuredDevice(
            name=f"{where}{traced.platform} {traced.ordinal}",
            span=self.span * scale,
            busy=self.busy * scale,
            computing=self.computing.length * scale,
            exposed=float(self.exposed.sum()) * scale,
            hidden=self.hidden(np.ones(len(self.trace.operations), bool)) * scale,
        )

    def hidden(self, chosen: NDArray[np.bool_]) -> float:
        """The time in which one of the chosen collectives ran beside a computation."""
        flying = self.flying.where(chosen)
        together = Cover(flying.starts, flying.ends)
        return float(self.computing.within(together.starts, together.ends).sum())


def _are(roles: list[Role], *chosen: Role) -> NDArray[np.bool_]:
    return np.array([role in chosen for role in roles], bool)


def _main_module(trace: Trace, measured: list[_Measured]) -> str:
    times: dict[str, float] = defaultdict(float)
    for each in measured:
        for number in np.flatnonzero(each.times):
            times[trace.operations[number].module] += float(each.times[number])
    times.pop("", None)
    if not times:
        for each in measured:
            for module, time in each.traced.module_times.items():
                times[module] += time
    return max(times, key=lambda module: times[module]) if times else ""


def _steps(trace: Trace, devices: Sequence[DeviceTrace], module: str) -> tuple[int, str]:
    marked = max(device.steps for device in devices)
    if marked:
        return marked, "the device's steps"
    if trace.annotated:
        return trace.annotated, "StepTraceAnnotation"
    if not module:
        return 1, "the whole trace"
    return max(count_runs(trace, device, module) for device in devices), f"runs of {module}"


def _groups(
    trace: Trace, measured: list[_Measured], *roles: Role
) -> dict[tuple[str, str], list[int]]:
    """The numbers of the operations that ran, by kind and line; without a line, by name."""
    seen = np.any([each.seen for each in measured], axis=0)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number in np.flatnonzero(seen):
        operation = trace.operations[number]
        if operation.role in roles:
            groups[_group(operation)].append(int(number))
    return groups


def _group(operation: TraceOperation) -> tuple[str, str]:
    if operation.source or operation.role is Role.COMMUNICATION:
        return operation.kind, operation.source
    return operation.name, ""


def _communication(
    trace: Trace, measured: list[_Measured], steps: int
) -> tuple[MeasuredCollective, ...]:
    shared = steps * len(measured)
    scale = NANOSECOND / shared
    found = []
    for (kind, source), numbers in _groups(trace, measured, Role.COMMUNICATION).items():
        chosen = np.zeros(len(trace.operations), bool)
        chosen[numbers] = True
        ends = [number for number in numbers if trace.operations[number].is_end]
        begins = [number for number in numbers if not trace.operations[number].is_end]
        counts = [max(each.counts[begins].sum(), each.counts[ends].sum()) for each in measured]
        found.append(
            MeasuredCollective(
                kind=kind,
                source=source,
                count=float(sum(counts)) / shared,
                exposed=sum(float(each.exposed[numbers].sum()) for each in measured) * scale,
                hidden=sum(each.hidden(chosen) for each in measured) * scale,
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.exposed, -each.hidden)))


def _operations(
    trace: Trace, measured: list[_Measured], steps: int
) -> tuple[MeasuredOperation, ...]:
    shared = steps * len(measured)
    scale = NANOSECOND / shared
    times = sum((each.times for each in measured), np.zeros(len(trace.operations)))
    counts = sum((each.counts for each in measured), np.zeros(len(trace.operations), np.int64))
    found = []
    groups = _groups(trace, measured, Role.COMPUTATION, Role.TRANSFER, Role.ENCLOSING)
    for numbers in groups.values():
        largest = trace.operations[max(numbers, key=lambda number: times[number])]
        seconds = float(times[numbers].sum()) * scale
        # A loop that only surrounds others has no time of its own.
        if seconds or largest.role is not Role.ENCLOSING:
            found.append(
                MeasuredOperation(
                    name=largest.name,
                    kind=largest.kind,
                    source=largest.source,
                    count=float(counts[numbers].sum()) / shared,
                    seconds=seconds,
                    instructions=len({trace.operations[number].name for number in numbers}),
                    role=largest.role,
                )
            )
    return tuple(sorted(found, key=lambda each: -each.seconds))
