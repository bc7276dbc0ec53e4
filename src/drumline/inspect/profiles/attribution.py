"""Divide the time of a traced step into computation, exposed communication and idle time.

Exposed time is the time in which a collective runs and the device computes nothing. Hidden time is
the part of a collective, from its start to its end, in which the device computes. On a TPU, only
the line of operations counts as exposed: synchronous collectives, and the operations that start
asynchronous ones and wait for them. On GPUs and CPUs, computation on any stream or thread of the
device hides a collective. All figures are seconds per step, and averages over several devices.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.errors import UserError
from drumline.inspect.profiles.intervals import (
    Intervals,
    IntervalUnion,
    self_intervals,
    uncovered_time,
)
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
    """The time of a device, in seconds per step."""

    name: str
    span: float
    """The time between the first and the last operation, divided by the number of steps."""
    busy: float
    computing: float
    exposed: float
    hidden: float

    @property
    def idle(self) -> float:
        """The idle time."""
        return self.span - self.busy


@dataclass(frozen=True)
class MeasuredCollective:
    """The collectives of a kind and source line, per step."""

    kind: str
    source: str
    count: float
    exposed: float
    hidden: float

    @property
    def seconds(self) -> float:
        """The time in which they run, exposed or hidden."""
        return self.exposed + self.hidden


@dataclass(frozen=True)
class MeasuredOperation:
    """The computations of a kind and source line, per step."""

    name: str
    """The instruction with the most time."""
    kind: str
    source: str
    count: float
    seconds: float
    instructions: int
    role: Role = Role.COMPUTATION


@dataclass(frozen=True)
class Profile:
    """The measured time of a step."""

    path: Path
    platform: str
    module: str
    """The program with the most time."""
    steps: int
    steps_from: str
    """The source of the number of steps."""
    devices: tuple[MeasuredDevice, ...]
    communication: tuple[MeasuredCollective, ...]
    """The collectives, by descending exposed time."""
    operations: tuple[MeasuredOperation, ...]
    """The other operations, by descending time."""

    @property
    def seconds(self) -> float:
        """The duration of a step."""
        return _mean([device.span for device in self.devices])

    @property
    def computing(self) -> float:
        """The time in which a device computes."""
        return _mean([device.computing for device in self.devices])

    @property
    def exposed(self) -> float:
        """The time in which a device waits for communication."""
        return _mean([device.exposed for device in self.devices])

    @property
    def hidden(self) -> float:
        """The time in which a device computes while a collective runs."""
        return _mean([device.hidden for device in self.devices])

    @property
    def idle(self) -> float:
        """The idle time of a device."""
        return _mean([device.idle for device in self.devices])

    def saving(self, collective: MeasuredCollective) -> float:
        """Return the maximum saving from overlapping a collective.

        It is limited by the computation that does not overlap with communication yet.
        """
        return max(0.0, min(collective.exposed, self.computing - self.hidden))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. Times are seconds per step."""
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
                    "name": device.name,
                    "seconds": device.span,
                    "busy_seconds": device.busy,
                    "compute_seconds": device.computing,
                    "exposed_seconds": device.exposed,
                    "hidden_seconds": device.hidden,
                    "idle_seconds": device.idle,
                }
                for device in self.devices
            ],
            "communication": [
                {
                    "kind": collective.kind,
                    "source": collective.source,
                    "count": collective.count,
                    "seconds": collective.seconds,
                    "exposed_seconds": collective.exposed,
                    "hidden_seconds": collective.hidden,
                    "saving_seconds": self.saving(collective),
                }
                for collective in self.communication
            ],
            "operations": [
                {
                    "name": op.name,
                    "kind": op.kind,
                    "source": op.source,
                    "count": op.count,
                    "seconds": op.seconds,
                    "instructions": op.instructions,
                }
                for op in self.operations
            ],
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def read_profile(path: Path, device: int | None = None) -> Profile:
    """Read the newest trace below a folder, for all devices or a single device.

    Raises:
        UserError: there is no trace, it is unreadable, or it does not have the device.
    """
    trace = read_trace(path)
    devices = [traced for traced in trace.devices if device in (None, traced.ordinal)]
    if not devices:
        ordinals = sorted({traced.ordinal for traced in trace.devices})
        raise UserError(
            f"--device {device}: the trace has {_format_ordinals(ordinals)}; name one of them, "
            "or none"
        )
    return attribute_time(trace, devices)


def _format_ordinals(ordinals: list[int]) -> str:
    if len(ordinals) == 1:
        return f"device {ordinals[0]} alone"
    if ordinals == list(range(ordinals[0], ordinals[-1] + 1)):
        return f"devices {ordinals[0]} to {ordinals[-1]}"
    return "devices " + ", ".join(map(str, ordinals))


def attribute_time(trace: Trace, devices: Sequence[DeviceTrace]) -> Profile:
    """Attribute the time of some of the trace's devices."""
    usages = [_DeviceUsage(trace, device) for device in devices]
    module = _main_module(trace, usages)
    steps, steps_from = _count_steps(trace, devices, module)
    several_hosts = len({device.host for device in trace.devices}) > 1
    return Profile(
        path=trace.path,
        platform=devices[0].platform,
        module=module,
        steps=steps,
        steps_from=steps_from,
        devices=tuple(usage.summary(NANOSECOND / steps, several_hosts) for usage in usages),
        communication=_measure_collectives(trace, usages, steps),
        operations=_measure_operations(trace, usages, steps),
    )


class _DeviceUsage:
    """The time of a device, in nanoseconds by operation."""

    def __init__(self, trace: Trace, device: DeviceTrace) -> None:
        self.trace = trace
        self.device = device
        size = len(trace.operations)
        roles = [op.role for op in trace.operations]
        containers = {index for index, role in enumerate(roles) if role is Role.CONTAINER}
        self_times = Intervals.concatenate(
            [*(self_intervals(track, containers) for track in device.tracks), device.offloaded]
        )
        self.span = (
            float(self_times.ends.max() - self_times.starts.min()) if len(self_times.ends) else 0.0
        )
        self.busy = IntervalUnion(self_times.starts, self_times.ends).length
        computations = self_times.select(_role_mask(roles, Role.COMPUTATION, Role.CONTAINER))
        self.computing = IntervalUnion(computations.starts, computations.ends)
        running = self_times.select(_role_mask(roles, Role.COMMUNICATION))
        uncovered = uncovered_time(running, self.computing)
        self.exposed = np.bincount(running.operations, weights=uncovered, minlength=size)
        self.collectives = Intervals.concatenate([running, device.async_spans])
        self.times = self_times.operation_times(size)
        self.counts = sum(
            (np.bincount(track.operations, minlength=size) for track in device.events()),
            np.zeros(size, np.int64),
        )
        # A collective that started before the trace may have only its asynchronous span.
        spans = np.bincount(self.collectives.operations, minlength=size)
        self.seen = (self.counts + spans) > 0

    def summary(self, scale: float, with_host: bool) -> MeasuredDevice:
        device = self.device
        host = f"{device.host} " if with_host else ""
        return MeasuredDevice(
            name=f"{host}{device.platform} {device.ordinal}",
            span=self.span * scale,
            busy=self.busy * scale,
            computing=self.computing.length * scale,
            exposed=float(self.exposed.sum()) * scale,
            hidden=self.hidden(np.ones(len(self.trace.operations), bool)) * scale,
        )

    def hidden(self, mask: NDArray[np.bool_]) -> float:
        """Return the time in which the device computes while a selected collective runs."""
        selected = self.collectives.select(mask)
        running = IntervalUnion(selected.starts, selected.ends)
        return float(self.computing.overlap(running.starts, running.ends).sum())


def _role_mask(roles: list[Role], *selected: Role) -> NDArray[np.bool_]:
    return np.array([role in selected for role in roles], bool)


def _main_module(trace: Trace, usages: list[_DeviceUsage]) -> str:
    totals: dict[str, float] = defaultdict(float)
    for usage in usages:
        for index in np.flatnonzero(usage.times):
            totals[trace.operations[index].module] += float(usage.times[index])
    totals.pop("", None)
    if not totals:
        for usage in usages:
            for module, time in usage.device.module_times.items():
                totals[module] += time
    return max(totals, key=lambda module: totals[module]) if totals else ""


def _count_steps(trace: Trace, devices: Sequence[DeviceTrace], module: str) -> tuple[int, str]:
    device_steps = max(device.steps for device in devices)
    if device_steps:
        return device_steps, "the device's steps"
    if trace.annotated_steps:
        return trace.annotated_steps, "StepTraceAnnotation"
    if not module:
        return 1, "the whole trace"
    return max(count_runs(trace, device, module) for device in devices), f"runs of {module}"


def _group_operations(
    trace: Trace, usages: list[_DeviceUsage], *roles: Role
) -> dict[tuple[str, str], list[int]]:
    """Return the indices of the operations that ran, by kind and line, or by name."""
    seen = np.any([usage.seen for usage in usages], axis=0)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in np.flatnonzero(seen):
        op = trace.operations[index]
        if op.role in roles:
            groups[_group_key(op)].append(int(index))
    return groups


def _group_key(op: TraceOperation) -> tuple[str, str]:
    if op.source or op.role is Role.COMMUNICATION:
        return op.kind, op.source
    return op.name, ""


def _measure_collectives(
    trace: Trace, usages: list[_DeviceUsage], steps: int
) -> tuple[MeasuredCollective, ...]:
    samples = steps * len(usages)
    scale = NANOSECOND / samples
    collectives = []
    groups = _group_operations(trace, usages, Role.COMMUNICATION)
    for (kind, source), indices in groups.items():
        mask = np.zeros(len(trace.operations), bool)
        mask[indices] = True
        ends = [index for index in indices if trace.operations[index].is_end]
        starts = [index for index in indices if not trace.operations[index].is_end]
        counts = [max(usage.counts[starts].sum(), usage.counts[ends].sum()) for usage in usages]
        exposed = sum(float(usage.exposed[indices].sum()) for usage in usages)
        collectives.append(
            MeasuredCollective(
                kind=kind,
                source=source,
                count=float(sum(counts)) / samples,
                exposed=exposed * scale,
                hidden=sum(usage.hidden(mask) for usage in usages) * scale,
            )
        )
    return tuple(sorted(collectives, key=lambda c: (-c.exposed, -c.hidden)))


def _measure_operations(
    trace: Trace, usages: list[_DeviceUsage], steps: int
) -> tuple[MeasuredOperation, ...]:
    samples = steps * len(usages)
    scale = NANOSECOND / samples
    size = len(trace.operations)
    times = sum((device.times for device in usages), np.zeros(size))
    counts = sum((device.counts for device in usages), np.zeros(size, np.int64))
    operations = []
    groups = _group_operations(trace, usages, Role.COMPUTATION, Role.TRANSFER, Role.CONTAINER)
    for indices in groups.values():
        longest = trace.operations[max(indices, key=lambda index: times[index])]
        seconds = float(times[indices].sum()) * scale
        # A loop that only contains other operations has no self time.
        if seconds or longest.role is not Role.CONTAINER:
            operations.append(
                MeasuredOperation(
                    name=longest.name,
                    kind=longest.kind,
                    source=longest.source,
                    count=float(counts[indices].sum()) / samples,
                    seconds=seconds,
                    instructions=len({trace.operations[index].name for index in indices}),
                    role=longest.role,
                )
            )
    return tuple(sorted(operations, key=lambda op: -op.seconds))
